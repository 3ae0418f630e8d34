"""Transfer of a batch to another process with all of its tensors in one block of shared memory.

PyTorch sends each shared tensor as a file descriptor over a connection of its own. For eight tensors this took 5 ms of
a training step, during which both cores waited (docs/experiments.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from konkanivani.data.batch import Batch, GlobalBatch

Value = TypeVar("Value", GlobalBatch, Batch)
"""Item of a data loader: a global batch for training, or a batch for evaluation."""

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


def pack(value: Value) -> Packed[Value]:
    """Copy the tensors into shared memory; PyTorch raises a `RuntimeError` if /dev/shm is too small."""
    tensors: list[torch.Tensor] = []
    places: list[Place] = []

    def place(tensor: torch.Tensor) -> Any:
        end = places[-1].end if places else 0
        places.append(Place(math.ceil(end / ALIGNMENT) * ALIGNMENT, tensor.dtype, tensor.shape))
        tensors.append(tensor)
        return places[-1]

    hollow = value.with_each(place)
    memory = torch.empty(places[-1].end, dtype=torch.uint8).share_memory_()
    for tensor, its_place in zip(tensors, places, strict=True):
        its_place.of(memory).copy_(tensor)
    return Packed(hollow, memory)
