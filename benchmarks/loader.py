#!/usr/bin/env python3
"""Measure how much audio one core reads, speed-perturbs and batches, in seconds of audio per second.

    python3 benchmarks/loader.py --manifest data/builtin/train.jsonl

Uses the trainer's dataset and batches on one thread, without a worker process. After the first round, which is not
counted, the files are in the page cache. Use a manifest of 16 kHz files to exclude resampling.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
from dataclasses import dataclass

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    manifest: str
    """JSONL manifest."""
    utterances: int = 400
    """Number of utterances, from the first one."""
    speed_perturbation: tuple[float, ...] = (0.9, 1.0, 1.1)
    """Playing speeds to choose from."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""


def measure_loader(flags: Flags) -> str:
    """Return the report."""
    if flags.utterances < 1 or not all(0.5 <= speed <= 2 for speed in flags.speed_perturbation):
        raise UsageError("--utterances must be at least 1, and the speeds lie between 0.5 and 2.")
    from benchmarks.measuring.loading import measure

    result = measure(flags.manifest, flags.utterances, flags.speed_perturbation)
    return json.dumps(dataclasses.asdict(result)) if flags.json else result.sentence()


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure_loader(flags)))
