"""Repeated SIGKILL to one training run, and the checks after each kill and at the end."""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from konkanivani.checkpoints.checkpoint import read_step
from tests.conftest import TINY_MODEL, Corpus, read_log
from tests.faults.fuse import BEST_NAME, EPOCH, POINTS, WORSE_IN_A_ROW, Fuse, Point
from tests.faults.long_run import SCRIPT, Aftermath, LongRun
from tests.faults.resuming import run_differences

KEPT_EPOCHS = 3
FEWER_EPOCHS = ("--keep_checkpoints", "2")  # a save then has two to remove
SAVE_STEPS = 2  # for the runs killed at random instants


@dataclass(frozen=True)
class Death:
    """One kill: its place, the files after it, and sentences on errors."""

    where: str
    aftermath: Aftermath
    complaints: tuple[str, ...]


def small_run(corpus: Corpus, directory: Path, *more: str) -> LongRun:
    """Return a run of the smallest model that can end after any step: its schedule does not depend on the length."""
    flags = ("--encoder_layers", "1", "--batch_size", "4", "--gradient_accumulation_steps", "2", "--epochs", "1000")
    steady = ("--schedule", "inverse_sqrt", "--warmup_steps", "2", "--keep_checkpoints", str(KEPT_EPOCHS))
    return LongRun(directory, (*TINY_MODEL, "--train_manifest", corpus.manifest("train"), *flags, *steady, *more))


def run_to_be_killed_at_points(corpus: Corpus, directory: Path) -> LongRun:
    """Return a run that saves after every step; without validation every epoch is the best and gets all names."""
    return small_run(corpus, directory, "--save_steps", "1", "--num_workers", "0")


def run_to_be_killed_at_random(corpus: Corpus, directory: Path) -> LongRun:
    """Return a run that saves every second step, validates after each epoch, and reads audio in two workers."""
    more = ("--save_steps", str(SAVE_STEPS), "--valid_manifest", corpus.manifest("valid"), "--num_workers", "2")
    return small_run(corpus, directory, *more)


def kill_at(run: LongRun, point: Point, skip: int) -> Death:
    """Run until this point of a save, passed `skip` times before (0 if only epochs have the point), and kill."""
    fuse = Fuse(point, 0 if point.name.startswith((EPOCH, BEST_NAME)) else skip)
    code = run.begin(*(FEWER_EPOCHS if point.occurrence == 2 else ()), trap=fuse).end()
    found = run.aftermath()
    epochs = run.checkpoints.glob("checkpoint_epoch_*.pt")
    is_saved = point.is_published or (point.has_epoch and found.logged in map(read_step, epochs))
    expected = found.logged if is_saved else found.logged - 1
    complaints = complaints_of(found, code, most_lost=1)
    if found.saved != expected:
        complaints.append(f"step {found.saved} was found in place of {expected}")
    return Death(point.label, found, tuple(complaints))


def kill_at_random(run: LongRun, draw: random.Random, starts_anew: bool = False) -> Death:
    """Run until a random instant and kill: a quarter of the kills during startup, the others during training.

    `starts_anew`: start a new interpreter with all its imports.
    """
    before = run.logged_step()
    life = run.begin_script(SCRIPT) if starts_anew else run.begin()
    if draw.random() < 0.25:
        where, seconds = "while starting", draw.random() * (6.0 if starts_anew else 1.0)
    else:
        life.wait_until(lambda: run.logged_step() > before, "the first step")
        where, seconds = "while training", draw.random() * 0.6
    time.sleep(seconds)
    life.kill()
    code = life.end()
    found = run.aftermath()
    where = "while saving" if found.was_saving and where == "while training" else where
    return Death(where, found, tuple(complaints_of(found, code, SAVE_STEPS)))


def complaints_of(found: Aftermath, code: int | None, most_lost: int) -> list[str]:
    """Return the errors after a kill as sentences."""
    complaints = []
    if code != -9:
        complaints.append("it hung" if code is None else f"it ended by itself with {code}")
    if found.unsound:
        complaints.append(f"{', '.join(found.unsound)} cannot be read")
    if not 0 <= found.steps_lost <= most_lost:
        complaints.append(f"step {found.logged} was logged and step {found.saved} was found")
    return complaints


def what_differs(run: LongRun, undisturbed: LongRun) -> list[str]:
    """Continue the run for three steps, train another without kills to the same step, and return the differences."""
    steps = run.logged_step() + 3
    for each in (run, undisturbed):
        code = each.begin("--max_steps", str(steps)).end()
        if code != 0:
            return [f"{each.directory.name} ended with {code}: {each.output.read_text(encoding='utf-8')[-2000:]}"]
    # The two runs were planned for different lengths, which the inverse square root schedule does not depend on.
    differences = run_differences(undisturbed.directory, run.directory)
    found = [difference for difference in differences if not difference.startswith("schedule/")]
    logged = [record["step"] for record in read_log(run.directory)]
    if logged != list(range(1, steps + 1)):
        found.append("the log does not hold each step once")
    return found + left_behind(run)


def left_behind(run: LongRun) -> list[str]:
    """Return sentences on files that a finished run should have removed."""
    paths = [path for path in run.directory.rglob("*") if path.suffix in (".partial", ".damaged", ".tmp")]
    found = [f"{path.name} was left behind" for path in paths]
    epochs = len(list(run.checkpoints.glob("checkpoint_epoch_*.pt")))
    if epochs > KEPT_EPOCHS:
        found.append(f"{epochs} epochs were kept")
    return found + run.tracebacks()


def kill_at_points(run: LongRun, count: int, points: Sequence[Point] = (*POINTS, *WORSE_IN_A_ROW)) -> list[Death]:
    """Kill the run `count` times, cycling through all points.

    The first two kills hit the first save; after the second, half a file and no checkpoint exist.
    """
    points = itertools.islice(itertools.cycle(points), count)
    return [kill_at(run, point, skip=number % 3 if number > 1 else 0) for number, point in enumerate(points)]
