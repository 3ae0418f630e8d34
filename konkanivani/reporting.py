"""A whole training run from its command line to the JSON line that sums it up."""

import json
import math
from collections.abc import Iterator

from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.memory.rehearsal import rehearse
from konkanivani.recipe import build_run
from konkanivani.records import PhaseMemory, RehearsalRecord
from konkanivani.start import resolve_start
from konkanivani.trained_model import best_checkpoint, evaluate_manifest, load_trained_model
from konkanivani.training.evaluation import Evaluation
from konkanivani.training.loop import train
from konkanivani.training.run import Run


def train_and_report(arguments: list[str]) -> str:
    """Trains as the command line asks, scores the test manifest with the best checkpoint, and returns a JSON line."""
    start = resolve_start(arguments)
    run = build_run(start)
    run.interruption.install()
    with run.logbook:
        if start.config.is_rehearsed and (run.state.step == 0 or start.config.memory.replan):
            tell_rehearsal(run)
        train(run)
    print(memory_table(run), flush=True)
    best = best_checkpoint(start.config.run.checkpoint_dir)
    test = None
    if start.config.data.test_manifest:
        trained = load_trained_model(best, run.step.forward.device)
        test = evaluate_manifest(trained, start.config.data.test_manifest, greedy_ctc)
    log_directory = start.config.run.log_dir
    print(f"Look at the run with: .venv/bin/tensorboard --logdir {log_directory} --host 127.0.0.1", flush=True)
    return summary_line(run, test, str(best), f"{log_directory}/{start.config.run.run_name}")


def tell_rehearsal(run: Run) -> None:
    """Tries the costliest batches and says and logs what they took, beside what was planned for them."""
    tried = rehearse(run)
    phases = run.step.forward.monitor.report()
    run.logbook.log(RehearsalRecord(run.state.step, memory=phases))
    measured = ", ".join(
        f"{phase.phase} {phase.peak_mib:.0f}" + (f" (planned {phase.planned_mib:.0f})" if phase.planned_mib else "")
        for phase in phases
    )
    print(
        f"Rehearsed and undone: {'; '.join(trial.sentence() for trial in tried)}.\nPeaks in MiB: {measured}.",
        flush=True,
    )


def memory_table(run: Run) -> str:
    """What each phase took at most, beside what was planned for it, and what memory that was short has cost."""
    monitor = run.step.forward.monitor
    phases, clearing = monitor.report_run(), monitor.report_clearing_of_run()
    rows = list(zip(*_columns(phases), strict=True))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["Memory in MiB, the largest of each phase:"]
    for name, *numbers in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join(["", name.ljust(widths[0]), *cells]))
    lines.append(f"Steps begun again in smaller pieces, out of memory: {run.state.splits}.")
    if clearing is not None and clearing.count:
        lines.append(f"Clearings of the cache: {clearing.count}, in {clearing.seconds:.2f} s.")
    return "\n".join(lines)


def _columns(phases: tuple[PhaseMemory, ...]) -> Iterator[list[str]]:
    """The table by columns, each with its title first; without those that say nothing here."""
    yield ["phase", *(phase.phase for phase in phases)]
    columns = {
        "planned": [phase.planned_mib for phase in phases],
        "peak": [phase.peak_mib for phase in phases],
        "fragmentation": [phase.fragmentation_mib for phase in phases],
        "allocator retries": [phase.allocator_retries for phase in phases],
    }
    for title, values in columns.items():
        if any(value is not None for value in values):
            yield [title, *("-" if value is None else f"{value:.0f}" for value in values)]


def summary_line(run: Run, test: Evaluation | None, checkpoint: str, tensorboard: str) -> str:
    """One line of JSON; error rates are shares, null where nothing was tested or validated."""
    rates = test.rates if test else None
    patterns = {s.utterance.pattern for s in test.scored} if test else set()
    summary = {
        "test_wer": rates.wer if rates else None,
        "test_cer": rates.cer if rates else None,
        **{f"test_cer_{p}_patterns": test.rates_of(p).cer for p in sorted(patterns) if p},
        "steps": run.state.step,
        "epochs": run.state.epochs_finished,
        "best_valid_score": run.state.best_score if run.validation else None,
        "audio_seconds_per_second": run.progress.audio_seconds_per_second(),
        "waiting_for_data_share": run.progress.waiting_share(),
        "peak_memory_mib": run.step.forward.monitor.overall_peak_mib(),
        "memory_splits": run.state.splits,
        "allocator_retries": allocator_retries(run.step.forward.monitor.report_run()),
        "checkpoint": checkpoint,
        "tensorboard": tensorboard,
    }
    return json.dumps({name: as_json(value) for name, value in summary.items()}, allow_nan=False)


def allocator_retries(phases: tuple[PhaseMemory, ...]) -> int | None:
    """How often CUDA's allocator had to empty its cache to be given memory; None on a CPU."""
    counts = [phase.allocator_retries for phase in phases if phase.allocator_retries is not None]
    return sum(counts) if counts else None


def as_json(value: object) -> object:
    """The value, numbers to four places; null where a number is not finite, which JSON cannot say."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
