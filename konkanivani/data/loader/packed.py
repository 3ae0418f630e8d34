"""A window or batch on its way to another process: all of its tensors in one piece of shared memory.

Each tensor that crosses by itself takes a file descriptor, handed over on a connection of its own: eight of them were
5 ms of a training step in which both cores waited (docs/experiments.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.data.batch import Batch, GlobalBatch

ALIGNMENT = 64  # bytes: the width of the widest registers, and what PyTorch aligns its own tensors to


@dataclass(frozen=True)
class Place:
    """Where in the memory a tensor lies, from `start` on, in bytes."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, which is a view of the memory."""
        return memory[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Packed:
    """`hollow` has a Place for each of its tensors, all of which lie in `memory` (bytes,) uint8."""

    hollow: GlobalBatch | Batch
    memory: torch.Tensor

    def unpack(self) -> GlobalBatch | Batch:
        """What was packed; its tensors are views of the memory."""
        return self.hollow.with_each(lambda place: place.of(self.memory))

    def with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        return dataclasses.replace(self, memory=change(self.memory))


def pack(value: GlobalBatch | Batch) -> Packed:
    """Copies its tensors into shared memory; a RuntimeError of PyTorch's where there is too little."""
    tensors, places = [], []

    def place(tensor: torch.Tensor) -> Place:
        end = places[-1].end if places else 0
        places.append(Place(math.ceil(end / ALIGNMENT) * ALIGNMENT, tensor.dtype, tensor.shape))
        tensors.append(tensor)
        return places[-1]

    hollow = value.with_each(place)
    memory = torch.empty(places[-1].end, dtype=torch.uint8).share_memory_()
    for tensor, its_place in zip(tensors, places, strict=True):
        its_place.of(memory).copy_(tensor)
    return Packed(hollow, memory)
