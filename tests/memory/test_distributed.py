"""Agreement, OOM history and plans of several ranks, without processes; tests/faults and tests/invariants have them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from konkanivani import command_line
from konkanivani.config import PRESETS, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.data.batching import Cursor, EpochPlanner, partition, same_size
from konkanivani.data.loader import LoaderConfig
from konkanivani.data.loading import GlobalBatchStream
from konkanivani.data.manifest import Rejections
from konkanivani.distributed import (
    ALONE,
    RankLost,
    Topology,
    broadcast_from_rank0,
    check_same,
    gather,
    new_bucket,
    raise_rank_lost,
)
from konkanivani.errors import ReportedByOtherRank, ResourceError, UsageError
from konkanivani.memory.devices import cuda_costs
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.memory.recovery import (
    MicroBatchPlan,
    OomAttempt,
    OomHistory,
    OomRetry,
    Outcome,
    RestartAfterOom,
    forget_sizes,
    read_sizes,
    write_sizes,
)
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.sizes import Ranks, choose_ranks, costs_per_rank, traffic_bytes
from konkanivani.training.interruption import Interruption
from konkanivani.training.logbook import Logbook
from tests.invariants.parts import global_batch, speeches

TWO = Topology(rank=1, world_size=2, local_rank=1, local_world_size=2)
SHAPE = PRESETS["original"]
ARCHITECTURE = architecture_of(TrainConfig(model=SHAPE), 1000)
GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]


def test_collectives_of_a_single_process_return_its_own_value():
    assert gather(ALONE, "own") == ["own"] and broadcast_from_rank0(ALONE, lambda: 3) == 3
    check_same(ALONE, {"flags": "any"})


def test_every_global_batch_is_split_completely_between_the_ranks():
    planner = EpochPlanner(np.random.default_rng(0).uniform(1, 9, 26), global_batch_size=4, seed=7)
    loader = LoaderConfig(workers=0, timeout=1.0, pin_memory=False)

    def planned(topology: Topology) -> list[list[tuple[int, int]]]:
        stream = GlobalBatchStream(None, planner, same_size(2), loader, Rejections(None, most=0.0), topology)
        keys = stream.planned(Cursor(0, 5))  # includes the ragged global batch and the end of an epoch
        return [next(keys) for _ in range(9)]

    ranks = [planned(Topology(rank=rank, world_size=3)) for rank in range(3)]
    for whole, *shares in zip(planned(ALONE), *ranks, strict=True):
        assert sorted(key for share in shares for key in share) == whole


def test_partition_balances_the_cost_of_the_ranks():
    costs = np.random.default_rng(1).uniform(1, 20, 32)
    loads = [costs[hand].sum() for hand in partition(costs, 4)]
    assert max(loads) < 1.05 * costs.sum() / 4


class SimulatedWork:
    """Work that runs out of memory for micro-batches of more than `fits` utterances, and records its calls."""

    def __init__(self, fits: int) -> None:
        self.fits, self.sizes, self.undone = fits, [], 0

    def run_attempt(self, attempt: OomAttempt[str]) -> OomAttempt[str]:
        with attempt:
            self.sizes.append(attempt.plan.largest_size)
            if attempt.plan.largest_size > self.fits:
                raise MemoryError
            attempt.result = "gradient"
        return attempt

    def undo(self) -> None:
        self.undone += 1

    def run_with_other_rank(self, others: list[Outcome]) -> tuple[str | None, int, list[int], int]:
        """Return the result and retries of this rank with another one, the tried sizes, and the undone attempts."""
        attempts = OomRetry(plan_of(4), OomHistory(0), self.undo, agreement_with(others))
        for attempt in attempts:
            self.run_attempt(attempt)
        return attempts.result, attempts.retries, self.sizes, self.undone


def agreement_with(others: list[Outcome]):
    """Return an agreement function with one other rank, which reports these outcomes in order."""
    output = iter(others)
    return lambda mine: max(mine, next(output))


def plan_of(utterances: int) -> MicroBatchPlan:
    return MicroBatchPlan(global_batch(speeches(utterances), utterances).micro_batches, recomputes_all=False)


def test_finished_rank_keeps_its_gradient_while_another_rank_splits():
    assert SimulatedWork(fits=8).run_with_other_rank([Outcome.SPLIT, Outcome.DONE]) == ("gradient", 1, [4], 0)


def test_rank_splits_until_its_batch_fits_and_counts_the_retries():
    assert SimulatedWork(fits=1).run_with_other_rank([Outcome.DONE] * 3) == ("gradient", 2, [4, 2, 1], 2)


@pytest.mark.parametrize("fits", [8, 1])
def test_all_ranks_undo_their_work_if_one_rank_is_stopped(fits):
    assert SimulatedWork(fits).run_with_other_rank([Outcome.STOPPED]) == (None, 0, [4], 1)


def test_size_that_did_not_fit_on_one_rank_is_split_on_all_ranks():
    splits = OomHistory(5)
    splits.learn({1: 3})
    splits.learn({1: 2, 7: 4})
    assert splits.sizes() == {1: 2, 7: 4}
    assert splits.fit_to_memory(plan_of(4)).largest_size == 1


def test_sizes_that_did_not_fit_are_saved_for_restarted_ranks(tmp_path):
    splits = OomHistory(5)
    with pytest.raises(RestartAfterOom, match="weights sharded"):
        SimulatedWork(fits=1).run_attempt(OomAttempt(plan_of(4))).result_or_raise(splits)
    write_sizes(tmp_path / "checkpoints", 1, splits)
    (tmp_path / "checkpoints" / "did_not_fit_2.json").write_text("{")
    assert read_sizes(tmp_path / "checkpoints", 5) == splits.sizes() != {}
    assert read_sizes(tmp_path / "checkpoints", 6) == {}  # another device
    forget_sizes(tmp_path / "checkpoints")
    assert read_sizes(tmp_path / "checkpoints", 5) == {}
    alone = MicroBatchPlan(plan_of(1).micro_batches, recomputes_all=True, chunk_frames=1)
    with pytest.raises(ResourceError, match="does not fit"):
        SimulatedWork(fits=0).run_attempt(OomAttempt(alone)).result_or_raise(splits)


def test_only_connection_errors_become_rank_lost():
    with pytest.raises(RankLost, match="Connection closed by peer"), raise_rank_lost():
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with pytest.raises(RuntimeError, match="a mistake") as caught, raise_rank_lost():
        raise RuntimeError("a mistake")
    assert not isinstance(caught.value, RankLost)


def test_bucket_is_as_large_as_the_gradients_and_at_most_25_mib():
    assert new_bucket([torch.zeros(3), torch.zeros(2, 2)]).numel() == 7
    assert new_bucket([torch.empty(2**24, device="meta")]).nbytes == 25 * 2**20


def test_second_signal_does_not_exit_a_rank_of_several(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(os, "write", lambda *_: 0)
    for topology in (TWO, ALONE):
        interruption = Interruption(topology)
        interruption._handle(signal.SIGTERM, None)
        interruption._handle(signal.SIGTERM, None)
        assert interruption.is_requested()
    assert ended == [143]  # only in single-process training


@pytest.mark.parametrize(("rank", "code"), [({"RANK": "1"}, 0), ({}, -signal.SIGABRT)])
def test_rank_exits_without_running_atexit_handlers(rank, code):
    """Negative control: without the rank variable, the same process aborts."""
    script = (
        "import atexit, os; from konkanivani.command_line import end_script; "
        "atexit.register(os.abort); print('told', end=''); end_script(0)"
    )
    alone = {name: value for name, value in os.environ.items() if name != "RANK"}
    ended = subprocess.run([sys.executable, "-c", script], env=alone | rank, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, "told")


def test_only_local_rank_0_reports_command_line_errors(monkeypatch, capsys):
    def fail() -> None:
        with command_line.print_on_local_rank0():
            print("told")
            raise UsageError("wrong")

    monkeypatch.setattr(command_line, "GRACE_SECONDS", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError):
        fail()
    assert capsys.readouterr().out == "told\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ReportedByOtherRank) as caught:
        fail()
    assert caught.value.exit_code == 2 and capsys.readouterr().out == ""


def test_logbook_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Logbook(None) as logbook:
        logbook.log_settings("--flag 1")
        logbook.flush()
    assert list(tmp_path.iterdir()) == []


def test_planned_state_of_a_sharded_rank_is_smaller():
    costs = cuda_costs("T4", (7, 5))
    whole, bucket, shared = (
        costs_per_rank(costs, ARCHITECTURE, ranks) for ranks in (Ranks(), Ranks(8), Ranks(8, sharded=True))
    )
    assert whole == costs and bucket.among_ranks == 25 * 2**20
    assert -393 * 2**20 < shared.among_ranks < -290 * 2**20  # of 392 MiB
    small = TrainConfig(model=ModelConfig(d_model=16, encoder_layers=1, decoder_layers=1))
    tiny = costs_per_rank(costs, architecture_of(small, 20), Ranks(2))
    assert 0 < tiny.among_ranks < 2**20


def test_shard_auto_shards_the_state_only_if_it_does_not_fit():
    costs = cuda_costs("T4", (7, 5))
    config = TrainConfig(model=SHAPE)
    assert not choose_ranks(config, costs, 4 * GIB, world_size=8).sharded
    assert choose_ranks(config, costs, GIB // 2, world_size=8).sharded
    assert not choose_ranks(config, costs, GIB // 2, world_size=1).sharded
    always = TrainConfig(model=SHAPE, memory=MemoryConfig(shard="always"))
    assert choose_ranks(always, costs, 4 * GIB, world_size=2).sharded


def test_traffic_equals_that_of_a_ring_all_reduce():
    gradients = 392 * 2**20 * 4 // STATE_BYTES
    assert traffic_bytes(ARCHITECTURE, Ranks(1)) == 0
    assert traffic_bytes(ARCHITECTURE, Ranks(2)) == pytest.approx(gradients, rel=0.01)
    assert traffic_bytes(ARCHITECTURE, Ranks(64)) == pytest.approx(2 * gradients, rel=0.03)
    assert 1.4 < traffic_bytes(ARCHITECTURE, Ranks(8, sharded=True)) / traffic_bytes(ARCHITECTURE, Ranks(8)) <= 1.5
