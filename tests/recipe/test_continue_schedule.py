"""The learning rate of a run that is resumed with another length: kept, stretched or warmed up, and always reported.

The rates in the log are compared with the formulas of the schedules, written here independently.
"""

import dataclasses
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.config import OptimizerConfig
from konkanivani.errors import CheckpointError
from konkanivani.recipe.build import build_run
from konkanivani.training.loop import train
from konkanivani.training.optimizer_state import RateSchedule, change_length, read_schedule
from konkanivani.training.run import Run
from tests.conftest import TINY_MODEL, Corpus, parameter_grid, read_log, run_folders
from tests.run_setup import begin_run

PEAK, WARMUP = 2e-3, 4
FIRST, LONGER, LONGEST = 12, 30, 36  # steps; 4 are an epoch of the 26 utterances
MODEL = (*TINY_MODEL, "--encoder_layers", "1", "--decoder_layers", "0", "--ctc_weight", "1", "--num_workers", "0")
BATCHING = ("--batch_size", "8", "--gradient_accumulation_steps", "1", "--epochs", "100", "--first_epoch", "shuffled")
RATES = ("--learning_rate", str(PEAK), "--warmup_steps", str(WARMUP))


def cosine(step: int, steps: int) -> float:
    """Return the rate of a step of a cosine schedule with this number of steps."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    share = min(1.0, (step - WARMUP) / (steps - 1 - WARMUP))
    return PEAK * (0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2)


def inverse_sqrt(step: int, _steps: int) -> float:
    """Return the rate of a step of an inverse square root schedule, which does not depend on the number of steps."""
    return PEAK * (step + 1) / WARMUP if step < WARMUP else PEAK * math.sqrt(WARMUP / (step + 1))


Formula = Callable[[int, int], float]


def kept(rate: Formula, steps: int) -> list[float]:
    """Return the rates after `FIRST` steps if the first schedule is kept: a cosine stays at its final rate."""
    return [rate(step, FIRST) for step in range(FIRST, steps)]


def stretched(rate: Formula, steps: int) -> list[float]:
    """Return the rates after `FIRST` steps if the longer schedule applies at once."""
    return [rate(step, steps) for step in range(FIRST, steps)]


def warmed(rate: Formula, steps: int) -> list[float]:
    """Return the rates after `FIRST` steps if a straight line leads to the longer schedule in `WARMUP` steps."""
    low, high = rate(FIRST - 1, FIRST), rate(FIRST + WARMUP - 1, steps)
    line = [low + (high - low) * number / WARMUP for number in range(1, WARMUP + 1)]
    return line + [rate(step, steps) for step in range(FIRST + WARMUP, steps)]


WAYS = {"keep": kept, "stretch": stretched, "warm": warmed}


def build(corpus: Corpus, folder: Path, *more: str) -> Run:
    """Return a run in the folder, resumed if the folder has a checkpoint."""
    flags = (*MODEL, *BATCHING, *RATES, "--train_manifest", corpus.manifest("train"), *run_folders(folder))
    return build_run(begin_run([*flags, "--resume", "auto", *more]))


def train_until(run: Run, step: int) -> None:
    """Train up to this step and save, with unchanged settings, like a run stopped by a signal."""
    train(run, last_step=min(step, run.step.total_steps))


def logged_rates(folder: Path) -> list[float]:
    return [record["learning_rate"] for record in read_log(folder)]


@pytest.fixture(scope="module")
def first(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of finished runs of `FIRST` steps, by their schedule."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("cosine", "inverse_sqrt")}
    for name, folder in folders.items():
        train(build(corpus, folder, "--schedule", name, "--max_steps", str(FIRST)))
    return folders


@pytest.fixture
def clone_run(first: dict[str, Path], tmp_path: Path) -> Callable[[str, str], Path]:
    """Return a function that copies one of these runs."""

    def copy(schedule: str, name: str) -> Path:
        return Path(shutil.copytree(first[schedule], tmp_path / name))

    return copy


@pytest.mark.parametrize("rate", [cosine, inverse_sqrt])
def test_by_default_the_first_schedule_and_then_its_final_rate_are_kept(rate, corpus, clone_run, capsys):
    folder = clone_run(rate.__name__, "run")
    train_until(build(corpus, folder, "--max_steps", str(LONGER)), 20)
    expected = [rate(step, FIRST) for step in range(FIRST)] + kept(rate, 20)
    assert logged_rates(folder) == pytest.approx(expected, rel=1e-9)
    output = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Learning rate:")]
    before, after = rate(FIRST - 1, FIRST), rate(FIRST, FIRST)
    assert output == [
        f"Learning rate: {before:.2e} at step 12, {after:.2e} next: schedule planned for 12 steps, now 30 "
        "(--continue_schedule keep)."
    ]
    if rate is cosine:
        assert expected[FIRST - 1 :] == pytest.approx([PEAK / 100] * (20 - FIRST + 1))


@pytest.mark.parametrize(("way", "rate"), parameter_grid(["stretch", "warm"], [cosine, inverse_sqrt]))
def test_repeatedly_stopped_longer_run_has_the_rates_of_an_unstopped_one(way, rate, corpus, clone_run, capsys):
    """Stop before, within and after the ramp, with and without repeating the flags."""
    folder, asked = clone_run(rate.__name__, "run"), ("--max_steps", str(LONGER), "--continue_schedule", way)
    for stop, flags in ((FIRST, asked), (FIRST + 2, asked), (FIRST + 3, asked), (18, ()), (LONGER, asked)):
        train_until(build(corpus, folder, *flags), stop)
    expected = [rate(step, FIRST) for step in range(FIRST)] + WAYS[way](rate, LONGER)
    assert logged_rates(folder) == pytest.approx(expected, rel=1e-9)
    output = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Learning rate:")]
    assert len(output) in (1, 2) and len(set(output)) == 1  # the first of them saved no step
    assert f"{expected[FIRST - 1]:.2e} at step 12, {expected[FIRST]:.2e} next" in output[0]
    assert output[0].endswith(f"(--continue_schedule {way}).")


def test_stopped_longer_run_equals_the_undisturbed_one_bit_for_bit(corpus, clone_run):
    flags, folders = ("--max_steps", str(LONGER), "--continue_schedule", "warm"), []
    for name, stops in (("whole", (17,)), ("pieces", (13, 15, 17))):
        folders.append(clone_run("cosine", name))
        for stop in stops:
            train_until(build(corpus, folders[-1], *flags), stop)
    one, other = (read_checkpoint(folder / "checkpoints" / LAST) for folder in folders)
    for part in ("model", "optimizer"):
        assert all(torch.equal(tensor, other.states[part][name]) for name, tensor in one.states[part].items())
    assert [one.states[name] for name in ("progress", "schedule")] == [
        other.states[name] for name in ("progress", "schedule")
    ]


def test_each_of_two_extensions_applies_from_its_own_step(corpus, clone_run):
    """Extend with warm at step 12, then with keep at step 30."""
    folder = clone_run("cosine", "run")
    train(build(corpus, folder, "--max_steps", str(LONGER), "--continue_schedule", "warm"))
    for stop in (32, LONGEST):
        train_until(build(corpus, folder, "--max_steps", str(LONGEST), "--continue_schedule", "keep"), stop)
    last = [PEAK / 100] * (LONGEST - LONGER)
    expected = [cosine(step, FIRST) for step in range(FIRST)] + warmed(cosine, LONGER) + last
    assert logged_rates(folder) == pytest.approx(expected, rel=1e-9)


def test_shortened_run_keeps_its_schedule_until_stretch_is_given(corpus, tmp_path):
    train_until(build(corpus, tmp_path, "--max_steps", str(LONGER)), 6)
    train(build(corpus, tmp_path, "--max_steps", "8"))
    train_until(build(corpus, tmp_path, "--max_steps", "20"), 10)
    train_until(build(corpus, tmp_path, "--continue_schedule", "stretch"), 12)
    expected = [cosine(step, LONGER) for step in range(10)] + [cosine(step, 20) for step in (10, 11)]
    assert logged_rates(tmp_path) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "flags, after, reason",
    [
        (("--learning_rate", "0.001"), PEAK / 200, "--learning_rate was 0.002, now 0.001"),
        (("--schedule", "inverse_sqrt"), inverse_sqrt(FIRST, 0), "--schedule was cosine, now inverse_sqrt"),
        (
            ("--schedule", "inverse_sqrt", "--warmup_steps", "3"),
            PEAK * math.sqrt(3 / 13),
            "--schedule was cosine, now inverse_sqrt; --warmup_steps was 4, now 3",
        ),
    ],
)
def test_flags_that_change_the_rate_are_reported_with_both_rates(flags, after, reason, corpus, clone_run, capsys):
    run = build(corpus, clone_run("cosine", "run"), "--max_steps", "13", *flags)
    assert run.step.rates.rate(run.step.schedule, FIRST) == pytest.approx(after)
    message = f"Learning rate: {PEAK / 100:.2e} at step 12, {after:.2e} next: {reason}; "
    assert message + "schedule planned for 12 steps, now 13 (--continue_schedule keep).\n" in capsys.readouterr().out


def test_more_epochs_are_reported_like_more_steps(corpus, tmp_path, capsys):
    train(build(corpus, tmp_path, "--epochs", "2"))
    build(corpus, tmp_path, "--epochs", "5", "--continue_schedule", "stretch")
    message = "schedule planned for 8 steps, now 20 (--continue_schedule stretch)."
    assert message in capsys.readouterr().out
    build(corpus, tmp_path, "--epochs", "2")
    build(corpus, tmp_path, "--epochs", "1")
    assert "Learning rate:" not in capsys.readouterr().out  # negative control: no steps are left


def test_rates_of_initially_frozen_layers_are_reported(corpus, base, tmp_path, capsys):
    """Their warm-up of 3 steps becomes 10 steps when the run is extended from 10 to 40 steps."""
    begun = ("--train_manifest", corpus.manifest("train"), *run_folders(tmp_path), "--num_workers", "0")
    begun += ("--batch_size", "8", "--gradient_accumulation_steps", "1", "--learning_rate", "0.001")
    begun += ("--warmup_steps", "10", "--freeze_steps", "2", "--max_steps", "10")
    flags = [*begun, "--init_from", str(base), "--resume", "auto"]
    train_until(build_run(begin_run(flags)), 4)
    longer = ["--max_steps", "40", "--continue_schedule"]
    run = build_run(begin_run([*flags, *longer, "stretch"]))
    tuning, schedule = run.config.tuning, run.step.schedule
    assert run.step.rates.delayed_warmup_factor(schedule, tuning, 4) == pytest.approx(3 / 10)
    before, after = expected_rate(3, 10), 0.001 * 5 / 10
    lower = f"(layers below the head: {before * 2 / 3:.2e}, then {after * 0.3:.2e})"
    assert f"{before:.2e} at step 4, {after:.2e} next {lower}" in capsys.readouterr().out
    run = build_run(begin_run([*flags, *longer, "warm"]))
    assert run.step.rates.delayed_warmup_factor(schedule, tuning, 4) == 1  # as planned: no jump


def expected_rate(step: int, steps: int) -> float:
    """Return the rate of a step after a warm-up of a third of the run."""
    warmup = steps // 3
    return 0.001 * (0.01 + 0.99 * (1 + math.cos(math.pi * (step - warmup) / (steps - 1 - warmup))) / 2)


def rewrite(folder: Path, change: Callable[[dict], dict], steps_less: int = 0) -> None:
    """Replace the states of the last checkpoint and remove the new flag from its settings."""
    path = folder / "checkpoints" / LAST
    result = read_checkpoint(path)
    older = "".join(line for line in result.config.splitlines(True) if not line.startswith("--continue_schedule"))
    states = change(result.states)
    write_checkpoint(path, dataclasses.replace(result, config=older, states=states, step=result.step - steps_less))


def without_schedule(states: dict) -> dict:
    return {name: state for name, state in states.items() if name != "schedule"}


def test_older_checkpoint_keeps_the_schedule_of_its_own_length(corpus, clone_run, capsys):
    folder = clone_run("cosine", "run")
    rewrite(folder, without_schedule)
    train_until(build(corpus, folder, "--max_steps", str(LONGER)), 14)
    expected = [cosine(step, FIRST) for step in range(FIRST)] + kept(cosine, 14)
    assert logged_rates(folder) == pytest.approx(expected, rel=1e-9)
    assert "schedule planned for 12 steps, now 30 (--continue_schedule keep)." in capsys.readouterr().out


@pytest.mark.parametrize("name, value", [("planned_steps", -1), ("ramp_rate", "x"), ("run_steps", 3.5)])
def test_invalid_schedule_state_is_rejected_with_its_field(name, value, corpus, clone_run):
    folder = clone_run("cosine", "run")
    rewrite(folder, lambda states: states | {"schedule": states["schedule"] | {name: value}})
    with pytest.raises(CheckpointError, match=name):
        build(corpus, folder, "--max_steps", str(LONGER))


def test_unreadable_batch_does_not_change_the_run_length(corpus, tmp_path, capsys):
    """Such a batch makes no step; the rates stay as planned in all three modes."""
    train_until(build(corpus, tmp_path, "--epochs", "5"), 6)
    rewrite(tmp_path, lambda states: states | {"progress": states["progress"] | {"step": 5}}, steps_less=1)
    for way in WAYS:
        run = build(corpus, tmp_path, "--epochs", "5", "--continue_schedule", way)
        assert [run.step.rates.rate(run.step.schedule, step) for step in range(5, 20)] == pytest.approx(
            [cosine(step, 20) for step in range(5, 20)]
        )
    assert "Learning rate:" not in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(4))
def test_learning_rate_never_jumps_with_repeated_warm_changes(seed):
    draw, config = random.Random(seed), OptimizerConfig(learning_rate=PEAK, warmup_steps=20, continue_schedule="warm")
    config = dataclasses.replace(config, schedule=draw.choice(["cosine", "inverse_sqrt"]))
    schedule, step, rates = RateSchedule.of_length(draw.randint(100, 300)), 0, []
    for _ in range(6):
        stop = draw.randint(step, schedule.run_steps)
        rates += [schedule.rate(config, at) for at in range(step, stop)]
        step = stop
        if step:
            schedule = read_schedule(
                change_length(schedule, config, config, step + draw.randint(100, 300), step).state_dict()
            )
    rates += [schedule.rate(config, at) for at in range(step, schedule.run_steps)]
    steepest = max(abs(one - other) for one, other in zip(rates, rates[1:], strict=False))
    assert steepest <= PEAK / 20 * 1.001


def test_negative_control_learning_rate_jumps_with_stretch():
    config = OptimizerConfig(learning_rate=PEAK, warmup_steps=WARMUP, continue_schedule="stretch")
    old = RateSchedule.of_length(100)
    new = change_length(old, config, config, 200, 100)
    assert (old.rate(config, 99), new.rate(config, 100)) == pytest.approx((cosine(99, 100), cosine(100, 200)))
    assert new.rate(config, 100) > 40 * old.rate(config, 99)
