"""A complete training run, from its command line to a JSON line with the results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from konkanivani.checkpoints.checkpoint import load_states, read_checkpoint, write_checkpoint
from konkanivani.checkpoints.run_lock import remove_folders_on_error
from konkanivani.command_line import ignore_lost_output
from konkanivani.config import TrainConfig
from konkanivani.console import count, say
from konkanivani.data.batching import Example, GlobalBatch, largest_batch, largest_size, split_into_micro_batches
from konkanivani.data.dataset import TrainDataset
from konkanivani.distributed import ALONE, Topology, broadcast_from_rank0, check_same, choose_device
from konkanivani.files import digest_of_code
from konkanivani.flags import CommandLine
from konkanivani.memory.recovery import RestartAfterOom, write_sizes
from konkanivani.recipe.build import build_run
from konkanivani.recipe.final_scores import best_checkpoint, memory_table, score_run, summary_line
from konkanivani.recipe.preflight import digest_of_data, digest_of_flags, in_ranks
from konkanivani.recipe.startup import resolve_start
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


# --------------------
# Rehearsal: trial of a run's most expensive batches before its first epoch.
#
# Effects that a memory plan cannot know (driver behaviour, other programs, audio longer than its manifest states)
# appear in the first minute instead of the third hour. All state that a step changes is restored from a file, bit for
# bit.


# Keys of the parts of a checkpoint that are not restored: a rehearsal does not change the counters (TrainState), and
# the sizes that ran out of memory in it (OomHistory) hold for the actual run too.
KEPT = ("progress", "splits")


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
    saved = run.storage.checkpointer.rehearsal_path
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
        load_states(before, {name: part for name, part in run.storage.stateful.items() if name not in KEPT})
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
    slowest = replace(speech, speeds=(min(speech.speeds),))
    durations = speech.utterances.durations
    tokens = speech.utterances.tokens.astype(np.int64)
    orders = [("the longest utterances", np.argsort(-durations, kind="stable"))]
    orders.append(("the most tokens", np.lexsort((-durations, -tokens))))
    if run.plan:
        costliest = max(run.plan.buckets, key=lambda bucket: bucket.peak)
        inside = np.flatnonzero(durations / min(speech.speeds) <= costliest.seconds)
        orders.append(("the highest planned peak", inside[np.argsort(-durations[inside], kind="stable")]))
    global_batches: list[tuple[str, GlobalBatch]] = []
    for name, order in orders:
        global_batch = _global_batch_of(run, slowest, order)
        known = [_ids(other) for _, other in global_batches]
        if global_batch is not None and _ids(global_batch) not in known:
            global_batches.append((name, global_batch))
    return global_batches


def _ids(global_batch: GlobalBatch) -> list[tuple[str, ...]]:
    return [batch.utterance_ids for batch in global_batch.micro_batches]


def _global_batch_of(run: Run, speech: TrainDataset, order: np.ndarray) -> GlobalBatch | None:
    """Return the first utterances of the order, up to one full micro-batch, as two identical micro-batches.

    None if it has no readable utterance: the plan of a resumed run may be of longer ones.
    """
    stream = run.data.global_batches
    readable = _readable_examples(run, speech, order)
    first = next(readable, None)
    if first is None:
        return None
    most = min(largest_size(first.seconds, stream.limits), stream.planner.global_batch_size)
    speeches = [first, *islice(readable, most - 1)]
    piece = split_into_micro_batches(speeches, stream.limits, run.data.tokenizer.special)
    return replace(
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
        if isinstance(example, Example):
            yield example
        else:
            run.data.global_batches.rejections.add([example])


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
    one_batch = replace(validation, plan=[longest], topology=ALONE)  # each rank tries it
    with run.interruption.interruptible(run.interruption.stop_unsaved):
        run.evaluate(one_batch)
    unit = run.step.architecture.framing.unit
    return Rehearsal("validation", len(longest), unit.text(float(durations[longest[0]])), 0)
