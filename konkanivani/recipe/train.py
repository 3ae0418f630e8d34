"""A complete training run, from its command line to a JSON line with the results; its rehearsal and its dry run.

The rehearsal tries the most expensive batches before the first epoch. A dry run tests a command line within a minute,
from its flags to resuming its checkpoint, and deletes all its files.
"""

import dataclasses
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from konkanivani.checkpoints.averaging import check_equal, relative_difference
from konkanivani.checkpoints.checkpoint import load_states, read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.checkpoints.run_lock import RunLock, remove_folders_on_error
from konkanivani.command_line import ignore_lost_output, silence_output
from konkanivani.config import TrainConfig
from konkanivani.console import MIB, StageClock, count, duration_words, say
from konkanivani.data.batching import Example, GlobalBatch, largest_batch, largest_size, split_into_micro_batches
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.manifest import Rejection
from konkanivani.distributed import ALONE, Topology, broadcast_from_rank0, check_same, choose_device, read_topology
from konkanivani.errors import UsageError, stop_at_signals
from konkanivani.files import digest_of_code
from konkanivani.flags import CommandLine, parse_args
from konkanivani.memory.recovery import RestartAfterOom, write_sizes
from konkanivani.recipe.build import build_run
from konkanivani.recipe.final_scores import best_checkpoint, json_value, memory_table, score_run, summary_line
from konkanivani.recipe.preflight import digest_of_data, digest_of_flags, in_ranks
from konkanivani.recipe.run_folders import scratch_config
from konkanivani.recipe.startup import Start, resolve_start
from konkanivani.training.loop import train
from konkanivani.training.progress import RehearsalRecord
from konkanivani.training.run import Run
from konkanivani.training.step import train_step
from konkanivani.training.validation import EvaluationSet


def train_and_report(command_line: CommandLine) -> str:
    """Train, score the test manifest with the best checkpoint, and return one line of JSON.

    Every rank started by torchrun calls this; only the first one prints, and the others return an empty string.
    """
    with ignore_lost_output(), in_ranks(command_line.config.run.rank_timeout) as topology:
        run = build_in_ranks(command_line, topology)
        with run.logs.logbook, write_sizes_on_error(run):
            # A resumed run has been tested before, unless its memory plan is new.
            if is_rehearsed(run.config) and (run.state.step == 0 or run.config.memory.replan):
                report_rehearsal(run)
            if run.state.step and run.is_finished():
                say_complete(run)
            train(run)
        run.interruption.end_training()
        say(memory_table(run))
        line = score_and_sum_up(run)
    return line if topology.is_first else ""


def say_complete(run: Run) -> None:
    """Print which limits have ended a resumed run."""
    flags = run.config.run
    limits = {"--epochs": flags.epochs, "--max_steps": flags.max_steps, "--early_stop_epochs": flags.early_stop_epochs}
    limit_words = " ".join(f"{flag} {limit}" for flag, limit in limits.items() if limit)
    say(
        f"Training is complete: with {limit_words}, step {run.state.step} is the last. Raise the limit to train longer."
    )


def build_in_ranks(command_line: CommandLine, topology: Topology) -> Run:
    """Build the run after checking that all ranks have the same flags, code and data; install its signal handlers."""
    if not topology.is_single_process:
        device = choose_device(command_line.config.run.device).type
        check_same(
            topology, {"flags": digest_of_flags(command_line.config), "code": digest_of_code(), "devices": device}
        )
    start = resolve_start(command_line, topology=topology)
    with remove_folders_on_error(*start.locks):
        # After resolve_start: a resumed checkpoint may supply the manifests.
        if not topology.is_single_process:
            check_same(topology, {"data": digest_of_data(start.config)})
        run = build_run(start)
    run.interruption.install()
    return run


def is_rehearsed(config: TrainConfig) -> bool:
    """Return whether the largest batches are tested before the first epoch."""
    return config.memory.rehearsal == "always" or (config.memory.rehearsal == "auto" and config.is_planned)


def score_and_sum_up(run: Run) -> str:
    """Score the test manifest with the best checkpoint and return the run's results as one line of JSON."""
    config = run.config
    # Only the first rank needs to see the checkpoint folder.
    best = broadcast_from_rank0(run.topology, lambda: best_checkpoint(config.run.checkpoint_dir))
    results = score_run(run, best)
    say(f"View the run with: .venv/bin/tensorboard --logdir {config.run.log_dir} --host 127.0.0.1")
    return summary_line(run, results, str(best), f"{config.run.log_dir}/{config.run.run_name}")


@contextmanager
def write_sizes_on_error(run: Run) -> Iterator[None]:
    """Write the out-of-memory history to disk if the ranks have to restart with smaller micro-batches."""
    try:
        yield
    except RestartAfterOom:
        write_sizes(run.storage.checkpointer.directory, run.topology.rank, run.step.oom_history)
        raise


def report_rehearsal(run: Run) -> None:
    """Run the largest batches, undo them, and print and log their peak memory next to the planned peaks."""
    tried = rehearse(run)
    phases = run.monitor.report()
    run.logs.logbook.log(RehearsalRecord(run.state.step, memory=phases))
    measured = ", ".join(
        f"{phase.phase} {phase.peak_mib:.0f}" + (f" (planned {phase.planned_mib:.0f})" if phase.planned_mib else "")
        for phase in phases
    )
    say(
        f"Largest batches tested and undone: {'; '.join(trial.sentence() for trial in tried)}.\nPeaks in MiB: "
        f"{measured}."
    )


# --------------------
# Dry runs.

DRY_RUN_STEPS = 2
SECOND_STEP_FILE = "checkpoint_second_step.pt"
THIRD_STEP_FILE = "checkpoint_third_step.pt"
DRY_RUN_VALIDATED = 4
MAX_RESUMED_DIFFERENCE = 1e-3  # relative norm of all weights: CUDA kernels sum in varying order


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
        _train_until(run, steps_before + DRY_RUN_STEPS)
        estimate = _estimate(run, steps_before)
        clock.done("two steps", estimate.sentence())
        few = _short_validation(run)
        if few is not None:
            evaluation = run.evaluate(few)
            clock.done("validation", f"{count(evaluation.utterances, 'utterance')}, loss {evaluation.losses.all:.2f}")
        saved = read_checkpoint(_rename_last(run, SECOND_STEP_FILE))
        check_equal(run.checkpoint(), saved, "The checkpoint read back differs from the state saved")
        compared = sum(isinstance(value, torch.Tensor) for state in saved.states.values() for value in state.values())
        clock.done("saved", f"read back and verified, {count(compared, 'tensor')}, {estimate.checkpoint_mib:.0f} MiB")
        # The reference for the resumed run: the same step without an interruption.
        _train_until(run, run.state.step + 1)
        _rename_last(run, THIRD_STEP_FILE)
    return estimate, compared


def _try_resume(folder: Path, clock: StageClock) -> float:
    """Resume from the checkpoint of the second step as --resume does, and repeat the third step.

    Returns the distance of the weights to the uninterrupted third step, relative to their norm: 0 on a CPU, bit for
    bit.
    """
    with silence_output():  # its messages were printed before
        start = resolve_start(parse_args(["--resume", str(folder / SECOND_STEP_FILE), "--keep_checkpoints", "2"]))
        run = build_run(start)
    check_equal(
        run.checkpoint(), read_checkpoint(folder / SECOND_STEP_FILE), "The resumed state differs from the state saved"
    )
    with run.logs.logbook:
        _train_until(run, run.state.step + 1)
    undisturbed, resumed = (read_checkpoint(folder / name) for name in (THIRD_STEP_FILE, LAST))
    difference = relative_difference(undisturbed, resumed)
    # A CPU has to be exact; on CUDA, only a difference above MAX_RESUMED_DIFFERENCE is an error.
    if run.step.forward.device.type == "cpu" or difference > MAX_RESUMED_DIFFERENCE:
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
    return dataclasses.replace(run.data.validation, plan=[middle[:DRY_RUN_VALIDATED]])


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


# --------------------
# Rehearsal: trial of a run's most expensive batches before its first epoch.
# Effects that a memory plan cannot know (driver behaviour, other programs, audio longer than its manifest states)
# appear in the first minute instead of the third hour. All state that a step changes is restored from a file, bit for
# bit.

REHEARSAL_FILE = "rehearsal.partial"
# Keys of the parts of a checkpoint that are not restored: a rehearsal does not change the counters (TrainState), and
# the sizes that ran out of memory in it (OomHistory) hold for the actual run too.
NOT_RESTORED = ("progress", "splits")


@dataclass(frozen=True)
class Rehearsal:
    """One trial: its largest micro-batch (utterances, length of the longest) and its number of OOM retries."""

    name: str
    utterances: int
    length: str
    splits: int

    def sentence(self) -> str:
        """Return a description for the user."""
        again = f", retried {count(self.splits, 'time')} with smaller micro-batches" if self.splits else ""
        return f"{self.name}: {self.utterances} x {self.length}{again}"


def rehearse(run: Run) -> tuple[Rehearsal, ...]:
    """Train on the most expensive global batches, validate the most expensive batch, then restore all state.

    Raises:
        ResourceError: an utterance does not fit in memory even alone.
        DataError: an utterance cannot be read.
    """
    saved = run.storage.checkpointer.directory / REHEARSAL_FILE
    before = run.checkpoint()
    if run.topology.is_first:
        saved.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(saved, before)
    # Sharded state was gathered to the CPU of the first rank, and must not occupy memory during the trials.
    del before
    try:
        tried = [_try_global_batch(run, name, global_batch) for name, global_batch in costliest_global_batches(run)]
        if run.data.validation is not None:
            tried.append(_try_validation(run, run.data.validation))
        # From the file, because unsharded state consists of the tensors that the trials have modified in place.
        before = broadcast_from_rank0(run.topology, lambda: read_checkpoint(saved))
        load_states(before, {name: part for name, part in run.storage.stateful.items() if name not in NOT_RESTORED})
    finally:
        if run.topology.is_first:
            saved.unlink()
    return tuple(tried)


def costliest_global_batches(run: Run) -> list[tuple[str, GlobalBatch]]:
    """Return the most expensive global batches, each with its name.

    They contain the longest utterances, the ones with the most tokens, and the longest of the bucket with the highest
    planned peak. Each has its micro-batch twice, because the second pass runs while gradients exist, like most passes.
    """
    speech = run.data.global_batches.speech
    # The lowest speed of speed perturbation makes the longest audio.
    slowest = dataclasses.replace(speech, speeds=(min(speech.speeds),))
    durations = speech.utterances.durations
    tokens = speech.utterances.tokens.astype(np.int64)
    orders = [("the longest utterances", np.argsort(-durations, kind="stable"))]
    orders.append(("the most tokens", np.lexsort((-durations, -tokens))))
    if run.plan:
        costliest = max(run.plan.buckets, key=lambda bucket: bucket.peak)
        inside = np.flatnonzero(durations / min(speech.speeds) <= costliest.seconds)
        orders.append(("the highest planned peak", inside[np.argsort(-durations[inside], kind="stable")]))
    global_batches = [(name, _global_batch_of(run, slowest, order)) for name, order in orders]
    return [
        pair
        for number, pair in enumerate(global_batches)
        if _ids(pair[1]) not in [_ids(w) for _, w in global_batches[:number]]
    ]


def _ids(global_batch: GlobalBatch) -> list[tuple[str, ...]]:
    return [batch.utterance_ids for batch in global_batch.micro_batches]


def _global_batch_of(run: Run, speech: TrainDataset, order: np.ndarray) -> GlobalBatch:
    """Return the first utterances of the order, up to one full micro-batch, as two identical micro-batches."""
    stream = run.data.global_batches
    readable = _readable_examples(run, speech, order)
    first = next(readable)
    most = min(largest_size(first.seconds, stream.limits), stream.planner.global_batch_size)
    speeches = [first, *islice(readable, most - 1)]
    piece = split_into_micro_batches(speeches, stream.limits, run.data.tokenizer.special)
    return dataclasses.replace(
        piece,
        micro_batches=piece.micro_batches * 2,
        tokens=2 * piece.tokens,
        utterances=2 * piece.utterances,
        audio_seconds=2 * piece.audio_seconds,
    )


def _readable_examples(run: Run, speech: TrainDataset, order: np.ndarray) -> Iterator[Example]:
    """Yield the utterances of the order; unreadable ones are rejected, as in training."""
    for number in order:
        example = speech[0, int(number)]
        if isinstance(example, Rejection):
            run.data.global_batches.rejections.add([example])
        else:
            yield example


def _try_global_batch(run: Run, name: str, global_batch: GlobalBatch) -> Rehearsal:
    run.interruption.check()
    with run.interruption.interruptible(run.interruption.stop_unsaved):  # all of it is undone
        # After --freeze_steps all layers are trained, which takes the most memory.
        report = train_step(run.step, global_batch, max(run.state.step, run.step.architecture.tuning.freeze_steps or 0))
    assert report is not None  # only `is_interrupted`, which is not given here, makes it None
    largest = largest_batch(global_batch.micro_batches)
    return Rehearsal(name, largest.size, largest.length_text, report.splits)


def _try_validation(run: Run, validation: EvaluationSet) -> Rehearsal:
    """Validate the batch with the most padded audio."""
    durations = validation.speech.utterances.durations
    # The first utterance of a batch is its longest.
    longest = max(validation.plan, key=lambda batch: len(batch) * durations[batch[0]])
    one_batch = dataclasses.replace(validation, plan=[longest], topology=ALONE)  # each rank tries it
    with run.interruption.interruptible(run.interruption.stop_unsaved):
        run.evaluate(one_batch)
    unit = run.step.architecture.framing.unit
    return Rehearsal("validation", len(longest), unit.text(float(durations[longest[0]])), 0)
