"""A long recording glued from utterances, and what transcribing it takes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from konkanivani.audio import load_audio
from konkanivani.data.manifest import read_manifest
from konkanivani.data.utterance import Utterance
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import peak_resident_mib, resident_mib
from konkanivani.metrics import ErrorRates, error_rates
from konkanivani.recognizer import Recognizer

WARM_UP_SECONDS = 3.0


@dataclass(frozen=True)
class LongFile:
    """What was measured: memory in MiB above the process with its model; `rates` against what the file says."""

    seconds: float
    segments: int
    rss_growth_mib: float
    times_real_time: float
    wer: float
    cer: float


def utterances_for(manifest: str, seconds: float, gap_seconds: float) -> list[Utterance]:
    """The manifest's utterances in their order, again and again, until they last so long with a gap after each."""
    known, found, total = list(read_manifest(manifest)), [], 0.0
    while total < seconds:
        found.append(known[len(found) % len(known)])
        total += found[-1].duration + gap_seconds
    return found


def write_long_file(path: Path, utterances: list[Utterance], gap_seconds: float) -> None:
    """Writes the utterances to one FLAC file, 16 kHz mono, zeros in the gaps."""
    gap = np.zeros(round(gap_seconds * SAMPLE_RATE), dtype=np.float32)
    with soundfile.SoundFile(path, "w", SAMPLE_RATE, 1, "PCM_16", format="FLAC") as file:
        for utterance in utterances:
            file.write(load_audio(utterance.source).numpy())
            file.write(gap)
