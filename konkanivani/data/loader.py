"""Worker processes that load examples, which arrive packed in shared memory.

PyTorch sends each shared tensor as a file descriptor over a connection of its own. For eight tensors this took 5 ms of
a training step, during which both cores waited (docs/experiments.md). A Docker container has 64 MB of shared memory
by default.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter
from tqdm import tqdm

from konkanivani.console import count
from konkanivani.data.batching import Batch, Example, GlobalBatch, check_tokens
from konkanivani.data.dataset import EvalDataset, TrainDataset
from konkanivani.data.manifest import Rejection
from konkanivani.data.staging import StagingBuffers
from konkanivani.errors import DataError, KonkaniVaniError, ResourceError, defer_signals
from konkanivani.worker_processes import begin_worker

Value = TypeVar("Value", GlobalBatch, Batch)
"""Item of a data loader: a global batch for training, or a batch for evaluation."""

SHARED_MEMORY = "/dev/shm"  # file system of shared tensors and named semaphores on Linux
SEMAPHORES = 8  # of the DataLoader's result queue and event
SEMAPHORES_PER_WORKER = 3  # of a worker's index queue
ALIGNMENT = 64  # bytes: the width of the widest SIMD registers, and PyTorch's own alignment of CPU tensors


@dataclass(frozen=True)
class Place:
    """Location of a tensor in the shared memory; `start` and `end` in bytes."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the memory."""
        # view(dtype) requires a start divisible by the item size; ALIGNMENT is a multiple of every item size.
        return memory[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Packed(Generic[Value]):
    """Packed batch: `hollow` is the batch with a `Place` for each tensor, `memory` (bytes,) uint8 their contents."""

    hollow: Any
    memory: torch.Tensor

    def unpack(self) -> Value:
        """Return the original batch; its tensors are views of the memory."""
        return cast("Value", self.hollow.with_each(lambda place: place.of(self.memory)))

    def with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed[Value]:
        return replace(self, memory=change(self.memory))


class SharedMemoryFull(Exception):
    """Shared memory with less space than `needed_bytes`, for a batch or for the semaphores of the workers' queues."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


def pack(value: Value) -> Packed[Value]:
    """Copy the tensors into shared memory; raise `SharedMemoryFull` if /dev/shm is too small."""
    tensors: list[torch.Tensor] = []
    places: list[Place] = []

    def place(tensor: torch.Tensor) -> Any:
        end = places[-1].end if places else 0
        places.append(Place(math.ceil(end / ALIGNMENT) * ALIGNMENT, tensor.dtype, tensor.shape))
        tensors.append(tensor)
        return places[-1]

    hollow = value.with_each(place)
    # The queue would also move tensors to shared memory, but in a feeder thread, whose errors are lost.
    try:
        memory = torch.empty(places[-1].end, dtype=torch.uint8).share_memory_()
    except RuntimeError as error:
        if "shared memory" not in str(error) and "shm" not in str(error):
            raise
        raise SharedMemoryFull(places[-1].end) from None
    for tensor, its_place in zip(tensors, places, strict=True):
        its_place.of(memory).copy_(tensor)
    return Packed(hollow, memory)


def free_shared_memory() -> int:
    """Return the free bytes of /dev/shm: 0 if it is missing or not writable."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    if not os.access(SHARED_MEMORY, os.W_OK):
        return 0
    if status.f_blocks == 0:  # a tmpfs without a size limit
        return sys.maxsize
    return status.f_bavail * status.f_frsize


def semaphore_bytes(workers: int) -> int:
    """Return the shared memory of the semaphores of a DataLoader: each is a file of one page."""
    return (SEMAPHORES + SEMAPHORES_PER_WORKER * workers) * mmap.PAGESIZE


def inherited_integers(number: int) -> torch.Tensor:
    """Return int64 numbers, initially 0, in anonymous memory shared with forked processes; it needs no /dev/shm."""
    return torch.frombuffer(mmap.mmap(-1, 8 * number), dtype=torch.int64)


# --------------------
# Prefetching within the size of /dev/shm: 64 MB by default in a Docker container.


HELD_BATCHES = 2  # by the training loop: the batch of the current step, and the next one while it replaces that


@dataclass
class PrefetchLimit:
    """Limit on the batches in shared memory, lowered when that is full; `batches` is None before.

    It is lowered at most twice: to the number of batches that fit, then to 0, which means loading in the training
    process. It holds for all later passes over the same data.
    """

    batches: int | None = None

    def apply(self, loader: LoaderConfig) -> LoaderConfig:
        """Return the settings with at most this many batches prefetched by all workers together."""
        if self.batches is None:
            return loader
        workers = min(loader.workers, self.batches)
        ahead = min(loader.ahead, self.batches // workers) if workers else loader.ahead
        return replace(loader, workers=workers, ahead=ahead)

    def lower(self, loader: LoaderConfig, needed_bytes: int) -> None:
        """Lower the limit, after these settings were too much for shared memory, and print one line about it.

        Args:
            loader: the settings in use.
            needed_bytes: size of the batch that did not fit.
        """
        free_bytes = free_shared_memory()
        was_lowered = self.batches is not None
        # A batch that the training loop holds now is not free later either: the new workers inherit it at the fork.
        fitting = (free_bytes - semaphore_bytes(loader.workers)) // needed_bytes - HELD_BATCHES
        # The workers have ended, so other processes may have filled the memory: the limit decreases in any case.
        fewer = min(fitting, loader.workers * loader.ahead - 1)
        self.batches = 0 if was_lowered else max(0, fewer)
        now = self.apply(loader)
        remedy = "the training process loads the audio itself"
        if now.workers:
            remedy = f"loading continues with {count(now.workers, 'worker')}, {now.ahead} prefetched per worker"
        tqdm.write(
            f"Shared memory ({SHARED_MEMORY}, {free_bytes / 2**20:.2f} MiB free) is too small for "
            f"{count(loader.workers, 'data loading worker')}, {loader.ahead} prefetched per worker: {remedy}, with the "
            "same results. For faster loading start the container with more, for example docker run --shm-size=1g."
        )


# --------------------
# Worker processes that load batches, with recovery from workers that die or hang.


POLL_SECONDS = 1.0  # interval of checks on the workers while no batch arrives
END_SECONDS = 1.0  # grace period for workers to exit
SIGNS_OF_WORKERS = ("DataLoader", "Pin memory thread")  # in PyTorch's errors about a worker that failed


@dataclass(frozen=True)
class LoaderConfig:
    """Settings that do not change the loaded data; `timeout` in seconds, `ahead` is the items prefetched per worker.

    With `pin_memory`, each item is copied to page-locked memory of its own, unless global batches have `staging`.
    `prefetch_limit` is shared by all uses of the settings.
    """

    workers: int
    timeout: float
    pin_memory: bool
    ahead: int = 2
    prefetch_limit: PrefetchLimit = field(default_factory=PrefetchLimit)
    staging: StagingBuffers | None = None


@dataclass(frozen=True)
class LoadedItem(Generic[Value]):
    """Loaded item: a batch (None: no utterance was readable) and the rejected utterances.

    A worker sends its batch as `packed`; `value` is then None until `unpack`.
    """

    value: Value | None
    rejections: tuple[Rejection, ...]
    # A value, because the DataLoader replaces the message of an exception raised in a worker with a traceback.
    error: KonkaniVaniError | None = None
    packed: Packed[Value] | None = None
    lacking_bytes: int = 0
    """Size of the batch if shared memory was too small for it, else 0."""

    def pin_memory(self) -> LoadedItem[Value]:
        """Return a copy in page-locked memory; the DataLoader calls this for CUDA."""
        value = None if self.value is None else self.value.with_each(torch.Tensor.pin_memory)
        packed = None if self.packed is None else self.packed.with_each(torch.Tensor.pin_memory)
        return replace(self, value=value, packed=packed)

    def unpack(self) -> LoadedItem[Value]:
        """Return the item with its batch unpacked."""
        if self.packed is None:
            return self
        return replace(self, value=self.packed.unpack(), packed=None)

    def with_staging(self, staging: StagingBuffers | None) -> LoadedItem[Value]:
        """Return the item with a global batch that is copied to a GPU through these buffers."""
        if staging is None or not isinstance(self.value, GlobalBatch):
            return self
        return replace(self, value=self.value.with_staging(staging))


class WorkersFailed(ResourceError):
    """Audio worker that was killed (out of memory, or a crash while decoding) or hangs."""

    def __init__(self, message: str, has_died: bool) -> None:
        super().__init__(
            f"{message}. Use --num_workers 0 to see the error, or a longer --loader_timeout; then resume with "
            "--resume auto."
        )
        self.reason = message
        self.has_died = has_died


class Fetcher(Dataset[LoadedItem[Value]]):
    """Dataset of whole global or evaluation batches; `combine` makes one from its examples.

    `being_read` (workers,) is the index of the utterance that each worker is reading, or -1, in shared memory: it still
    names the utterance after the worker has died.
    """

    def __init__(
        self, speech: TrainDataset | EvalDataset, combine: Callable[[list[Example]], Value], workers: int
    ) -> None:
        self.speech = speech
        self.combine: Callable[[list[Example]], Value] = combine
        self.being_read = inherited_integers(max(1, workers))

    def __getitem__(self, keys: list) -> LoadedItem[Value]:
        worker = get_worker_info()
        examples: list[Example | Rejection] = []
        for key in keys:
            if worker:
                self.being_read[worker.id] = key[1] if isinstance(key, tuple) else key
            try:
                examples.append(self.speech[key])
            except DataError as error:
                return LoadedItem(None, (), error)
        if worker:
            self.being_read[worker.id] = -1
        speeches = [speech for speech in examples if isinstance(speech, Example)]
        rejections = tuple(rejection for rejection in examples if isinstance(rejection, Rejection))
        if not speeches:
            return LoadedItem(None, rejections)
        try:
            value = self._combined(speeches)
            if worker:
                return LoadedItem(None, rejections, packed=pack(value))
            return LoadedItem(value, rejections)
        except SharedMemoryFull as full:
            return LoadedItem(None, (), lacking_bytes=full.needed_bytes)
        except (DataError, ResourceError) as error:
            return LoadedItem(None, (), error)

    def ids(self, keys: list) -> list[str]:
        """Return the ids of the utterances with these keys."""
        return [self.speech.utterances[key[1] if isinstance(key, tuple) else key].id for key in keys]

    def _combined(self, speeches: list[Example]) -> Value:
        for speech in speeches:
            check_tokens(speech, self.speech.tokenizer.size, self.speech.tokenizer.special)
        return self.combine(speeches)


def load_in_order(
    fetcher: Fetcher[Value], keys: Iterable[list], loader: LoaderConfig, check: Callable[[], None]
) -> Generator[LoadedItem[Value], None, None]:
    """Yield the loaded item of each of the keys, in order.

    If a worker dies, one new worker reloads the unfinished items one by one, with the same result; then all workers
    continue. A second death before another item arrives raises `WorkersFailed`, which names the utterances being read;
    all items before them have been yielded.

    If shared memory is too small, fewer items are prefetched or this process loads them, also with the same result.
    """
    keys = iter(keys)
    waiting: deque[list] = deque()
    is_second_try = False
    while True:
        # A dead worker loses its finished but undelivered items; with one item at a time there are none.
        is_making_up = bool(waiting)
        handed_out = iter(tuple(waiting)) if is_making_up else _append_to_waiting(keys, waiting)
        pace = loader.prefetch_limit.apply(loader)
        if is_making_up:
            pace = replace(pace, workers=min(1, pace.workers), ahead=1)
        lacking_bytes = 0
        try:
            with closing(_load_until_a_death(fetcher, handed_out, waiting, pace, check)) as results:
                for loaded in results:
                    waiting.popleft()
                    is_second_try = False
                    yield loaded
            if not is_making_up:
                return
        except WorkersFailed as failure:
            if is_second_try or not failure.has_died:
                raise
            tqdm.write(f"{failure.reason}. Restarting them once, from the same utterances.")
            is_second_try = True
        except SharedMemoryFull as full:
            lacking_bytes = full.needed_bytes
        if lacking_bytes:  # outside of the handler, whose traceback keeps the batches that have arrived
            loader.prefetch_limit.lower(pace, lacking_bytes)


def _append_to_waiting(keys: Iterator[list], waiting: deque[list]) -> Iterator[list]:
    """Yield the keys and append each to `waiting` until its item arrives."""
    for key in keys:
        waiting.append(key)
        yield key


def _load_until_a_death(
    fetcher: Fetcher[Value], keys: Iterator[list], waiting: deque[list], loader: LoaderConfig, check: Callable[[], None]
) -> Generator[LoadedItem[Value], None, None]:
    if loader.workers and free_shared_memory() < semaphore_bytes(loader.workers):
        raise SharedMemoryFull(semaphore_bytes(loader.workers))
    fetcher.being_read.fill_(-1)
    batches = DataLoader(
        fetcher,
        sampler=keys,
        batch_size=None,
        num_workers=loader.workers,
        prefetch_factor=loader.ahead if loader.workers else None,
        timeout=min(POLL_SECONDS, loader.timeout) if loader.workers else 0,
        pin_memory=loader.pin_memory and loader.staging is None,
        worker_init_fn=lambda _worker: begin_worker(),
        # Python 3.14 changes the default to forkserver, whose workers are not children of this process.
        multiprocessing_context="fork" if loader.workers else None,
        generator=torch.Generator(),  # iter() draws a seed, which must not change the training step's generator
    )
    iterator: _BaseDataLoaderIter | None = None
    try:
        with _no_exceptions_from_signals(), defer_signals():
            iterator = iter(batches)
        while (loaded := _next(iterator, fetcher, waiting, loader, check)) is not None:
            if loaded.error:
                raise loaded.error
            if loaded.lacking_bytes:
                raise SharedMemoryFull(loaded.lacking_bytes)
            yield loaded.unpack().with_staging(loader.staging)
    finally:
        # Workers that ignore SIGTERM would keep the process from exiting if this were left to the garbage collector.
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            # Shut down first, to end the pinning thread. A hanging worker is killed: torch would wait 5 s for it.
            with _kill_workers_after(END_SECONDS, iterator._workers):
                iterator._shutdown_workers()
            for worker in iterator._workers:
                worker.kill()
                worker.join()


@contextmanager
def _no_exceptions_from_signals() -> Iterator[None]:
    """Restore the SIGCHLD handler that the DataLoader replaces when it starts workers."""
    # Its handler raises wherever the main thread is, for example while a checkpoint is saved. A worker's death is
    # noticed without it, in _next.
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)


def _next(
    iterator: _BaseDataLoaderIter,
    fetcher: Fetcher[Value],
    waiting: deque[list],
    loader: LoaderConfig,
    check: Callable[[], None],
) -> LoadedItem[Value] | None:
    """Return the loader's next item, None at its end; raise `WorkersFailed` with the utterances being read."""
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        check()
        return next(iterator, None)
    deadline = time.monotonic() + loader.timeout
    with _kill_workers_after(loader.timeout, iterator._workers):
        while True:
            check()
            try:
                return next(iterator, None)
            except (RuntimeError, OSError, EOFError) as error:
                # If a worker dies while one of its tensors is transferred, the connection breaks (OSError, EOFError).
                if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in SIGNS_OF_WORKERS):
                    raise
                is_late = time.monotonic() >= deadline
                if "timed out" in str(error) and not is_late:
                    continue
                reason = str(error).splitlines()[0].rstrip(".") if isinstance(error, RuntimeError) else "a worker died"
                reason = f"no data for {loader.timeout:g} s" if is_late else reason
            check()  # an interruption takes precedence over the failure
            scene = _describe_failure([] if is_late else iterator._workers, fetcher, waiting)
            raise WorkersFailed(f"{scene}: {reason}", has_died=not is_late)


@contextmanager
def _kill_workers_after(seconds: float, workers: Sequence[BaseProcess]) -> Iterator[None]:
    """Kill the workers if the block takes longer than `seconds`."""
    # Receiving a tensor is a request to the worker's process, for which neither the DataLoader nor its pinning thread
    # has a timeout: a stopped worker would block them forever. Killing it breaks the connection.

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


def _describe_failure(workers: Sequence[BaseProcess], fetcher: Fetcher[Value], waiting: deque[list]) -> str:
    """Describe which utterances the dead workers (or else all workers) were reading, and which item is awaited."""
    numbers = fetcher.being_read.tolist()
    of_the_dead = [number for number, worker in zip(numbers, workers, strict=False) if not worker.is_alive()]
    reading = fetcher.ids([number for number in of_the_dead or numbers if number >= 0])
    doing = f" while reading {', '.join(reading)}" if reading else ""
    awaited = f" (waiting for {', '.join(fetcher.ids(waiting[0]))})" if waiting else ""
    return f"The data loading workers failed{doing}{awaited}"
