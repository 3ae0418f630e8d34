"""Worker processes that read and batch: what they make, in order, and what becomes of one that dies or hangs."""

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import TracebackType

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from tqdm import tqdm

from konkanivani.base.errors import DataError, KonkaniVaniError, ResourceError
from konkanivani.base.signals import defer_signals, stopping_signals
from konkanivani.data.batch import Batch, Example, GlobalBatch, check_tokens, collate
from konkanivani.data.batching import SizeLimit, split_into_micro_batches
from konkanivani.data.dataset import EvalDataset, TrainDataset
from konkanivani.data.loader.packed import Packed, pack
from konkanivani.data.rejections import Rejection

POLL_SECONDS = 1.0  # after so long without a batch, the workers are looked after
END_SECONDS = 1.0  # that the workers have to end by themselves
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SIGNS_OF_WORKERS = ("DataLoader", "Pin memory thread")  # in PyTorch's errors about a worker that failed


@dataclass(frozen=True)
class LoaderConfig:
    """How the loader runs; none of it changes what is loaded. `ahead`: items that each worker makes in advance."""

    workers: int
    timeout: float
    pin_memory: bool
    ahead: int = 2


@dataclass(frozen=True)
class Loaded:
    """What was made of some utterances (None: none of them could be read), and those that were left out.

    A worker packs it. An `error` comes back as a value, since what a worker raises loses its sentence on the way.
    """

    value: GlobalBatch | Batch | Packed | None
    rejections: tuple[Rejection, ...]
    error: KonkaniVaniError | None = None

    def pin_memory(self) -> "Loaded":
        """The same in page-locked memory (the DataLoader calls this for CUDA)."""
        return dataclasses.replace(self, value=self.value and self.value.with_each(torch.Tensor.pin_memory))

    def unpack(self) -> "Loaded":
        """The same as if no worker had made it."""
        return dataclasses.replace(self, value=self.value.unpack()) if isinstance(self.value, Packed) else self


class WorkersFailed(ResourceError):
    """An audio worker was killed, by the system where memory was short or by what it read, or it hangs."""

    def __init__(self, what: str, has_died: bool) -> None:
        super().__init__(
            f"{what}. Use --num_workers 0 to see the error, or a longer --loader_timeout; then resume with "
            "--resume auto."
        )
        self.what, self.has_died = what, has_died


class Fetcher(Dataset):
    """A whole window or batch per item. `being_read` (workers,) is the utterance that each worker reads now, or -1."""

    def __init__(self, speech: TrainDataset | EvalDataset, limits: tuple[SizeLimit, ...] | None, workers: int) -> None:
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
                return Loaded(None, (), error)
        if worker:
            self.being_read[worker.id] = -1
        speeches = [speech for speech in found if isinstance(speech, Example)]
        rejections = tuple(rejection for rejection in found if isinstance(rejection, Rejection))
        try:
            value = self._combined(speeches) if speeches else None
            if worker and value:
                value = _pack(value, self.ids(keys))
            return Loaded(value, rejections)
        except (DataError, ResourceError) as error:
            return Loaded(None, (), error)

    def ids(self, keys: list) -> list[str]:
        """The utterances of an item's keys by name."""
        return [self.speech.utterances[key[1] if isinstance(key, tuple) else key].id for key in keys]

    def _combined(self, speeches: list[Example]) -> GlobalBatch | Batch:
        for speech in speeches:
            check_tokens(speech, self.speech.tokenizer.size, self.speech.tokenizer.special)
        if self.limits is None:
            return collate(speeches, self.speech.tokenizer.special)
        return split_into_micro_batches(speeches, self.limits, self.speech.tokenizer.special)


def _pack(value: GlobalBatch | Batch, ids: list[str]) -> Packed:
    """What a worker has made, in shared memory; a ResourceError where that is full.

    The queue would move it there too, in a thread whose errors nobody sees.
    """
    try:
        return pack(value)
    except RuntimeError as error:
        if "shared memory" not in str(error) and "shm" not in str(error):
            raise
        raise ResourceError(
            f"The data loading workers have too little shared memory (/dev/shm) for {', '.join(ids)}. Free "
            "some, give the container more (docker run --shm-size), or use --num_workers 0, which needs none."
        ) from None


def load_in_order(
    fetcher: Fetcher, keys: Iterable[list], loader: LoaderConfig, check: Callable[[], None]
) -> Iterator[Loaded]:
    """What is made of each of the keys, in order.

    Where a worker dies, what has not come back is made by one new worker, one item at a time, which gives the same;
    then all go on. Where one dies a second time before anything has come, it is the ResourceError that names what was
    being read: everything before it has come.
    """
    keys, waiting = iter(keys), deque()
    is_second_try = False
    while True:
        # A worker that dies takes along what it has made and not handed over: one item at a time, that is nothing.
        is_making_up = bool(waiting)
        handed_out = iter(tuple(waiting)) if is_making_up else _remembered(keys, waiting)
        pace = dataclasses.replace(loader, workers=1, ahead=1) if is_making_up else loader
        try:
            with closing(_load_until_a_death(fetcher, handed_out, waiting, pace, check)) as found:
                for loaded in found:
                    waiting.popleft()
                    is_second_try = False
                    yield loaded
            if not is_making_up:
                return
        except WorkersFailed as failure:
            if is_second_try or not failure.has_died:
                raise
            tqdm.write(f"{failure.what}. Restarting them once, from the same utterances.")
            is_second_try = True


def _remembered(keys: Iterator[list], waiting: deque[list]) -> Iterator[list]:
    """The keys, which from then on wait for their work to come back."""
    for key in keys:
        waiting.append(key)
        yield key


def _load_until_a_death(
    fetcher: Fetcher, keys: Iterator[list], waiting: deque[list], loader: LoaderConfig, check: Callable[[], None]
) -> Iterator[Loaded]:
    fetcher.being_read.fill_(-1)
    batches = DataLoader(
        fetcher,
        sampler=keys,
        batch_size=None,
        num_workers=loader.workers,
        prefetch_factor=loader.ahead if loader.workers else None,
        timeout=min(POLL_SECONDS, loader.timeout) if loader.workers else 0,
        pin_memory=loader.pin_memory,
        worker_init_fn=_begin_worker,
        # Not Python's own choice, which is another from 3.14 on: no worker would then be this process's child.
        multiprocessing_context="fork" if loader.workers else None,
        generator=torch.Generator(),  # the default one belongs to the training step
    )
    with _no_exceptions_from_signals(), defer_signals():
        iterator = iter(batches)
    try:
        while (loaded := _next(iterator, fetcher, waiting, loader, check)) is not None:
            if loaded.error:
                raise loaded.error
            yield loaded.unpack()
    finally:
        # Left to the garbage collector, workers that ignore SIGTERM keep a process from ending.
        if loader.workers:
            # The pinning thread must end before. A worker that hangs is killed: torch would wait 5 s for it.
            with _workers_killed_after(END_SECONDS, iterator._workers):
                iterator._shutdown_workers()
            for worker in iterator._workers:
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


def _next(
    iterator: Iterator[Loaded], fetcher: Fetcher, waiting: deque[list], loader: LoaderConfig, check: Callable[[], None]
) -> Loaded | None:
    """What the loader gives next, None at its end; a ResourceError names what a worker was reading when it failed."""
    if not loader.workers:
        check()
        return next(iterator, None)
    deadline = time.monotonic() + loader.timeout
    with _workers_killed_after(loader.timeout, iterator._workers):
        while True:
            check()
            try:
                return next(iterator, None)
            except (RuntimeError, OSError, EOFError) as error:
                # A connection that breaks off is how a death shows where a worker's tensor was just being taken over.
                if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in SIGNS_OF_WORKERS):
                    raise
                is_late = time.monotonic() >= deadline
                if "timed out" in str(error) and not is_late:
                    continue
                reason = str(error).splitlines()[0].rstrip(".") if isinstance(error, RuntimeError) else "a worker died"
                reason = f"no data for {loader.timeout:g} s" if is_late else reason
            check()
            scene = _scene([] if is_late else iterator._workers, fetcher, waiting)
            raise WorkersFailed(f"{scene}: {reason}", has_died=not is_late)


@contextmanager
def _workers_killed_after(seconds: float, workers: list[BaseProcess]) -> Iterator[None]:
    """Kills the workers where the block takes so long: one that is stopped would be waited for without an end.

    A worker hands its tensors over by answering a call, for which neither the DataLoader nor its thread that pins
    memory has a timeout; to a dead one the connection breaks off.
    """

    def kill() -> None:
        for worker in workers:
            worker.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _scene(workers: list[BaseProcess], fetcher: Fetcher, waiting: deque[list]) -> str:
    """Which utterances were being read, by those of the workers that are dead if any are, and were waited for."""
    numbers = fetcher.being_read.tolist()
    of_the_dead = [number for number, worker in zip(numbers, workers, strict=False) if not worker.is_alive()]
    reading = fetcher.ids([number for number in of_the_dead or numbers if number >= 0])
    doing = f" while reading {', '.join(reading)}" if reading else ""
    awaited = f" (waiting for {', '.join(fetcher.ids(waiting[0]))})" if waiting else ""
    return f"The data loading workers failed{doing}{awaited}"


def _begin_worker(_worker: int) -> None:
    """Ctrl-C and a closing terminal reach the whole process group; the training process alone decides when they end.

    They do not outlive it, however it ends: not even one that hangs in a read.
    """
    for number in stopping_signals():
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _log_if_parent_alive
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != multiprocessing.parent_process().pid:  # it had ended before that was said
        os._exit(1)


def _log_if_parent_alive(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """The thread that hands batches over tells here of one whose taker ended in the midst of it: that is no fault."""
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, at)
