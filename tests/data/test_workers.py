"""Batches from audio workers arrive in order even if workers are slow or killed."""

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import DupFd, recv_handle
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from konkanivani.data.loader import LoadedItem, LoaderConfig, WorkersFailed, load_in_order
from konkanivani.worker_processes import begin_worker
from tests.timeouts import PROCESS_TIMEOUT

SLOW_ITEM_SECONDS = 2.5  # longer than the poll interval and the grace period of the loader
LOADER = LoaderConfig(workers=2, timeout=PROCESS_TIMEOUT, pin_memory=False)


class SlowThenKilledDataset(Dataset):
    """Dataset in which item 0 is slow, and the worker that reads item 1 is killed `deaths` times."""

    def __init__(self, deaths: int) -> None:
        self.being_read = torch.full((LOADER.workers,), -1)
        self.deaths_left = torch.tensor([deaths]).share_memory_()

    def __getitem__(self, keys: list[int]) -> LoadedItem:
        if keys == [0]:
            time.sleep(SLOW_ITEM_SECONDS)
        if keys == [1] and self.deaths_left.item() > 0:
            self.deaths_left -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return LoadedItem(keys[0], ())

    def ids(self, keys: list[int]) -> list[str]:
        return [f"item {key}" for key in keys]


def _load(fetcher: SlowThenKilledDataset) -> tuple[list[int], WorkersFailed | None]:
    loaded_items = []
    try:
        for loaded in load_in_order(fetcher, [[number] for number in range(6)], LOADER, lambda: None):
            loaded_items.append(loaded.value)
    except WorkersFailed as failure:
        return loaded_items, failure
    return loaded_items, None


def test_slow_items_before_a_crashing_item_are_returned(capsys):
    loaded_items, failure = _load(SlowThenKilledDataset(deaths=10))
    assert loaded_items == [0]
    assert "waiting for item 1" in failure.reason


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_all_items_arrive_once_in_order_after_worker_restart(deaths, capsys):
    assert _load(SlowThenKilledDataset(deaths)) == (list(range(6)), None)
    assert capsys.readouterr().out.count("Restarting them once") == deaths


def _send_descriptors(pipe: Connection, errors: Path, is_worker: bool) -> None:
    """Send file descriptors from a process like a worker sends its batches."""
    sys.stderr = errors.open("w", buffering=1)
    if is_worker:
        begin_worker()
    pipe.send([DupFd(2)._id for _ in range(2)])
    pipe.recv()


@pytest.mark.parametrize("is_worker", [True, False], ids=["worker", "other process"])
def test_worker_prints_no_traceback_if_trainer_disconnects(tmp_path, is_worker):
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    sender = multiprocessing.get_context("fork").Process(
        target=_send_descriptors, args=(theirs, tmp_path / "errors", is_worker)
    )
    sender.start()
    (address, _), (_, key) = ours.recv()
    authkey = multiprocessing.current_process().authkey
    Client(address, authkey=authkey).close()  # connects and leaves
    with Client(address, authkey=authkey) as taken:  # is served after the previous connection
        taken.send((key, os.getpid()))
        os.close(recv_handle(taken))
    ours.send("done")
    sender.join(PROCESS_TIMEOUT)
    assert sender.exitcode == 0
    assert ("Traceback" in (tmp_path / "errors").read_text()) != is_worker
