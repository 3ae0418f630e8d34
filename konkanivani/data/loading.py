"""Utterances read, resampled and batched by worker processes, from any cursor onward."""

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from konkanivani.audio import load_audio
from konkanivani.audio_file import UnusableAudio
from konkanivani.augment import choose_speed, perturb_speed
from konkanivani.data.batch import Batch, Speech, Window, collate
from konkanivani.data.batching import Cursor, EpochPlanner, SizeLimit, cut_window
from konkanivani.data.rejections import Rejection, Rejections
from konkanivani.data.surroundings import Surroundings
from konkanivani.data.utterance import Utterance
from konkanivani.errors import DataError, ResourceError
from konkanivani.randomness import seed_of, utterance_generator
from konkanivani.text import Tokenizer

POLL_SECONDS = 1.0  # after so long without a batch, the workers are looked after
END_SECONDS = 1.0  # that the workers have to end by themselves
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class LoaderConfig:
    """How the loader runs; none of it changes what is loaded."""

    workers: int
    timeout: float
    pin_memory: bool


@dataclass(frozen=True)
class TrainingSpeech(Dataset):
    """Map-style: (epoch, index) -> Speech, or a Rejection.

    Speed-perturbed, then put into surroundings; random only in (seed, epoch, utterance).
    """

    utterances: Sequence[Utterance]
    tokenizer: Tokenizer
    speeds: tuple[float, ...]
    seed: int
    manifest: str = ""
    surroundings: Surroundings = Surroundings()

    def __getitem__(self, key: tuple[int, int]) -> Speech | Rejection:
        epoch, index = key
        utterance = self.utterances[index]
        waveform = _read(utterance, self.manifest)
        if isinstance(waveform, Rejection):
            return waveform
        speed = choose_speed(self.speeds, utterance_generator(self.seed, epoch, utterance.id, "speed"))
        waveform = self.surroundings(perturb_speed(waveform, speed), epoch, utterance.id)
        seed = seed_of(self.seed, epoch, "specaugment", utterance.id)
        return Speech(utterance.id, waveform, self.tokenizer.encode(utterance.text), seed)


@dataclass(frozen=True)
class EvaluationSpeech(Dataset):
    """Map-style: index -> Speech as it is in the file, or a Rejection."""

    utterances: Sequence[Utterance]
    tokenizer: Tokenizer
    manifest: str = ""

    def __getitem__(self, index: int) -> Speech | Rejection:
        utterance = self.utterances[index]
        waveform = _read(utterance, self.manifest)
        if isinstance(waveform, Rejection):
            return waveform
        return Speech(utterance.id, waveform, self.tokenizer.encode(utterance.text), None)


def _read(utterance: Utterance, manifest: str) -> torch.Tensor | Rejection:
    """The utterance's waveform (S,), or why it is left out after all."""
    try:
        return load_audio(utterance.source)
    except UnusableAudio as error:
        return Rejection(manifest, utterance.row, utterance.id, error.reason, is_broken=True)


@dataclass(frozen=True)
class Loaded:
    """What was made of some utterances (None: none of them could be read), and those that were left out.

    An `error` comes back as a sentence, since a worker's exceptions lose theirs on the way.
    """

    value: Window | Batch | None
    rejections: tuple[Rejection, ...]
    error: str = ""

    def pin_memory(self) -> "Loaded":
        """The same in page-locked memory (the DataLoader calls this for CUDA)."""
        return dataclasses.replace(self, value=self.value and self.value.pin_memory())


class _Fetcher(Dataset):
    """A whole window or batch per item. `being_read` (workers,) is the utterance that each worker reads now, or -1."""

    def __init__(
        self, speech: TrainingSpeech | EvaluationSpeech, limits: tuple[SizeLimit, ...] | None, workers: int
    ) -> None:
        self.speech, self.limits = speech, limits
        self.being_read = torch.full((workers,), -1).share_memory_()

    def __getitem__(self, keys: list) -> Loaded:
        worker = get_worker_info()
        found = []
        for key in keys:
            if worker:
                self.being_read[worker.id] = key[1] if isinstance(key, tuple) else key
            try:
                found.append(self.speech[key])
            except DataError as error:
                return Loaded(None, (), str(error))
        if worker:
            self.being_read[worker.id] = -1
        speeches = [speech for speech in found if isinstance(speech, Speech)]
        rejections = tuple(rejection for rejection in found if isinstance(rejection, Rejection))
        return Loaded(self._combined(speeches) if speeches else None, rejections)

    def _combined(self, speeches: list[Speech]) -> Window | Batch:
        if self.limits is None:
            return collate(speeches, Tokenizer.start, Tokenizer.end)
        return cut_window(speeches, self.limits, Tokenizer.start, Tokenizer.end)


class WindowStream:
    """The training data from any cursor onward, epoch after epoch, each window with the cursor behind it."""

    def __init__(
        self,
        speech: TrainingSpeech,
        planner: EpochPlanner,
        limits: tuple[SizeLimit, ...],
        loader: LoaderConfig,
        rejections: Rejections,
    ) -> None:
        self.speech, self.planner, self.limits, self.loader = speech, planner, limits, loader
        self.rejections = rejections

    def from_cursor(self, cursor: Cursor, check: Callable[[], None] = lambda: None) -> Iterator[tuple[Window, Cursor]]:
        """Endless. Closing the generator ends the workers. A window of which nothing can be read is passed over.

        `check` is called before each window and while one is waited for; what it raises ends the waiting.
        """
        fetcher = _Fetcher(self.speech, self.limits, self.loader.workers)
        with closing(_load(fetcher, self.planned(cursor), self.loader, check)) as loaded:
            for found, behind in zip(loaded, self.planner.cursors_behind(cursor), strict=False):
                self.rejections.add(found.rejections)
                if found.value is not None:
                    yield found.value, behind

    def planned(self, cursor: Cursor) -> Iterator[list[tuple[int, int]]]:
        """The keys of each window from the cursor on; the loader runs ahead of the loop."""
        epoch, consumed = cursor.epoch, cursor.window
        while True:
            plan = self.planner.plan_epoch(epoch)
            for number in range(consumed, len(plan)):
                yield [(epoch, int(index)) for index in np.sort(plan[number])]  # as they lie in their files
            epoch, consumed = epoch + 1, 0


def load_batches(
    speech: EvaluationSpeech,
    plan: list[np.ndarray],
    loader: LoaderConfig,
    rejections: Rejections,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Batch, list[Utterance]]]:
    """The planned evaluation batches in order, each with its utterances; those that cannot be read are left out.

    `check` as for a WindowStream.
    """
    keys = ([int(number) for number in batch] for batch in plan)
    with closing(_load(_Fetcher(speech, None, loader.workers), keys, loader, check)) as loaded:
        for found, numbers in zip(loaded, plan, strict=True):
            rejections.add(found.rejections)
            if found.value is not None:
                left_out = {rejection.row for rejection in found.rejections}
                utterances = [speech.utterances[int(number)] for number in numbers]
                yield found.value, [utterance for utterance in utterances if utterance.row not in left_out]


def _load(fetcher: _Fetcher, keys: Iterator[list], loader: LoaderConfig, check: Callable[[], None]) -> Iterator[Loaded]:
    batches = DataLoader(
        fetcher,
        sampler=keys,
        batch_size=None,
        num_workers=loader.workers,
        timeout=min(POLL_SECONDS, loader.timeout) if loader.workers else 0,
        pin_memory=loader.pin_memory,
        worker_init_fn=_begin_worker,
        generator=torch.Generator(),  # the default one belongs to the training step
    )
    with _no_exceptions_from_signals(), _signals_held_back():
        iterator = iter(batches)
    try:
        while (loaded := _next(iterator, fetcher, loader, check)) is not None:
            if loaded.error:
                raise DataError(loaded.error)
            yield loaded
    finally:
        # Left to the garbage collector, workers that ignore SIGTERM keep a process from ending.
        if loader.workers:
            # One that hangs has not heard of it, and would be waited for 5 s. Not before its pinning thread has ended.
            patience = threading.Timer(END_SECONDS, _kill, [iterator._workers])
            patience.start()
            iterator._shutdown_workers()
            patience.cancel()
            _kill(iterator._workers)


def _kill(workers: list[multiprocessing.Process]) -> None:
    for worker in workers:
        worker.kill()
        worker.join()


@contextmanager
def _no_exceptions_from_signals() -> Iterator[None]:
    """Takes back the DataLoader's handler of SIGCHLD, which raises in the middle of whatever runs, a step or a save.

    A worker's death is seen all the same: where its work is waited for.
    """
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Delivers SIGINT and SIGTERM afterwards: a worker that is forked within is born deaf to both."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _next(
    iterator: Iterator[Loaded], fetcher: _Fetcher, loader: LoaderConfig, check: Callable[[], None]
) -> Loaded | None:
    """What the loader gives next, None at its end; a ResourceError names what a worker was reading when it failed."""
    deadline = time.monotonic() + loader.timeout
    while True:
        check()
        try:
            return next(iterator, None)
        except (RuntimeError, OSError, EOFError) as error:
            # A connection that breaks off is how a death shows where a worker's tensor was just being taken over.
            if not loader.workers or (isinstance(error, RuntimeError) and "DataLoader" not in str(error)):
                raise
            is_late = "timed out" in str(error)
            if is_late and time.monotonic() < deadline:
                continue
            numbers = [number for number in fetcher.being_read.tolist() if number >= 0]
            reading = ", ".join(fetcher.speech.utterances[number].id for number in numbers)
            reason = str(error).splitlines()[0].rstrip(".") if isinstance(error, RuntimeError) else "a worker has died"
            reason = f"nothing came for {loader.timeout:g} s" if is_late else reason
        raise ResourceError(
            f"The audio workers failed{f' while they were reading {reading}' if reading else ''}: {reason}. "
            "Try --num_workers 0 to see what is wrong with it, or a longer --loader_timeout."
        )


def _begin_worker(_worker: int) -> None:
    """Ctrl-C reaches the whole process group; the training process alone decides when its workers end.

    They do not outlive it, however it ends: not even one that hangs in a read.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != multiprocessing.parent_process().pid:  # it had ended before that was said
        os._exit(1)
