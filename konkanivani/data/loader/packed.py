"""Transfer of a batch to another process with all of its tensors in one block of shared memory.

PyTorch sends each shared tensor as a file descriptor over a connection of its own. For eight tensors this took 5 ms of
a training step, during which both cores waited (docs/experiments.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from konkanivani.data.batch import Batch, GlobalBatch

ALIGNMENT = 64  # bytes: the width of the widest SIMD registers, and PyTorch's own alignment of CPU tensors

Value = TypeVar("Value", GlobalBatch, Batch)
"""What a data loader loads: global batches for training, or batches for evaluation."""


class _Layout:
    """Consecutive places of tensors in a block of memory; `end` is the first byte after the latest place."""

    def __init__(self) -> None:
        self.end = 0

    def add(self, tensor: torch.Tensor) -> int:
        """Assign the next place to a tensor of this shape and type, and return its first byte."""
        start = math.ceil(self.end / ALIGNMENT) * ALIGNMENT
        self.end = start + tensor.nbytes
        return start

    def next_view(self, memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Assign the next place to a tensor of this shape and type, and return the memory there as such a tensor."""
        start = self.add(tensor)
        # view(dtype) requires a start divisible by the item size; ALIGNMENT is a multiple of every item size.
        return memory[start : self.end].view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class Packed(Generic[Value]):
    """Packed batch: `hollow` is the batch with its tensors on the meta device, `memory` (bytes,) uint8 their contents.

    The contents are in the order in which `with_each` visits the tensors.
    """

    hollow: Value
    memory: torch.Tensor

    def unpack(self) -> Value:
        """Return the original batch; its tensors are views of the memory."""
        layout = _Layout()
        return self.hollow.with_each(lambda tensor: layout.next_view(self.memory, tensor))

    def with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed[Value]:
        return dataclasses.replace(self, memory=change(self.memory))


def pack(value: Value) -> Packed[Value]:
    """Copy the tensors into shared memory; PyTorch raises a `RuntimeError` if /dev/shm is too small."""
    sizes = _Layout()

    def hollow_out(tensor: torch.Tensor) -> torch.Tensor:
        sizes.add(tensor)
        # A tensor on the meta device has a shape and a type but no memory; it is sent without a file descriptor.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    hollow = value.with_each(hollow_out)
    memory = torch.empty(sizes.end, dtype=torch.uint8).share_memory_()
    places = _Layout()
    value.with_each(lambda tensor: places.next_view(memory, tensor).copy_(tensor))
    return Packed(hollow, memory)
