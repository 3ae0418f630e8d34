"""What audio workers have made comes in order, whatever becomes of those that make what follows."""

import os
import signal
import time

import pytest
import torch
from torch.utils.data import Dataset

from konkanivani.data.loader.workers import Loaded, LoaderConfig, WorkersFailed, load_in_order
from tests.patience import PATIENCE

LONGER_THAN_WORKERS_ARE_LEFT_ALONE = 2.5  # seconds
LOADER = LoaderConfig(workers=2, timeout=PATIENCE, pin_memory=False)


class SlowThenDeadly(Dataset):
    """Item 0 takes its time; who makes item 1 dies at once, so long as `lives` is not used up."""

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
        """The items' names."""
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
    assert "item 1 were waited for" in failure.what


@pytest.mark.parametrize("lives", [0, 1, 2])
def test_all_come_once_and_in_order_where_workers_die_and_come_back(lives, capsys):
    assert _load(SlowThenDeadly(lives)) == (list(range(6)), None)
    assert capsys.readouterr().out.count("started once more") == lives
