"""Batches reach a GPU through page-locked buffers of one size, which are not refilled before they are copied."""

import dataclasses

import pytest
import torch

from konkanivani.data.batching import Batch, SizeLimit, largest_batch_bytes, same_size, split_batch
from konkanivani.data.loader import LoadedItem
from konkanivani.data.staging import BUFFERS, CudaCopies, StagingBuffers, places
from konkanivani.lengths import SECONDS
from tests.invariants.parts import global_batch, speeches

DEVICE = torch.device("cpu")


class DelayedCopies:
    """`CopyDevice` whose copies read the buffer only when an event is synchronized, as on a busy GPU."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.from_elsewhere = 0
        self._buffers: list[torch.Tensor] = []
        self.started: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._finished = 0

    def allocate(self, size: int) -> torch.Tensor:
        self.allocated.append(size)
        self._buffers.append(torch.empty(size, dtype=torch.uint8))
        return self._buffers[-1]

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.full_like(tensor, -7)
        if not any(tensor.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in self._buffers):
            self.from_elsewhere += 1
            return copy.copy_(tensor)
        self.started.append((copy, tensor))
        return copy

    def record(self) -> "DelayedEvent":
        return DelayedEvent(self, len(self.started))

    def finish(self, count: int) -> None:
        """Run the first `count` copies that were started."""
        for copy, tensor in self.started[self._finished : count]:
            copy.copy_(tensor)
        self._finished = max(self._finished, count)


@dataclasses.dataclass
class DelayedEvent:
    """Event of `DelayedCopies`."""

    copies: DelayedCopies
    count: int

    def synchronize(self) -> None:
        self.copies.finish(self.count)


class EarlyReuse(DelayedCopies):
    """Device whose events do not wait: a buffer is refilled before it is copied."""

    def record(self) -> "DelayedEvent":
        return DelayedEvent(self, 0)


def batches(count: int, seed: int = 0) -> list[Batch]:
    """Return the float32 micro-batches of `count` steps of different lengths."""
    double = [batch for step in range(count) for batch in global_batch(speeches(4, seed=seed + step), 2).micro_batches]
    return [dataclasses.replace(batch, waveforms=batch.waveforms.float()) for batch in double]


def are_equal(sent, given) -> bool:
    return all(map(torch.equal, sent.tensors(), given.tensors()))


def send_batches(copies: DelayedCopies, size: int = 2**20) -> list[bool]:
    """Send the batches of six steps of different lengths; return for each whether it arrived unchanged."""
    staging = StagingBuffers(size, copies)
    given = batches(6)
    sent = [dataclasses.replace(batch, staging=staging).to(DEVICE) for batch in given]
    copies.finish(len(copies.started))
    return list(map(are_equal, sent, given))


def test_batches_of_different_lengths_share_the_same_buffers():
    copies = DelayedCopies()
    assert all(send_batches(copies)) and copies.allocated == [2**20] * BUFFERS and copies.from_elsewhere == 0


def test_negative_control_early_buffer_reuse_corrupts_batches():
    arrived = send_batches(EarlyReuse())
    # The batches in the buffers at the end are unchanged.
    assert not any(arrived[:-BUFFERS]) and all(arrived[-BUFFERS:])


def test_batch_larger_than_buffer_is_copied_from_pageable_memory():
    copies = DelayedCopies()
    assert all(send_batches(copies, size=64)) and copies.allocated == [] and copies.from_elsewhere == 4 * 12


def test_split_batches_are_staged_and_device_batches_are_not():
    copies = DelayedCopies()
    staging = StagingBuffers(2**20, copies)
    [batch, *_] = (dataclasses.replace(batch, staging=staging) for batch in batches(1))
    halves = split_batch(batch)
    assert all(half.staging is staging for half in halves)
    sent = [half.to(DEVICE) for half in halves]
    copies.finish(len(copies.started))
    assert all(map(are_equal, sent, halves)) and sent[0].staging is None
    assert sent[0].to(DEVICE).waveforms is sent[0].waveforms


def test_loader_attaches_staging_buffers_to_training_batches():
    staging = StagingBuffers(2**20, DelayedCopies())
    step = global_batch(speeches(4), 2)
    loaded = LoadedItem(step, ()).with_staging(staging)
    assert [batch.staging for batch in loaded.value.micro_batches] == [staging, staging]
    batch = step.micro_batches[0]
    assert (
        LoadedItem(step, ()).with_staging(None).value is step
        and LoadedItem(batch, ()).with_staging(staging).value is batch
    )


@pytest.mark.parametrize("limits", [same_size(3), (SizeLimit(0.5, 4), SizeLimit(2.0, 2))])
def test_largest_batch_bytes_bounds_every_batch(limits):
    longest = max(len(speech.waveform) for speech in speeches(4, seed=3)) / SECONDS.rate
    for batch in batches(1, seed=3):
        tokens = max(batch.token_lengths)
        assert places(batch.tensors())[1] <= largest_batch_bytes(same_size(2), longest, tokens, SECONDS)
    size = largest_batch_bytes(limits, 1.5, 10, SECONDS)
    utterances = max(limit.utterances * min(limit.seconds, 1.5) for limit in limits)
    assert utterances * SECONDS.rate * 4 < size < 1.05 * utterances * SECONDS.rate * 4


@pytest.mark.card
def test_batches_arrive_unchanged_on_a_gpu():
    device = torch.device("cuda")
    staging = StagingBuffers(2**20, CudaCopies(device))
    given = batches(50)
    sent = [dataclasses.replace(batch, staging=staging).to(device) for batch in given]
    assert all(are_equal(one.to(DEVICE), other) for one, other in zip(sent, given, strict=True))
