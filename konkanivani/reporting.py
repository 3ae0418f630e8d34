"""A whole training run from its command line to the JSON line that sums it up."""

import json
import math

from konkanivani.recipe import build_run
from konkanivani.recognizer import best_checkpoint, evaluate_manifest, load_recognizer
from konkanivani.start import resolve_start
from konkanivani.training.evaluation import Evaluation
from konkanivani.training.loop import train
from konkanivani.training.run import Run


def train_and_report(arguments: list[str]) -> str:
    """Trains as the command line asks, scores the test manifest with the best checkpoint, and returns a JSON line."""
    start = resolve_start(arguments)
    run = build_run(start)
    run.interruption.install()
    with run.logbook:
        train(run)
    best = best_checkpoint(start.config.run.checkpoint_dir)
    test = None
    if start.config.data.test_manifest:
        recognizer = load_recognizer(best, run.step.forward.device)
        test = evaluate_manifest(recognizer, start.config.data.test_manifest)
    log_directory = start.config.run.log_dir
    print(f"Look at the run with: .venv/bin/tensorboard --logdir {log_directory} --host 127.0.0.1", flush=True)
    return summary_line(run, test, str(best), f"{log_directory}/{start.config.run.run_name}")


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
        "peak_memory_mib": run.step.forward.monitor.overall_peak_mib(),
        "checkpoint": checkpoint,
        "tensorboard": tensorboard,
    }
    return json.dumps({name: as_json(value) for name, value in summary.items()}, allow_nan=False)


def as_json(value: object) -> object:
    """The value, numbers to four places; null where a number is not finite, which JSON cannot say."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
