"""A run under a memory budget: plan, rehearsal, resume, and out-of-budget errors."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.config import TrainConfig
from konkanivani.console import parse_budget
from konkanivani.errors import CheckpointError, ResourceError, UsageError
from konkanivani.memory.devices import cpu_costs
from konkanivani.memory.monitor import BudgetWatch, available_bytes
from konkanivani.memory.plan import BucketPlan, MemoryPlan, read_plan
from konkanivani.models.architecture import architecture_of
from konkanivani.planning import plan as run_plan
from konkanivani.planning.plan import bucket_edges
from konkanivani.planning.sizes import ONE_RANK
from konkanivani.planning.traces import build_tracer
from konkanivani.recipe import train as rehearsal
from konkanivani.recipe.build import build_run
from konkanivani.recipe.train import is_rehearsed
from konkanivani.training.loop import train
from konkanivani.training.run import Run
from tests.conftest import TINY_MODEL, Corpus, checked, read_log, run_folders, run_trainer
from tests.run_setup import begin_run, parse_flags

PLAN = MemoryPlan(
    conditions=5,
    budget=1000,
    context=50,
    buckets=(BucketPlan(2.0, 10, 4, 0, 900), BucketPlan(8.0, 40, 1, 3, 1000)),
    validation_seconds=30.0,
    forward=1,
    backward=2,
    update=3,
    validation=4,
)


def build_tiny_run(corpus: Corpus, directory: Path, *more: str) -> Run:
    flags = (*TINY_MODEL, *corpus.flags(), *run_folders(directory), "--num_workers", "0", *more)
    return build_run(begin_run(list(flags)))


def limits_of(run: Run) -> list[tuple[int, int]]:
    return [(bucket.utterances, bucket.recomputed_blocks) for bucket in run.plan.buckets]


@pytest.mark.parametrize(
    ("flags", "effective_batch"),
    [
        (["--batch_size", "auto"], 8),
        (["--batch-size=auto", "--effective-batch-size=12"], 12),
        (["--batch_size", "3"], 9),
        (["--batch_size", "1"], 8),
        (["--batch_size", "2", "--effective_batch_size", "6"], 6),
    ],
)
def test_effective_batch_size_follows_the_flags(flags, effective_batch):
    assert parse_flags(flags).global_batch_size == effective_batch


def test_resumed_run_keeps_its_effective_batch_with_other_micro_batches():
    stored = parse_flags(["--batch_size", "3"])
    assert parse_flags(["--batch_size", "auto"], stored).global_batch_size == 9
    planned = parse_flags(["--batch_size", "auto", "--effective_batch_size", "6"])
    assert parse_flags(["--batch_size", "3", "--gradient_accumulation_steps", "2"], planned).global_batch_size == 6
    assert parse_flags([], planned).global_batch_size == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch_size", "auto", "--gradient_accumulation_steps", "2"], "chooses the micro-batches"),
        (["--batch_size", "2", "--effective_batch_size", "5"], "contradicts"),
        (["--batch_size", "2", "--gradient_accumulation_steps", "4", "--effective_batch_size", "6"], "contradicts"),
        (["--effective_batch_size", "0", "--batch_size", "auto"], "at least 1"),
        (["--memory_budget", "4"], "a number and a unit"),
        (["--memory_budget", "1KiB"], "is out of range"),
    ],
)
def test_contradictory_or_invalid_batch_flags_are_rejected(flags, message):
    with pytest.raises(UsageError, match=message):
        parse_flags(flags)


def test_buckets_end_at_the_longest_utterance():
    seconds = np.random.default_rng(0).uniform(0.5, 17.0, size=500)
    edges = bucket_edges(seconds)
    assert edges == sorted(set(edges)) and 4 <= len(edges) <= run_plan.MAX_BUCKETS
    assert seconds.max() <= edges[-1] < seconds.max() + 0.011
    assert bucket_edges(np.array([3.0])) == [3.0]


def test_plan_round_trips_through_a_checkpoint_and_invalid_is_rejected():
    assert read_plan(PLAN.state_dict()) == PLAN
    assert [PLAN.recompute_policy()(seconds).count for seconds in (1.0, 5.0)] == [0, 3]
    for broken in ({"buckets": []}, {"buckets": [[1.0, 2]]}, {"peaks": ["x"] * 4}, {"budget": None}):
        with pytest.raises(CheckpointError, match="--replan"):
            read_plan(PLAN.state_dict() | broken)
    with pytest.raises(CheckpointError, match="memory plan is invalid"):
        read_plan(dataclasses.replace(PLAN, buckets=PLAN.buckets[::-1]).state_dict())


def test_smaller_budget_gives_smaller_micro_batches_and_recomputation(corpus, tmp_path):
    deep = ("--encoder_layers", "4")
    auto = ("--batch_size", "auto", "--gradient_checkpointing", "auto", "--max_steps", "1", *deep)
    roomy = build_tiny_run(corpus, tmp_path / "roomy", *auto, "--memory_budget", "330MiB")
    config = parse_flags([*TINY_MODEL, *deep])
    one = build_tracer(config, architecture_of(config, 30), cpu_costs())
    longest = roomy.plan.buckets[-1]
    needed = one.trace(run_plan.BatchShape(1, longest.seconds, longest.tokens), run_plan.RecomputePolicy.first(1))
    tight_budget = f"{(needed.bytes + one.costs.workspace) // 1024 + 1}KiB"
    tight = build_tiny_run(corpus, tmp_path / "tight", *auto, "--memory_budget", tight_budget)
    assert limits_of(roomy)[-1][0] > 1 and limits_of(tight)[-1] == (1, 1)
    for run in (roomy, tight):
        assert run.plan.peak <= run.plan.budget
        train(run)
        step = read_log(Path(run.storage.checkpointer.directory).parent)[0]
        assert step["utterances"] == 8 and step["splits"] == 0
        planned = {phase["phase"]: phase["planned_mib"] for phase in step["memory"]}
        assert planned["forward"] > 0 and planned["backward"] > 0
    losses = [read_log(tmp_path / name)[0]["loss"] for name in ("roomy", "tight")]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)  # dropout uses other masks for other micro-batches


def test_resumed_run_reuses_its_plan_unless_replan_is_given(corpus, tmp_path, monkeypatch, capsys):
    train(build_tiny_run(corpus, tmp_path, "--batch_size", "auto", "--memory_budget", "480MiB", "--max_steps", "2"))
    stored = read_plan(read_checkpoint(tmp_path / "checkpoints" / LAST).states["plan"])
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    resumed = (*run_folders(tmp_path), "--max_steps", "3", "--resume", "auto")

    def no_planning(*_):
        raise AssertionError("a new plan is made")

    with monkeypatch.context() as patch:
        patch.setattr(run_plan, "Planner", no_planning)
        run = build_run(begin_run(list(resumed)))
        assert run.plan == stored
        train(run)
        assert run.state.step == 3
        del run
        with pytest.raises(AssertionError, match="a new plan is made"):
            build_run(begin_run([*run_folders(tmp_path.with_name("copy")), "--resume", "auto", "--replan"]))
    capsys.readouterr()
    other = [*run_folders(tmp_path.with_name("copy")), "--resume", "auto", "--memory_budget", "380MiB"]
    assert build_run(begin_run(other)).plan.budget == parse_budget("380MiB")
    assert "under different conditions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value", "matters"),
    [
        ("intermediate_ctc_weight", "0.3", True),  # 326 instead of 315 MiB; a past bug ignored it
        ("validation_batch_seconds", "40", True),
        ("ctc_weight", "0.5", True),
        ("mixed_precision", None, True),
        ("effective_batch_size", "4", True),
        ("learning_rate", "0.01", False),
        ("epochs", "3", False),
        ("keep_checkpoints", "9", False),
    ],
)
def test_plan_conditions_change_only_with_settings_that_matter(flag, value, matters):
    def conditions(*more: str) -> int:
        given = parse_flags(["--batch_size", "auto", "--memory_budget", "480MiB", *more])
        return run_plan.plan_conditions(given, architecture_of(given, 30), torch.device("cpu"), ONE_RANK)

    other = conditions(f"--{flag}", *([value] if value else []))
    assert (other != conditions()) is matters


def weights_after(corpus: Corpus, directory: Path, *more: str) -> dict[str, torch.Tensor]:
    flags = ("--batch_size", "auto", "--memory_budget", "480MiB", "--max_steps", "3", *more)
    done = checked(run_trainer(*TINY_MODEL, *corpus.flags(), *run_folders(directory), *flags))
    assert ("Largest batches tested and undone: the longest utterances" in done.stdout) == ("never" not in more)
    return read_checkpoint(directory / "checkpoints" / LAST).states


def test_run_with_a_rehearsal_equals_a_run_without_one_bit_for_bit(corpus, tmp_path):
    with_one = weights_after(corpus, tmp_path / "with")
    without = weights_after(corpus, tmp_path / "without", "--rehearsal", "never")
    for part in ("model", "optimizer"):
        assert all(torch.equal(with_one[part][name], tensor) for name, tensor in without[part].items())
    losses = [[step["loss"] for step in read_log(tmp_path / name)] for name in ("with", "without")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    record = read_log(tmp_path / "with", kind="rehearsal")[0]
    phases = {phase["phase"]: phase for phase in record["memory"]}
    assert {"forward", "backward", "update", "validation"} <= phases.keys()
    assert all(phases[name]["planned_mib"] > 0 for name in ("forward", "backward", "validation"))
    assert not list((tmp_path / "with" / "checkpoints").glob("rehearsal*"))


def test_negative_control_a_rehearsal_that_is_not_undone_changes_the_weights(corpus, tmp_path, monkeypatch):
    run = build_tiny_run(corpus, tmp_path, "--batch_size", "auto", "--memory_budget", "480MiB")
    before = {name: tensor.clone() for name, tensor in run.step.model.state_dict().items()}
    tried = rehearsal.rehearse(run)
    assert all(torch.equal(before[name], tensor) for name, tensor in run.step.model.state_dict().items())
    assert tried[0].name == "the longest utterances" and tried[-1].name == "validation"
    monkeypatch.setattr(rehearsal, "KEPT", ("model", "optimizer", "progress", "splits"))
    rehearsal.rehearse(run)
    assert not all(torch.equal(before[name], tensor) for name, tensor in run.step.model.state_dict().items())


def test_utterances_that_do_not_fit_are_reported_with_advice(corpus, tmp_path):
    with pytest.raises(ResourceError) as caught:
        build_tiny_run(corpus, tmp_path, "--memory_budget", "302MiB")
    message = str(caught.value)
    assert "training utterances do not fit the budget of 302MiB even in a micro-batch of one: audio/train_" in message
    assert "--gradient_checkpointing auto" in message and "--mixed_precision" in message


def test_trainer_rejects_a_budget_below_the_model_state(corpus, tmp_path):
    flags = (*corpus.flags(), *run_folders(tmp_path), "--preset", "optimized", "--device", "cpu")
    done = run_trainer(*flags, "--memory_budget", "380MiB", "--tokenizer_type", "char")
    assert done.returncode == 6 and "--preset minimal" in done.stderr
    assert "MiB, and a CPU needs another" in done.stderr and "380 MiB" in done.stderr


def test_budget_watch_warns_once_about_an_exceeded_budget(capsys):
    watch = BudgetWatch(budget=100.0, resident_before=500.0)
    assert not watch.look(599.0) and watch.look(601.0) and watch.look(700.0)
    assert capsys.readouterr().out.count("more than the budget of 100 MiB") == 1
    assert not BudgetWatch(float("inf"), 1.0).look(1e9)


def test_available_memory_is_positive_and_default_run_is_not_planned():
    assert 2**28 < available_bytes(torch.device("cpu")) < 2**44
    assert not TrainConfig().is_planned and not is_rehearsed(TrainConfig())
    assert is_rehearsed(parse_flags(["--gradient_checkpointing", "auto"]))
    assert not is_rehearsed(parse_flags(["--memory_budget", "1GiB", "--rehearsal", "never"]))
