"""Dry run: test a training run within a minute, from its flags to resuming its checkpoint, and delete all its files."""

import dataclasses
import gc
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.checkpoints.averaging import check_equal, relative_difference
from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.checkpoints.run_lock import RunLock
from konkanivani.command_line import silence_output
from konkanivani.console import MIB, StageClock, count, duration_words
from konkanivani.distributed import read_topology
from konkanivani.errors import UsageError, stop_at_signals
from konkanivani.flags import CommandLine, parse_args
from konkanivani.recipe.build import build_run
from konkanivani.recipe.final_scores import json_value
from konkanivani.recipe.run_folders import scratch_config
from konkanivani.recipe.startup import Start, resolve_start
from konkanivani.recipe.train import report_rehearsal
from konkanivani.training.loop import train
from konkanivani.training.run import Run
from konkanivani.training.validation import EvaluationSet

STEPS = 2
SECOND = "checkpoint_second_step.pt"
THIRD = "checkpoint_third_step.pt"
MAX_VALIDATED = 4
CLOSE = 1e-3  # relative norm of all weights: CUDA kernels sum in varying order


def dry_run(command_line: CommandLine) -> str:
    """Test the run of a command line, print one line per stage, and return an estimate as one line of JSON.

    All parts are those of the actual run, in scratch folders inside its folders, and errors are the same.
    """
    if not read_topology().is_single_process:
        raise UsageError("--dry_run tests a run in one process: start it without torchrun.")
    clock = StageClock()
    with stop_at_signals():
        start = resolve_start(command_line, clock.done)
        with scratch_config(start.config) as config:
            start = dataclasses.replace(start, config=config, locks=(RunLock(config.run.checkpoint_dir),))
            estimate, compared = _try_steps(start, clock)
            gc.collect()  # free the first run's weights before the resumed run is built
            difference = _try_resume(Path(config.run.checkpoint_dir), clock)
    clock.done("removed", "all files of the dry run are removed")
    summary = {"dry_run": True, **dataclasses.asdict(estimate), "tensors_compared": compared}
    summary |= {"resumed_difference": difference, "seconds": clock.seconds()}
    return json.dumps({name: json_value(value) for name, value in summary.items()}, allow_nan=False)


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of the run: seconds of computation without validation, and peak memory in MiB so far."""

    utterances: int
    steps: int
    seconds_per_step: float
    seconds_per_epoch: float
    seconds_in_all: float
    peak_memory_mib: float
    checkpoint_mib: float

    def sentence(self) -> str:
        """Return a sentence with the estimated times for the user."""
        epoch = _time_words(self.seconds_per_epoch)
        everything = _time_words(self.seconds_in_all)
        return (
            f"{self.seconds_per_step:.2f} s per step: about {epoch} per epoch and {everything} for the "
            f"remaining {count(self.steps, 'step')}, without validation"
        )


def _time_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else duration_words(seconds / 3600)


def _try_steps(start: Start, clock: StageClock) -> tuple[Estimate, int]:
    """Test the largest batches, train, validate, save, and train one more step.

    Returns the estimate and the number of tensors that were compared after reading the checkpoint.
    """
    run = build_run(start, clock.done)
    clock.done("model", "built" if start.resumed is None else f"built, at step {run.state.step}")
    with run.logs.logbook:
        report_rehearsal(run)
        clock.done("rehearsal", "the largest batches fit in memory")
        steps_before = run.state.step
        run.logs.progress.lap()  # restart the clock: set-up is not training time
        _train_until(run, steps_before + STEPS)
        estimate = _estimate(run, steps_before)
        clock.done("two steps", estimate.sentence())
        few = _short_validation(run)
        if few is not None:
            evaluation = run.evaluate(few)
            clock.done("validation", f"{count(evaluation.utterances, 'utterance')}, loss {evaluation.losses.all:.2f}")
        saved = read_checkpoint(_rename_last(run, SECOND))
        check_equal(run.checkpoint(), saved, "The checkpoint read back differs from the state saved")
        compared = sum(isinstance(value, torch.Tensor) for state in saved.states.values() for value in state.values())
        clock.done("saved", f"read back and verified, {count(compared, 'tensor')}, {estimate.checkpoint_mib:.0f} MiB")
        # The reference for the resumed run: the same step without an interruption.
        _train_until(run, run.state.step + 1)
        _rename_last(run, THIRD)
    return estimate, compared


def _try_resume(folder: Path, clock: StageClock) -> float:
    """Resume from the checkpoint of the second step as --resume does, and repeat the third step.

    Returns the distance of the weights to the uninterrupted third step, relative to their norm: 0 on a CPU, bit for
    bit.
    """
    with silence_output():  # its messages were printed before
        start = resolve_start(parse_args(["--resume", str(folder / SECOND), "--keep_checkpoints", "2"]))
        run = build_run(start)
    check_equal(run.checkpoint(), read_checkpoint(folder / SECOND), "The resumed state differs from the state saved")
    with run.logs.logbook:
        _train_until(run, run.state.step + 1)
    undisturbed, resumed = (read_checkpoint(folder / name) for name in (THIRD, LAST))
    difference = relative_difference(undisturbed, resumed)
    # A CPU has to be exact; on CUDA, only a difference above CLOSE is an error.
    if run.step.forward.device.type == "cpu" or difference > CLOSE:
        check_equal(undisturbed, resumed, "A step after resuming differs from the step without resuming")
    exactly = "identical bit for bit" if difference == 0 else f"identical to within {difference:.1g}"
    clock.done("resumed", f"step {run.state.step} after resuming is {exactly}")
    return difference


def _rename_last(run: Run, name: str) -> Path:
    """Rename the last checkpoint, so that no later save (end of an epoch, --save_steps) overwrites it."""
    return (run.storage.checkpointer.directory / LAST).rename(run.storage.checkpointer.directory / name)


def _train_until(run: Run, step: int) -> None:
    """Train up to optimizer step `step`, in any number of epochs, with a small validation set."""
    train(
        dataclasses.replace(run, data=dataclasses.replace(run.data, validation=_short_validation(run))), last_step=step
    )


def _short_validation(run: Run) -> EvaluationSet | None:
    if run.data.validation is None:
        return None
    middle = run.data.validation.plan[len(run.data.validation.plan) // 2]
    return dataclasses.replace(run.data.validation, plan=[middle[:MAX_VALIDATED]])


def _estimate(run: Run, steps_before: int) -> Estimate:
    """Estimate the run's cost by audio seconds per second: global batches differ in length."""
    planner = run.data.global_batches.planner
    speed = run.logs.progress.audio_seconds_per_second() * (1 - run.logs.progress.waiting_share())
    epoch = float(planner.durations.sum()) / speed
    a_step = epoch / planner.global_batches_per_epoch()
    steps = max(0, run.step.total_steps - steps_before)
    return Estimate(
        utterances=len(planner.durations),
        steps=steps,
        seconds_per_step=a_step,
        seconds_per_epoch=epoch,
        seconds_in_all=a_step * steps,
        peak_memory_mib=run.monitor.overall_peak_mib(),
        checkpoint_mib=(run.storage.checkpointer.directory / LAST).stat().st_size / MIB,
    )
