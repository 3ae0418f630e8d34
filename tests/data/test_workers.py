"""Batches from audio workers arrive in order, whatever happens to the workers of later ones."""

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

from konkanivani.data.loader import Loaded, LoaderConfig, WorkersFailed, _begin_worker, load_in_order
from tests.patience import PATIENCE

LONGER_THAN_WORKERS_ARE_LEFT_ALONE = 2.5  # seconds
LOADER = LoaderConfig(workers=2, timeout=PATIENCE, pin_memory=False)


class SlowThenDeadly(Dataset):
    """Dataset in which item 0 is slow, and a worker that reads item 1 dies while `lives` are left."""

    def __init__(self, lives: int) -> None:
        self.being_read = torch.full((LOADER.workers,), -1)
        self.deaths_left = torch.tensor([lives]).share_memory_()

    def __getitem__(self, keys: list[int]) -> Loaded:
        if keys == [0]:
            time.sleep(LONGER_THAN_WORKERS_ARE_LEFT_ALONE)
        if keys == [1] and self.deaths_left.item() > 0:
            self.deaths_left -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return Loaded(keys[0], ())

    def ids(self, keys: list[int]) -> list[str]:
        return [f"item {key}" for key in keys]


def _load(fetcher: SlowThenDeadly) -> tuple[list[int], WorkersFailed | None]:
    came = []
    try:
        for loaded in load_in_order(fetcher, [[number] for number in range(6)], LOADER, lambda: None):
            came.append(loaded.value)
    except WorkersFailed as failure:
        return came, failure
    return came, None


def test_what_lies_before_a_deadly_item_comes_although_it_takes_longer(capsys):
    came, failure = _load(SlowThenDeadly(lives=10))
    assert came == [0]
    assert "waiting for item 1" in failure.what


@pytest.mark.parametrize("lives", [0, 1, 2])
def test_all_come_once_and_in_order_where_workers_die_and_come_back(lives, capsys):
    assert _load(SlowThenDeadly(lives)) == (list(range(6)), None)
    assert capsys.readouterr().out.count("Restarting them once") == lives


def _hand_over(pipe: Connection, errors: Path, begins_as_worker: bool) -> None:
    """Send file descriptors from a process, as a worker sends its batches."""
    sys.stderr = errors.open("w", buffering=1)
    if begins_as_worker:
        _begin_worker(0)
    pipe.send([DupFd(2)._id for _ in range(2)])
    pipe.recv()


@pytest.mark.parametrize("begins_as_worker", [True, False], ids=["a worker", "another process"])
def test_a_worker_keeps_silent_where_the_trainer_goes_while_it_is_handed_a_batch(tmp_path, begins_as_worker):
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    hands_over = multiprocessing.get_context("fork").Process(
        target=_hand_over, args=(theirs, tmp_path / "errors", begins_as_worker)
    )
    hands_over.start()
    (address, _), (_, key) = ours.recv()
    authkey = multiprocessing.current_process().authkey
    Client(address, authkey=authkey).close()  # connects and leaves
    with Client(address, authkey=authkey) as taken:  # is served after the previous connection
        taken.send((key, os.getpid()))
        os.close(recv_handle(taken))
    ours.send("done")
    hands_over.join(PATIENCE)
    assert hands_over.exitcode == 0
    assert ("Traceback" in (tmp_path / "errors").read_text()) != begins_as_worker
