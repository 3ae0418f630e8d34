"""Utterances read, resampled and batched by worker processes, from any cursor onward."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from konkanivani.audio import load_audio
from konkanivani.augment import choose_speed, perturb_speed
from konkanivani.data.batch import Batch, Speech, Window, collate
from konkanivani.data.batching import Cursor, EpochPlanner, SizeLimit, cut_window
from konkanivani.data.checking import encoder_frames
from konkanivani.data.manifest import Utterance
from konkanivani.data.surroundings import Surroundings
from konkanivani.errors import DataError, ResourceError
from konkanivani.lengths import SAMPLE_RATE, ctc_frames_needed
from konkanivani.randomness import seed_of, utterance_generator
from konkanivani.text import Tokenizer


@dataclass(frozen=True)
class LoaderConfig:
    """How the loader runs; none of it changes what is loaded."""

    workers: int
    timeout: float
    pin_memory: bool


@dataclass(frozen=True)
class TrainingSpeech(Dataset):
    """Map-style: (epoch, index) -> Speech, speed-perturbed, then in its surroundings; random only in (seed, epoch,
    utterance)."""

    utterances: list[Utterance]
    tokenizer: Tokenizer
    speeds: tuple[float, ...]
    seed: int
    surroundings: Surroundings = Surroundings()

    def __getitem__(self, key: tuple[int, int]) -> Speech:
        epoch, index = key
        utterance = self.utterances[index]
        speed = choose_speed(self.speeds, utterance_generator(self.seed, epoch, utterance.id, "speed"))
        waveform = self.surroundings(perturb_speed(load_audio(utterance.source), speed), epoch, utterance.id)
        seed = seed_of(self.seed, epoch, "specaugment", utterance.id)
        return _checked(Speech(utterance.id, waveform, self.tokenizer.encode(utterance.text), seed), utterance)


@dataclass(frozen=True)
class EvaluationSpeech(Dataset):
    """Map-style: index -> Speech as it is in the file."""

    utterances: list[Utterance]
    tokenizer: Tokenizer

    def __getitem__(self, index: int) -> Speech:
        utterance = self.utterances[index]
        tokens = self.tokenizer.encode(utterance.text)
        return _checked(Speech(utterance.id, load_audio(utterance.source), tokens, None), utterance)


def _checked(speech: Speech, utterance: Utterance) -> Speech:
    """The speech, unless the file is so much shorter than its manifest says that CTC cannot align it."""
    if encoder_frames(len(speech.waveform) / SAMPLE_RATE, 1.0) < max(1, ctc_frames_needed(speech.tokens)):
        raise DataError(
            f"The audio file {utterance.audio_path} holds {len(speech.waveform) / SAMPLE_RATE:.2f} s, too short for "
            f"its {len(speech.tokens)} tokens; its manifest says {utterance.duration:.2f} s. Mend the row."
        )
    return speech


@dataclass(frozen=True)
class _Fetcher(Dataset):
    """A whole window or batch per item; a DataError comes back as a value, since workers wrap what they raise."""

    speech: TrainingSpeech | EvaluationSpeech
    limits: tuple[SizeLimit, ...] | None

    def __getitem__(self, keys: list) -> Window | Batch | DataError:
        try:
            speeches = [self.speech[key] for key in keys]
        except DataError as error:
            return error
        if self.limits is None:
            return collate(speeches, Tokenizer.start, Tokenizer.end)
        return cut_window(speeches, self.limits, Tokenizer.start, Tokenizer.end)


class WindowStream:
    """The training data from any cursor onward, epoch after epoch, each window with the cursor behind it."""

    def __init__(
        self, speech: TrainingSpeech, planner: EpochPlanner, limits: tuple[SizeLimit, ...], loader: LoaderConfig
    ) -> None:
        self.speech, self.planner, self.limits, self.loader = speech, planner, limits, loader

    def from_cursor(self, cursor: Cursor) -> Iterator[tuple[Window, Cursor]]:
        """Endless. Closing the generator ends the workers."""
        keys = (keys for _, keys in self._planned(cursor))
        behind = (position for position, _ in self._planned(cursor))
        windows = _load(_Fetcher(self.speech, self.limits), keys, self.loader)
        # The planned cursors are drawn a second time because the loader runs ahead of the loop.
        yield from zip(windows, behind, strict=False)

    def _planned(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[tuple[int, int]]]]:
        epoch, consumed = cursor.epoch, cursor.window
        while True:
            plan = self.planner.plan_epoch(epoch)
            for number in range(consumed, len(plan)):
                last = number + 1 == len(plan)
                behind = Cursor(epoch + 1, 0) if last else Cursor(epoch, number + 1)
                yield behind, [(epoch, int(index)) for index in plan[number]]
            epoch, consumed = epoch + 1, 0


def load_batches(speech: EvaluationSpeech, plan: list[np.ndarray], loader: LoaderConfig) -> Iterator[Batch]:
    """The planned evaluation batches, in order."""
    return _load(_Fetcher(speech, None), ([int(index) for index in batch] for batch in plan), loader)


def _load(fetcher: _Fetcher, keys: Iterator[list], loader: LoaderConfig) -> Iterator:
    batches = DataLoader(
        fetcher,
        sampler=keys,
        batch_size=None,
        num_workers=loader.workers,
        timeout=loader.timeout if loader.workers else 0,
        pin_memory=loader.pin_memory,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # the default one belongs to the training step
    )
    iterator = iter(batches)
    try:
        while True:
            batch = _next_batch(iterator)
            if batch is None:
                return
            yield batch
    finally:
        # Left to the garbage collector, workers that ignore SIGTERM keep a process from ending.
        if loader.workers:
            iterator._shutdown_workers()


def _next_batch(iterator: Iterator) -> Window | Batch | None:
    """The loader's next batch, None at its end; errors of the data and of the workers are raised."""
    try:
        batch = next(iterator, None)
    except RuntimeError as error:
        if "DataLoader" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ResourceError(
            f"The audio workers failed: {reason}. Try --num_workers 0 or a longer --loader_timeout."
        ) from None
    if isinstance(batch, DataError):
        raise DataError(str(batch))
    return batch


def _ignore_signals(_worker: int) -> None:
    """Ctrl-C reaches the whole process group; the training process alone decides when its workers end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
