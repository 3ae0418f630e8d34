"""Long recordings made by concatenation of utterances, and the memory and time of their transcription."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.data.audio.waveform import load_audio
from konkanivani.data.manifest import read_manifest
from konkanivani.data.utterance import Utterance
from konkanivani.inference.recognizer import Recognizer
from konkanivani.memory.monitor import peak_resident_mib, resident_mib


@dataclass(frozen=True)
class Run:
    """Cost of transcribing a file: growth of resident memory over the process with its model, in MiB, and seconds."""

    rss_growth_mib: float
    seconds: float
    segments: int
    text: str


def transcribe(recognizer: Recognizer, path: Path) -> Run:
    """Transcribe a file and return the cost and the text."""
    before, started, texts = resident_mib(), time.perf_counter(), []
    for segment in recognizer.segments(path):  # only texts are kept, or the segments would count as growth
        texts.append(segment.text)
    # `segments` is a generator: the work is done in the loop.
    seconds = time.perf_counter() - started
    return Run(round(peak_resident_mib() - before, 1), round(seconds, 4), len(texts), " ".join(texts))


def utterances_for(manifest: str, seconds: float, gap_seconds: float) -> list[Utterance]:
    """Return the utterances of a manifest, repeated in order until they and the gaps after them last `seconds`."""
    known, found, total = list(read_manifest(manifest)), [], 0.0
    while total < seconds:
        found.append(known[len(found) % len(known)])
        total += found[-1].duration + gap_seconds
    return found


def write_long_file(path: Path, utterances: list[Utterance], gap_seconds: float) -> float:
    """Write the utterances to a FLAC file, 16 kHz mono, with zeros in the gaps; return its length in seconds."""
    gap = np.zeros(round(gap_seconds * SAMPLE_RATE), dtype=np.float32)
    with soundfile.SoundFile(path, "w", SAMPLE_RATE, 1, "PCM_16", format="FLAC") as file:
        for utterance in utterances:
            file.write(load_audio(utterance.source).numpy())
            file.write(gap)
        return file.frames / SAMPLE_RATE
