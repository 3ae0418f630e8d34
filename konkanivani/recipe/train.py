"""A complete training run, from its command line to a JSON line with the results."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from konkanivani.base.command_line import ignore_lost_output
from konkanivani.base.config import AUTO, DecodingConfig, DecodingMethod, TrainConfig
from konkanivani.base.console import say, table_lines
from konkanivani.base.device import choose_device
from konkanivani.base.distributed import Topology, broadcast_from_rank0, check_same
from konkanivani.base.files import digest_of_code
from konkanivani.base.flags import CommandLine
from konkanivani.decoding.decode import build_decode, ways_to_decode
from konkanivani.memory.monitor import PhaseMemory
from konkanivani.memory.oom_history import write_sizes
from konkanivani.memory.recovery import RestartAfterOom
from konkanivani.model.asr import frozen_count, parameter_count
from konkanivani.recipe.build import build_run
from konkanivani.recipe.evaluation_model import (
    Forgetting,
    best_checkpoint,
    evaluate_manifest,
    load_evaluation_model,
    score_forgetting,
)
from konkanivani.recipe.ranks import digest_of_data, digest_of_flags, in_ranks
from konkanivani.recipe.start import resolve_start
from konkanivani.training.checkpoint.run_lock import given_up_if_refused
from konkanivani.training.logs.records import RehearsalRecord
from konkanivani.training.loop import train
from konkanivani.training.rehearsal import rehearse
from konkanivani.training.run import Run
from konkanivani.training.validation import Evaluation, rates_over


def train_and_report(asked: CommandLine) -> str:
    """Train, score the test manifest with the best checkpoint, and return one line of JSON.

    Every rank started by torchrun calls this; only the first one prints, and the others return an empty string.
    """
    with ignore_lost_output(), in_ranks(asked.config.run.rank_timeout) as topology:
        run = build_in_ranks(asked, topology)
        with run.logs.logbook, write_sizes_on_error(run):
            # A resumed run has been tested before, unless its memory plan is new.
            if is_rehearsed(run.config) and (run.state.step == 0 or run.config.memory.replan):
                tell_rehearsal(run)
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
    named = " ".join(f"{flag} {limit}" for flag, limit in limits.items() if limit)
    say(f"Training is complete: with {named}, step {run.state.step} is the last. Raise the limit to train longer.")


def build_in_ranks(asked: CommandLine, topology: Topology) -> Run:
    """Build the run after checking that all ranks have the same flags, code and data; install its signal handlers."""
    if not topology.is_single_process:
        device = choose_device(asked.config.run.device).type
        check_same(topology, {"flags": digest_of_flags(asked.config), "code": digest_of_code(), "devices": device})
    start = resolve_start(asked, topology=topology)
    with given_up_if_refused(*start.locks):
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
    scores = score_test(run, best)
    forgetting = score_forgetting(config, best, run.topology)
    say(f"View the run with: .venv/bin/tensorboard --logdir {config.run.log_dir} --host 127.0.0.1")
    return summary_line(run, scores, forgetting, str(best), f"{config.run.log_dir}/{config.run.run_name}")


@contextmanager
def write_sizes_on_error(run: Run) -> Iterator[None]:
    """Write the out-of-memory history to disk if the ranks have to restart with smaller micro-batches."""
    try:
        yield
    except RestartAfterOom:
        write_sizes(run.storage.checkpointer.directory, run.topology.rank, run.step.oom_history)
        raise


def score_test(run: Run, checkpoint: Path) -> dict[str, Evaluation | None]:
    """Score the test manifest with greedy decoding and with --test_decode; each rank transcribes its share.

    Values are None if there is no test manifest.
    """
    data = run.config.data
    device = run.step.forward.device
    best = ways_to_decode(run.step.architecture)[-1]
    other = best if data.test_decode == AUTO else data.test_decode
    ways: list[DecodingMethod] = ["greedy"] if other == "greedy" else ["greedy", other]
    if data.test_manifest is None:
        return dict.fromkeys(ways)
    trained = load_evaluation_model(checkpoint, device, run.topology)
    decoders = [build_decode(DecodingConfig(way), trained.architecture, trained.tokenizer, device) for way in ways]
    evaluations = [evaluate_manifest(trained, data.test_manifest, decode, data.audio_roots) for decode in decoders]
    return dict(zip(ways, evaluations, strict=True))


def tell_rehearsal(run: Run) -> None:
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


def memory_table(run: Run) -> str:
    """Return a table of peak memory, planned peak and time per phase, with the number of out-of-memory retries."""
    monitor = run.monitor
    phases = monitor.report_run()
    clearing = monitor.report_clearing_of_run()
    seconds = [monitor.seconds_of(phase.phase) for phase in phases]
    rows = list(zip(*_columns(phases, seconds), strict=True))
    lines = ["Peak memory (MiB) and time per phase:", *(f"  {line}" for line in table_lines(rows))]
    if not run.topology.is_single_process:
        peaks = ", ".join(f"{peak:.0f}" for peak in run.rank_peaks_mib())
        lines.append(f"The phases are those of rank 0; peaks of all ranks: {peaks}.")
    lines.append(f"Steps retried with smaller micro-batches after running out of memory: {run.state.splits}.")
    if clearing is not None and clearing.count:
        lines.append(f"Cache releases: {clearing.count}, in {clearing.seconds:.2f} s.")
    return "\n".join(lines)


def _columns(phases: tuple[PhaseMemory, ...], seconds: list[float]) -> Iterator[list[str]]:
    """Yield the table's columns, title first; columns without values on this device are omitted."""
    yield ["phase", *(phase.phase for phase in phases)]
    columns: dict[str, Sequence[float | None]] = {
        "planned": [phase.planned_mib for phase in phases],
        "peak": [phase.peak_mib for phase in phases],
        "fragmentation": [phase.fragmentation_mib for phase in phases],
        "allocator retries": [phase.allocator_retries for phase in phases],
    }
    for title, values in columns.items():
        if any(value is not None for value in values):
            yield [title, *("-" if value is None else f"{value:.0f}" for value in values)]
    yield ["seconds", *(f"{value:.1f}" for value in seconds)]
    yield ["share", *(f"{value / sum(seconds):.1%}" for value in seconds)]


def summary_line(
    run: Run, scores: dict[str, Evaluation | None], forgetting: Forgetting | None, checkpoint: str, tensorboard: str
) -> str:
    """Return the results as one line of JSON; error rates are shares, null if there was no test or validation."""
    rates: dict[str, float | None] = {}
    for decode, test in scores.items():
        by = "" if decode == "greedy" else f"_{decode}"
        rates[f"test_wer{by}"] = test.rates.wer if test else None
        rates[f"test_cer{by}"] = test.rates.cer if test else None
        if test is None:
            continue
        patterns = {each.utterance.pattern for each in test.scored} - {""}
        for pattern in sorted(patterns):
            scored = [each for each in test.scored if each.utterance.pattern == pattern]
            rates[f"test_cer_{pattern}_patterns{by}"] = rates_over(scored).cer
    if forgetting is not None:
        for when, found in (("before", forgetting.before), ("after", forgetting.after)):
            rates |= {f"forgetting_wer_{when}": found.wer, f"forgetting_cer_{when}": found.cer}
    summary = {
        **rates,
        "parameters": parameter_count(run.step.model) + frozen_count(run.step.model),
        "trained_parameters": parameter_count(run.step.model),
        "steps": run.state.step,
        "epochs": run.state.epochs_finished,
        "best_valid_score": run.state.best_score if run.data.validation else None,
        "audio_seconds_per_second": run.logs.progress.audio_seconds_per_second(),
        "waiting_for_data_share": run.logs.progress.waiting_share(),
        "peak_memory_mib": run.monitor.overall_peak_mib(),
        "memory_splits": run.state.splits,
        "allocator_retries": allocator_retries(run.monitor.report_run()),
        "checkpoint": checkpoint,
        "tensorboard": tensorboard,
    }
    return json.dumps({name: json_value(value) for name, value in summary.items()}, ensure_ascii=False, allow_nan=False)


def allocator_retries(phases: tuple[PhaseMemory, ...]) -> int | None:
    """Return how often CUDA's allocator had to flush its cache to get memory; None on a CPU."""
    counts = [phase.allocator_retries for phase in phases if phase.allocator_retries is not None]
    return sum(counts) if counts else None


def json_value(value: object) -> object:
    """Round floats to four decimal places; map non-finite floats, which JSON does not have, to null."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
