"""A run tried in a minute, from its flags to going on from its checkpoint, and everything of it removed again."""

import contextlib
import dataclasses
import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.base.command_line import silence_output
from konkanivani.base.config import TrainConfig
from konkanivani.base.console import StageClock, count, duration_words
from konkanivani.base.distributed import read_topology
from konkanivani.base.errors import CheckpointError, UsageError
from konkanivani.base.files import scratch_folder
from konkanivani.base.flags import CommandLine, parse_args
from konkanivani.base.signals import stop_at_signals
from konkanivani.base.units import MIB
from konkanivani.recipe.build import build_run
from konkanivani.recipe.start import Start, resolve_start
from konkanivani.recipe.train import json_value, tell_rehearsal
from konkanivani.training.checkpoint.checkpoint import Checkpoint, read_checkpoint
from konkanivani.training.checkpoint.checkpointer import LAST
from konkanivani.training.checkpoint.compare import differences, relative_difference
from konkanivani.training.checkpoint.run_lock import RunLock
from konkanivani.training.loop import train
from konkanivani.training.run import Run
from konkanivani.training.validation import EvaluationSet

STEPS = 2
SECOND, THIRD = "checkpoint_second_step.pt", "checkpoint_third_step.pt"
MAX_VALIDATED = 4
CLOSE = 1e-3  # of all weights: CUDA's kernels add in varying order


def dry_run(asked: CommandLine) -> str:
    """Tries the run that the command line asks for, a line a stage; one line of JSON on what it will take.

    The parts are the run's own, in folders inside of its folders. Errors are those of the run.
    """
    if not read_topology().is_single_process:
        raise UsageError("--dry_run tests a run in one process: start it without torchrun.")
    clock = StageClock()
    with stop_at_signals():
        start = resolve_start(asked, clock.done)
        with scratch_config(start.config) as config:
            start = dataclasses.replace(start, config=config, locks=(RunLock(config.run.checkpoint_dir),))
            estimate, compared = _try_steps(start, clock)
            gc.collect()  # the weights of the resumed run come in their place
            difference = _try_going_on(Path(config.run.checkpoint_dir), clock)
    clock.done("removed", "all files of the dry run are removed")
    summary = {"dry_run": True, **dataclasses.asdict(estimate), "tensors_compared": compared}
    summary |= {"resumed_difference": difference, "seconds": clock.seconds()}
    return json.dumps({name: json_value(value) for name, value in summary.items()}, allow_nan=False)


@dataclass(frozen=True)
class Estimate:
    """What the run will take: seconds of computing without validation, and its peak in MiB as measured so far."""

    utterances: int
    steps: int
    seconds_per_step: float
    seconds_per_epoch: float
    seconds_in_all: float
    peak_memory_mib: float
    checkpoint_mib: float

    def sentence(self) -> str:
        """The estimate for a person."""
        epoch, everything = _time_words(self.seconds_per_epoch), _time_words(self.seconds_in_all)
        return (
            f"{self.seconds_per_step:.2f} s per step: about {epoch} per epoch and {everything} for the "
            f"remaining {count(self.steps, 'step')}, without validation"
        )


def _time_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else duration_words(seconds / 3600)


def _try_steps(start: Start, clock: StageClock) -> tuple[Estimate, int]:
    """Rehearses, steps, validates, saves as the run will, and steps again; what that says, and the tensors compared."""
    run = build_run(start, clock.done)
    clock.done("model", "built" if start.resumed is None else f"built, at step {run.state.step}")
    with run.logbook:
        tell_rehearsal(run)
        clock.done("rehearsal", "the largest batches fit in memory")
        steps_before = run.state.step
        run.progress.lap()  # what came before is not training time
        train(_until(run, steps_before + STEPS))
        estimate = _estimate(run, steps_before)
        clock.done("two steps", estimate.sentence())
        if run.validation is not None:
            evaluation = _few(run).evaluate(run.step.forward, run.decode)
            clock.done("validation", f"{count(len(evaluation.scored), 'utterance')}, loss {evaluation.losses.all:.2f}")
        saved = read_checkpoint(_kept(run, SECOND))
        check_equal(run.checkpoint(), saved, "The checkpoint read back differs from the state saved")
        compared = sum(isinstance(value, torch.Tensor) for state in saved.states.values() for value in state.values())
        clock.done("saved", f"read back and verified, {count(compared, 'tensor')}, {estimate.checkpoint_mib:.0f} MiB")
        train(_until(run, run.state.step + 1))
        _kept(run, THIRD)
    return estimate, compared


def _try_going_on(folder: Path, clock: StageClock) -> float:
    """Goes on from the second step's save as --resume does, and makes the third one again.

    The distance of the weights from the third step's save, as a share of their norm: 0 on a CPU, bit for bit.
    """
    with silence_output():  # it has been told
        start = resolve_start(parse_args(["--resume", str(folder / SECOND), "--keep_checkpoints", "2"]))
        run = build_run(start)
    check_equal(run.checkpoint(), read_checkpoint(start.resumed_path), "The resumed state differs from the state saved")
    with run.logbook:
        train(_until(run, run.state.step + 1))
    undisturbed, resumed = (read_checkpoint(folder / name) for name in (THIRD, LAST))
    difference = relative_difference(undisturbed, resumed)
    if run.step.forward.device.type == "cpu" or difference > CLOSE:
        check_equal(undisturbed, resumed, "A step after resuming differs from the step without resuming")
    exactly = "identical bit for bit" if difference == 0 else f"identical to within {difference:.1g}"
    clock.done("resumed", f"step {run.state.step} after resuming is {exactly}")
    return difference


def _kept(run: Run, name: str) -> Path:
    """The last save under a name that no later save takes: those of an epoch's end or of --save_steps may follow."""
    return (run.checkpointer.directory / LAST).rename(run.checkpointer.directory / name)


def _until(run: Run, step: int) -> Run:
    """The run with another end: after so many steps, in whatever epoch, validating few utterances where one ends."""
    config = dataclasses.replace(run.config, max_steps=step, epochs=run.state.epoch + 100, early_stop_epochs=None)
    return dataclasses.replace(run, config=config, validation=_few(run))


def _few(run: Run) -> EvaluationSet | None:
    if run.validation is None:
        return None
    middle = run.validation.plan[len(run.validation.plan) // 2]
    return dataclasses.replace(run.validation, plan=[middle[:MAX_VALIDATED]])


def _estimate(run: Run, steps_before: int) -> Estimate:
    """By the audio of the steps made: windows differ in length."""
    planner = run.global_batches.planner
    speed = run.progress.audio_seconds_per_second() * (1 - run.progress.waiting_share())
    epoch = float(planner.durations.sum()) / speed
    a_step, steps = epoch / planner.global_batches_per_epoch(), max(0, run.step.total_steps - steps_before)
    return Estimate(
        utterances=len(planner.durations),
        steps=steps,
        seconds_per_step=a_step,
        seconds_per_epoch=epoch,
        seconds_in_all=a_step * steps,
        peak_memory_mib=run.step.forward.monitor.overall_peak_mib(),
        checkpoint_mib=(run.checkpointer.directory / LAST).stat().st_size / MIB,
    )


def check_equal(one: Checkpoint, other: Checkpoint, what: str) -> None:
    """Raises a CheckpointError where two states differ by a bit."""
    found = differences(one, other)
    if found:
        raise CheckpointError(
            f"{what}: {count(len(found), 'value', 'differs/differ')}, first {found[0]}. Check the disk and memory of "
            "this machine; if they are fine, report this as a bug."
        )


@contextlib.contextmanager
def scratch_config(config: TrainConfig) -> Iterator[TrainConfig]:
    """The configuration with folders of its own inside of the run's: on the same disk, under the same permissions."""
    run = config.run
    with scratch_folder(Path(run.checkpoint_dir)) as checkpoints, scratch_folder(Path(run.log_dir)) as logs:
        folders = dataclasses.replace(run, checkpoint_dir=str(checkpoints), log_dir=str(logs))
        tuning = dataclasses.replace(config.tuning, freeze_steps=0)  # as all steps are but the first and cheapest
        yield dataclasses.replace(config, run=folders, tuning=tuning)
