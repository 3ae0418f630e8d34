"""Copies of batches to a GPU through page-locked buffers of one size.

A copy from pageable memory blocks the host; a copy from page-locked memory overlaps with computation. PyTorch caches
page-locked memory by size and never returns it, so a new size in each step makes the host's memory grow. Here each
batch passes through one of a few buffers of the largest batch's size.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

ALIGNMENT = 64  # bytes, a multiple of every item size
BUFFERS = 2  # one is filled while the copy from the other runs


class Event(Protocol):
    """Point in the work of a device."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class CopyDevice(Protocol):
    """Device that copies from page-locked memory on its own."""

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes of page-locked memory, uint8."""

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy of a tensor in page-locked memory and return the copy on the device."""

    def record(self) -> Event:
        """Return the point after all copies that were started."""


class CudaCopies:
    """`CopyDevice` of a CUDA device, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, size: int) -> torch.Tensor:
        """Return page-locked bytes."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy."""
        return tensor.to(self._device, non_blocking=True)

    def record(self) -> Event:
        """Return an event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


class StagingBuffers:
    """Page-locked buffers of `size` bytes; a larger batch is copied from pageable memory.

    The buffers are allocated with the first batch, in the process that copies.
    """

    def __init__(self, size: int, copies: CopyDevice) -> None:
        self.size = size
        self._copies = copies
        self._buffers: list[torch.Tensor] = []
        self._copied: list[Event | None] = [None] * BUFFERS
        self._next = 0

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of host tensors on the device; they may still run, in the order of the device's work."""
        starts, end = places(tensors)
        if end > self.size:
            return [self._copies.send(tensor) for tensor in tensors]
        if not self._buffers:
            self._buffers = [self._copies.allocate(self.size) for _ in range(BUFFERS)]
        number = self._next
        self._next = (number + 1) % BUFFERS
        copied = self._copied[number]
        if copied is not None:
            # The buffer must not change before the device has read it.
            copied.synchronize()
        sent = []
        for tensor, start in zip(tensors, starts, strict=True):
            staged = self._buffers[number][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            staged.copy_(tensor)
            sent.append(self._copies.send(staged))
        self._copied[number] = self._copies.record()
        return sent


def places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the first byte of each tensor in a buffer, and the bytes of all."""
    starts = []
    end = 0
    for tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + tensor.nbytes
    return starts, end
