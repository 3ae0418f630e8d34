"""A small /dev/shm, as in a container, gives the same batches with fewer workers or none."""

import contextlib
import io
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

from konkanivani.data import loader as loader_module
from konkanivani.data.batching import Batch, Example, collate
from konkanivani.data.loader import (
    HELD_BATCHES,
    Fetcher,
    LoaderConfig,
    PrefetchLimit,
    SharedMemoryFull,
    free_shared_memory,
    load_in_order,
    pack,
    semaphore_bytes,
)
from konkanivani.data.text import SpecialTokens
from tests.faults.fault_injection import small_shared_memory
from tests.timeouts import PROCESS_TIMEOUT

SPECIAL = SpecialTokens(start=1, end=2, unknown=3, blank=0)
SAMPLES = 200_000
ITEM_KIB = 4 * SAMPLES // 1024 + 8  # of float32, tokens and the rounding to pages
ITEMS = 8


class Noise:
    """Dataset of noise, seeded by the key."""

    tokenizer = SimpleNamespace(size=10, special=SPECIAL)

    def __getitem__(self, key: int) -> Example:
        waveform = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(key))
        return Example(f"noise {key}", waveform, [4, 5], None)


def collate_batch(speeches: list[Example]) -> Batch:
    return collate(speeches, SPECIAL)


def load_all(loader: LoaderConfig) -> list[torch.Tensor]:
    """Return copies of the waveforms; like the training loop, the last batch is kept until the next one arrives."""
    fetcher: Fetcher = Fetcher(Noise(), collate_batch, loader.workers)
    waveforms = []
    for loaded in load_in_order(fetcher, ([key] for key in range(ITEMS)), loader, int):
        if not waveforms:
            wait_for_prefetching()
        waveforms.append(loaded.value.waveforms.clone())
    return waveforms


def wait_for_prefetching() -> None:
    """Wait until the workers have filled the memory, or a second."""
    deadline = time.monotonic() + 1.0
    while free_shared_memory() > ITEM_KIB * 1024 and time.monotonic() < deadline:
        time.sleep(0.01)


def load_in_small_memory(results: Connection, kilobytes: int) -> None:
    """Load twice with the same settings in a mount namespace with this much shared memory."""
    try:
        small_shared_memory(kilobytes)
    except OSError as error:
        results.send(str(error))
        return
    free_bytes = free_shared_memory()
    loader = LoaderConfig(workers=2, timeout=PROCESS_TIMEOUT, pin_memory=False)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        passes = [load_all(loader), load_all(loader)]
    is_same = all(torch.equal(one, other) for one, other in zip(*passes, strict=True))
    digest = [float(waveform.double().sum()) for waveform in passes[0]]
    children = len(multiprocessing.active_children())
    lines = output.getvalue().splitlines()
    results.send((free_bytes, is_same, digest, loader.prefetch_limit.batches, children, lines))


def load_in_child_process(kilobytes: int) -> tuple:
    """Return the results of loading in a child process with this much shared memory."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=load_in_small_memory, args=(theirs, kilobytes))
    child.start()
    theirs.close()
    result = ours.recv()  # EOFError if the child died
    child.join(PROCESS_TIMEOUT)
    if isinstance(result, str):
        pytest.skip(f"a small /dev/shm cannot be mounted here: {result}")
    return result


EXPECTED = [
    float(torch.randn(SAMPLES, generator=torch.Generator().manual_seed(key)).double().sum()) for key in range(ITEMS)
]


@pytest.mark.parametrize(
    ("kilobytes", "limit", "words"),
    [
        # A batch that the workers inherit, two in the training loop, and one prefetched.
        ((1 + HELD_BATCHES + 1.5) * ITEM_KIB, 1, ["loading continues with 1 worker, 1 prefetched per worker"]),
        (1.5 * ITEM_KIB, 0, ["the training process loads the audio itself"]),
        (0.5 * ITEM_KIB, 0, ["the training process loads the audio itself"]),
        (16, 0, ["the training process loads the audio itself"]),  # not even for the queues' semaphores
    ],
)
def test_small_shared_memory_lowers_prefetching_with_equal_batches(kilobytes, limit, words):
    free_bytes, is_same, digest, batches, children, lines = load_in_child_process(int(kilobytes))
    assert free_bytes <= (kilobytes + 4) * 1024  # rounded up to pages
    assert is_same and digest == EXPECTED
    assert batches == limit and children == 0
    assert len(lines) == len(words), lines  # reported once, not again in the second pass
    for line, word in zip(lines, words, strict=True):
        assert word in line and "--shm-size" in line


def test_negative_control_sufficient_memory_changes_nothing():
    _, is_same, digest, batches, children, lines = load_in_child_process(20 * ITEM_KIB)
    assert is_same and digest == EXPECTED
    assert batches is None and children == 0 and lines == []


def test_full_shared_memory_raises_with_the_batch_size(monkeypatch):
    batch = collate_batch([Noise()[0]])

    def full(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(SharedMemoryFull) as raised:
        pack(batch)
    assert raised.value.needed_bytes >= 4 * SAMPLES

    def broken(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("another error")

    monkeypatch.setattr(torch.Tensor, "share_memory_", broken)
    with pytest.raises(RuntimeError, match="another error"):
        pack(batch)


@pytest.mark.parametrize(
    ("free_items", "settings"),
    # Free batches, then workers and batches per worker that fit beside the training loop's two.
    [(1, (0, 2)), (2, (0, 2)), (3, (1, 1)), (4, (2, 1)), (6, (2, 2)), (7, (2, 2)), (99, (2, 3))],
)
def test_prefetch_limit_is_what_fits_and_then_zero(monkeypatch, capsys, free_items, settings):
    loader = LoaderConfig(workers=2, timeout=1.0, pin_memory=False, ahead=4)
    item_bytes = 1 << 20
    monkeypatch.setattr(loader_module, "free_shared_memory", lambda: free_items * item_bytes + semaphore_bytes(2))
    limit = PrefetchLimit()
    limit.lower(loader, item_bytes)
    now = limit.apply(loader)
    assert (now.workers, now.ahead if now.workers else 2) == settings
    limit.lower(now, item_bytes)
    assert limit.apply(loader).workers == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_free_shared_memory_without_size_limit_is_unbounded(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096))
    assert free_shared_memory() > 1 << 40
    monkeypatch.undo()
    monkeypatch.setattr(loader_module, "SHARED_MEMORY", str(tmp_path / "missing"))
    assert free_shared_memory() == 0
