#!/usr/bin/env python3
"""Measure how much the features of speech change under each recording condition, without training a model.

    python3 benchmarks/recording_features.py data/builtin/valid.jsonl

Printed is, for each kind of features, the root mean square change over the frames within 25 dB of the loudest one, as a
multiple of the standard deviation of the unchanged features in these frames. Speed is left out: it moves the frames.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import torch
import tyro

from konkanivani.command_line import read_flags, run_script
from konkanivani.console import table_lines
from konkanivani.data.audio.effects import CONDITIONS
from konkanivani.data.audio.waveform import load_audio
from konkanivani.data.manifest import read_manifest
from konkanivani.flags import LEGACY_DEFAULTS
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.front_end import LogMel

OLD = LEGACY_DEFAULTS.features
NEW = dataclasses.replace(OLD, dynamic_range=80.0, dc_removal="frame", smallest_power=1e-16)
KINDS = {
    "whole utterance": OLD,
    "with floor, no DC": NEW,
    "speech": dataclasses.replace(NEW, normalization="speech"),
    "peak": dataclasses.replace(NEW, normalization="peak"),
}
SPEECH_DB = 25.0
# Frames that a condition adds before the speech.
ADDED = {"digital_silence": SAMPLE_RATE // OLD.hop_samples}
TIMES_CHANGED = ("slower", "faster")


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    manifest: Annotated[str, tyro.conf.Positional]
    """JSONL manifest."""
    utterances: int = 40
    """Number of utterances, from the first one on."""


def features(log_mel: LogMel, waveform: torch.Tensor) -> torch.Tensor:
    """Return the features (T, F) of a waveform (S,)."""
    return log_mel(waveform[None], (len(waveform),))[0][0]


def speech_frames(waveform: torch.Tensor, log_mel: LogMel) -> torch.Tensor:
    """Return which frames (T,) are within SPEECH_DB of the loudest one."""
    energy = log_mel.power(waveform[None])[0].sum(dim=0)
    return energy > energy.max() * 10 ** (-SPEECH_DB / 10)


def compare(flags: Flags) -> str:
    """Return a table with a row per condition and a column per kind of features."""
    changes: dict[tuple[str, str], list[float]] = defaultdict(list)
    extractors = {kind: LogMel(config) for kind, config in KINDS.items()}
    conditions = [condition for condition in CONDITIONS[1:] if condition.name not in TIMES_CHANGED]
    for utterance in islice(read_manifest(flags.manifest), flags.utterances):
        waveform = load_audio(utterance.source)
        is_speech = speech_frames(waveform, extractors["whole utterance"])
        changed = {condition.name: condition.apply(waveform, utterance.id) for condition in conditions}
        for kind, log_mel in extractors.items():
            usual = features(log_mel, waveform)
            variance = usual[is_speech].var(dim=0, correction=0).mean()
            for name, other in changed.items():
                first = ADDED.get(name, 0)
                difference = features(log_mel, other)[first : first + len(usual)] - usual
                changes[name, kind].append(float((difference[is_speech].square().mean() / variance).sqrt()))
    rows = [("condition", *KINDS)]
    for condition in conditions:
        means = [sum(found) / len(found) for found in (changes[condition.name, kind] for kind in KINDS)]
        rows.append((condition.name, *(f"{mean:.2f}" for mean in means)))
    return "\n".join(table_lines(rows))


if __name__ == "__main__":
    sys.exit(run_script(lambda: compare(read_flags(Flags, sys.argv[1:]))))
