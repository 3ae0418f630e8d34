"""Repeated SIGKILL to one training run, and the checks after each kill and at the end."""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from konkanivani.checkpoints.checkpoint import read_step
from tests.conftest import TINY_MODEL, Corpus, read_log
from tests.faults.long_run import SCRIPT, EndState, LongRun
from tests.faults.resumed_runs import run_differences
from tests.faults.save_killer import BEST_NAME, CRITICAL_SEQUENCE, EPOCH, POINTS, Point, SaveKiller

KEPT_EPOCHS = 3
FEWER_EPOCHS = ("--keep_checkpoints", "2")  # a save then has two to remove
SAVE_STEPS = 2  # for the runs killed at random instants


@dataclass(frozen=True)
class KillResult:
    """Result of one kill: its place, the files after it, and sentences on errors."""

    where: str
    end_state: EndState
    errors: tuple[str, ...]


def small_endless_run(corpus: Corpus, directory: Path, *more: str) -> LongRun:
    """Return a run of the smallest model that can end after any step: its schedule does not depend on its length."""
    flags = ("--encoder_layers", "1", "--batch_size", "4", "--gradient_accumulation_steps", "2", "--epochs", "1000")
    steady = ("--schedule", "inverse_sqrt", "--warmup_steps", "2", "--keep_checkpoints", str(KEPT_EPOCHS))
    return LongRun(directory, (*TINY_MODEL, "--train_manifest", corpus.manifest("train"), *flags, *steady, *more))


def run_for_kills_at_points(corpus: Corpus, directory: Path) -> LongRun:
    """Return a run that saves after every step; without validation every epoch is the best one, with all names."""
    return small_endless_run(corpus, directory, "--save_steps", "1", "--num_workers", "0")


def run_for_random_kills(corpus: Corpus, directory: Path) -> LongRun:
    """Return a run that saves every second step, validates after each epoch, and reads audio in two workers."""
    more = ("--save_steps", str(SAVE_STEPS), "--valid_manifest", corpus.manifest("valid"), "--num_workers", "2")
    return small_endless_run(corpus, directory, *more)


def kill_at(run: LongRun, point: Point, skip: int) -> KillResult:
    """Run until this point of a save, passed `skip` times before (0 if only epochs have this point), and kill."""
    killer = SaveKiller(point, 0 if point.name.startswith((EPOCH, BEST_NAME)) else skip)
    code = run.start(*(FEWER_EPOCHS if point.occurrence == 2 else ()), fault=killer).wait()
    end_state = run.end_state()
    epochs = run.checkpoints.glob("checkpoint_epoch_*.pt")
    is_saved = point.is_published or (point.has_epoch and end_state.logged in map(read_step, epochs))
    expected = end_state.logged if is_saved else end_state.logged - 1
    errors = state_errors(end_state, code, max_steps_lost=1)
    if end_state.saved != expected:
        errors.append(f"step {end_state.saved} was found in place of {expected}")
    return KillResult(point.label, end_state, tuple(errors))


def kill_at_random(run: LongRun, draw: random.Random, is_new_interpreter: bool = False) -> KillResult:
    """Run until a random instant and kill: a quarter of the kills during startup, the others during training.

    `is_new_interpreter`: start a new interpreter instead of a fork.
    """
    before = run.logged_step()
    trainer = run.start_script(SCRIPT) if is_new_interpreter else run.start()
    if draw.random() < 0.25:
        where, seconds = "while starting", draw.random() * (6.0 if is_new_interpreter else 1.0)
    else:
        trainer.wait_until(lambda: run.logged_step() > before, "the first step")
        where, seconds = "while training", draw.random() * 0.6
    time.sleep(seconds)
    trainer.kill()
    code = trainer.wait()
    end_state = run.end_state()
    where = "while saving" if end_state.was_saving and where == "while training" else where
    return KillResult(where, end_state, tuple(state_errors(end_state, code, SAVE_STEPS)))


def state_errors(end_state: EndState, code: int | None, max_steps_lost: int) -> list[str]:
    """Return the errors after a kill as sentences."""
    errors = []
    if code != -9:
        errors.append("it hung" if code is None else f"it ended by itself with {code}")
    if end_state.invalid_files:
        errors.append(f"{', '.join(end_state.invalid_files)} cannot be read")
    if not 0 <= end_state.steps_lost <= max_steps_lost:
        errors.append(f"step {end_state.logged} was logged and step {end_state.saved} was found")
    return errors


def differences_from_undisturbed(run: LongRun, undisturbed: LongRun) -> list[str]:
    """Continue the run for three steps, train another without kills to the same step, and return the differences."""
    steps = run.logged_step() + 3
    for each in (run, undisturbed):
        code = each.start("--max_steps", str(steps)).wait()
        if code != 0:
            return [f"{each.directory.name} ended with {code}: {each.output.read_text(encoding='utf-8')[-2000:]}"]
    # The two runs were planned for different lengths, which the inverse square root schedule does not depend on.
    differences = run_differences(undisturbed.directory, run.directory)
    results = [difference for difference in differences if not difference.startswith("schedule/")]
    logged = [record["step"] for record in read_log(run.directory)]
    if logged != list(range(1, steps + 1)):
        results.append("the log does not hold each step once")
    return results + leftover_files(run)


def leftover_files(run: LongRun) -> list[str]:
    """Return sentences on files that a finished run should have removed."""
    paths = [path for path in run.directory.rglob("*") if path.suffix in (".partial", ".damaged", ".tmp")]
    results = [f"{path.name} was left behind" for path in paths]
    epochs = len(list(run.checkpoints.glob("checkpoint_epoch_*.pt")))
    if epochs > KEPT_EPOCHS:
        results.append(f"{epochs} epochs were kept")
    return results + run.tracebacks()


def kill_at_points(
    run: LongRun, count: int, points: Sequence[Point] = (*POINTS, *CRITICAL_SEQUENCE)
) -> list[KillResult]:
    """Kill the run `count` times, cycling through all points.

    The first two kills hit the first save; after the second, half a file and no checkpoint exist.
    """
    points = itertools.islice(itertools.cycle(points), count)
    return [kill_at(run, point, skip=number % 3 if number > 1 else 0) for number, point in enumerate(points)]
