"""Batches in shared memory, and the size of that memory: 64 MB by default in a Docker container."""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from konkanivani.data.batching import Batch, GlobalBatch

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
        return dataclasses.replace(self, memory=change(self.memory))


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
