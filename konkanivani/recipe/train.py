"""A complete training run, from its command line to a JSON line with the results."""

from collections.abc import Iterator
from contextlib import contextmanager

from konkanivani.checkpoints.run_lock import remove_folders_on_error
from konkanivani.command_line import ignore_lost_output
from konkanivani.config import TrainConfig
from konkanivani.console import say
from konkanivani.distributed import Topology, broadcast_from_rank0, check_same, choose_device
from konkanivani.files import digest_of_code
from konkanivani.flags import CommandLine
from konkanivani.memory.recovery import RestartAfterOom, write_sizes
from konkanivani.recipe.build import build_run
from konkanivani.recipe.final_scores import best_checkpoint, memory_table, score_run, summary_line
from konkanivani.recipe.preflight import digest_of_data, digest_of_flags, in_ranks
from konkanivani.recipe.startup import resolve_start
from konkanivani.training.loop import train
from konkanivani.training.progress import RehearsalRecord
from konkanivani.training.rehearsal import rehearse
from konkanivani.training.run import Run


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
