"""The plan of an epoch: which utterances form which optimizer step, and how a step is cut into micro-batches."""

import zlib
from dataclasses import dataclass

import numpy as np
import torch

from konkanivani.data.batch import Speech, Window, collate
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.randomness import seed_of

MOST_BUCKETS = 50


@dataclass(frozen=True, order=True)
class Cursor:
    """A position in the data: `window` windows of epoch `epoch` (from 0) have been consumed."""

    epoch: int
    window: int


@dataclass(frozen=True)
class EpochPlanner:
    """Everything that the plan of any epoch follows from. `durations` are seconds, one an utterance."""

    durations: np.ndarray
    window_size: int
    seed: int

    def plan_epoch(self, epoch: int) -> list[np.ndarray]:
        """The epoch's windows: arrays of utterance indices, each utterance once, utterances of like length together.

        Pure in (seed, epoch). Utterances are shuffled, sorted into buckets of like duration, and dealt out bucket by
        bucket; the windows are then shuffled, the ragged one last.
        """
        generator = np.random.default_rng(seed_of(self.seed, "plan", epoch))
        order = generator.permutation(len(self.durations))
        order = order[np.argsort(self._buckets()[order], kind="stable")]
        windows = [order[i : i + self.window_size] for i in range(0, len(order), self.window_size)]
        ragged = [windows.pop()] if len(windows[-1]) < self.window_size else []
        return [windows[i] for i in generator.permutation(len(windows))] + ragged

    def windows_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return -(-len(self.durations) // self.window_size)

    def digest(self) -> int:
        """A number that changes when any plan does."""
        return zlib.crc32(repr((self.window_size, self.seed)).encode(), zlib.crc32(self.durations.tobytes()))

    def _buckets(self) -> np.ndarray:
        """The bucket of each utterance: buckets hold equally many, at least four windows' worth."""
        count = int(np.clip(len(self.durations) // (4 * self.window_size), 1, MOST_BUCKETS))
        rank = np.empty(len(self.durations), dtype=np.int64)
        rank[np.argsort(self.durations, kind="stable")] = np.arange(len(self.durations))
        return rank * count // len(self.durations)


def plan_evaluation(durations: np.ndarray, batch_seconds: float) -> list[np.ndarray]:
    """Batches of utterance indices, longest first, each at most `batch_seconds` of padded audio (or one utterance)."""
    batches: list[list[int]] = []
    for index in np.argsort(-durations, kind="stable"):
        if batches and durations[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_seconds:
            batches[-1].append(int(index))
        else:
            batches.append([int(index)])
    return [np.array(batch) for batch in batches]


@dataclass(frozen=True)
class SizeLimit:
    """Utterances of up to `seconds` go at most `utterances` at once."""

    seconds: float
    utterances: int


def same_size(utterances: int) -> tuple[SizeLimit, ...]:
    """So many at once, whatever their length."""
    return (SizeLimit(float("inf"), utterances),)


def largest_size(seconds: float, limits: tuple[SizeLimit, ...]) -> int:
    """How many utterances of up to `seconds` go at once; one where they are longer than any limit says."""
    return next((limit.utterances for limit in limits if seconds <= limit.seconds), 1)


def cut_window(speeches: list[Speech], limits: tuple[SizeLimit, ...], start: int, end: int) -> Window:
    """The window in micro-batches of utterances of like length, each as large as its longest one allows.

    `limits` ascend in seconds. The shortest utterances come first; the last micro-batch may be smaller.
    """
    pieces: list[list[Speech]] = []
    for speech in sorted(speeches, key=lambda speech: (len(speech.waveform), speech.utterance_id)):
        if pieces and len(pieces[-1]) < largest_size(speech.seconds, limits):
            pieces[-1].append(speech)
        else:
            pieces.append([speech])
    micro_batches = tuple(collate(piece, start, end) for piece in pieces)
    samples = sum(len(speech.waveform) for speech in speeches)
    padded = sum(batch.waveforms.numel() for batch in micro_batches)
    return Window(
        micro_batches=micro_batches,
        tokens=sum(len(speech.tokens) for speech in speeches),
        utterances=len(speeches),
        audio_seconds=samples / SAMPLE_RATE,
        padding_share=1 - samples / padded,
    )


def choose_subset(count: int, percent: float, seed: int) -> np.ndarray:
    """Indices of `percent` of `count` utterances (at least one), in order; the same for the same seed."""
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(seed, "subset")))
    return np.sort(chosen[: max(1, round(count * percent / 100))].numpy())
