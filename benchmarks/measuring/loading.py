"""Speed of loading audio files into batches of waveforms on one core, in seconds of audio per second."""

import time
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from konkanivani.data.batching import Cursor, EpochPlanner, same_size
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.loader.loading import GlobalBatchStream
from konkanivani.data.loader.workers import LoaderConfig
from konkanivani.data.manifest import read_manifest
from konkanivani.data.rejections import Rejections
from konkanivani.data.text import normalize_text, train_tokenizer

WINDOW_SIZE, MICRO_BATCH, SEED = 8, 2, 1234  # utterances of a global batch and of a micro-batch


@dataclass(frozen=True)
class Loading:
    """Amount of audio that was read, and the speed per second of CPU time and per second of wall time."""

    manifest: str
    speeds: tuple[float, ...]
    utterances: int
    audio_s: float
    audio_s_per_core_s: float
    audio_s_per_s: float

    def sentence(self) -> str:
        """Return the result as text."""
        return (
            f"{self.utterances} utterances, {self.audio_s:.0f} s of audio at speeds {self.speeds}: "
            f"{self.audio_s_per_core_s:.0f} audio s a second of one core ({self.audio_s_per_s:.0f} by the clock)"
        )


def measure(manifest: str, utterances: int, speeds: tuple[float, ...]) -> Loading:
    """Read the first `utterances` utterances twice, and time the second pass."""
    torch.set_num_threads(1)  # the speed of a single core is measured
    rows = list(islice(read_manifest(manifest), utterances))
    # A transcript may become empty by normalisation; training rejects such rows.
    rows = [row for row in rows if normalize_text(row.text)]
    tokenizer = train_tokenizer([normalize_text(row.text) for row in rows], "char", 10_000)
    speech = TrainDataset(rows, tokenizer, speeds, SEED, manifest)
    planner = EpochPlanner(np.array([row.duration for row in rows]), WINDOW_SIZE, SEED)
    # No workers: `process_time` counts this process only.
    loader = LoaderConfig(workers=0, timeout=60.0, pin_memory=False)
    stream = GlobalBatchStream(speech, planner, same_size(MICRO_BATCH), loader, Rejections(None, most=1.0))
    count = planner.global_batches_per_epoch()
    with closing(stream.from_cursor(Cursor(0, 0))) as global_batches:
        for _ in islice(global_batches, count):
            pass
        # The first pass was a warm-up; among others, the files are in the page cache now.
        began, used = time.perf_counter(), time.process_time()
        for _ in islice(global_batches, count):
            pass
        seconds, core_seconds = time.perf_counter() - began, time.process_time() - used
    audio = float(planner.durations.sum())
    rates = round(audio / core_seconds, 1), round(audio / seconds, 1)
    return Loading(manifest, speeds, len(rows), round(audio, 1), *rates)
