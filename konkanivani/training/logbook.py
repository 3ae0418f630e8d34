"""Log of a run in TensorBoard, JSON lines and the console.

A failing sink never stops training. Each record is in the files when `log` returns, and no file stays open between two
records.
"""

import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from konkanivani.files import atomic_append, atomic_replace, sync_file
from konkanivani.training.progress import (
    FROM_NOTHING,
    Record,
    RehearsalRecord,
    Resumed,
    SettingsRecord,
    SkipRecord,
    StepRecord,
    ValidationRecord,
)
from konkanivani.training.tensorboard import TensorBoardSink

# --------------------
# `log.jsonl`: all fields of steps, skips, validations and rehearsals; non-finite numbers are null.


LOG_NAME = "log.jsonl"
KINDS = {StepRecord: "step", SkipRecord: "skip", ValidationRecord: "validation", RehearsalRecord: "rehearsal"}


class JsonLinesSink:
    """Writer of `log.jsonl`: one JSON object per line, "kind" first; numbers read back as the same floats."""

    def __init__(self, path: Path, resumed: Resumed):
        self.name = str(path)
        self._path = path
        self._resumed = resumed
        self._is_cut = False

    def open(self) -> None:
        """Remove incomplete lines and lines after the resumed position; until that succeeds nothing is appended."""
        if not self._is_cut:
            if self._path.is_file():
                self._truncate()
            self._is_cut = True

    def write(self, record: Record) -> None:
        kind = KINDS.get(type(record))
        if kind is None:
            return
        self.open()
        # allow_nan=False: Python's NaN and Infinity are not JSON, and other readers refuse them.
        line = json.dumps({"kind": kind} | _finite(asdict(record)), ensure_ascii=False, allow_nan=False)
        atomic_append(self._path, line.encode() + b"\n")

    def sync(self) -> None:
        sync_file(self._path)

    def close(self) -> None: ...

    def _truncate(self) -> None:
        # Line by line into a new file: constant memory, and a kill leaves the old log intact.
        with atomic_replace(self._path) as new_path, open(self._path, "rb") as old, open(new_path, "wb") as new:
            # A last line without a newline may still be a complete record.
            new.writelines(line.rstrip(b"\n") + b"\n" for line in old if self._is_kept(line))

    def _is_kept(self, line: bytes) -> bool:
        """Return whether a line is a record of up to the resumed position; incomplete lines are not."""
        if self._resumed == FROM_NOTHING:
            return False
        try:
            record = json.loads(line)
            # Skips and validations share their step with the records around them, so their own counters decide.
            match record.get("kind"):
                case "skip" if record["skipped_steps"] > self._resumed.skipped_steps:
                    return False
                case "validation" if record["epoch"] > self._resumed.epochs_finished:
                    return False
            return isinstance(record["step"], int) and record["step"] <= self._resumed.step
        # Valid JSON that is not a record, e.g. a number, a list, or deep nesting, is dropped too.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False


def _finite(value: Any) -> Any:
    """Return the value with None for each non-finite number, which JSON cannot represent."""
    match value:
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value


# --------------------
# Log of a run: each record is written to TensorBoard, JSON lines and the console.


PAIRS_ON_CONSOLE = 5
UTTERANCES_ON_CONSOLE = 8


class Logbook:
    """All log sinks of a run.

    No method raises an error that is caused by a disk, a folder or a library. A failing sink is retried at each record;
    `warn` receives one warning per sink and cause, and `close()` reports the number of lost records.

    Records of an earlier process that come after `resumed` are removed from `log.jsonl` and purged from TensorBoard's
    curves, so that each step, skipped global batch and validation occurs once. In a fresh run the log is emptied.

    Args:
        directory: log folder; None for no logging (only the first rank logs).
        resumed: position from which the run is resumed.
        warn: function that shows a warning.
    """

    def __init__(
        self,
        directory: str | Path | None,
        *,
        resumed: Resumed = FROM_NOTHING,
        warn: Callable[[str], None] | None = None,
    ):
        self._resumed = resumed
        self._warn = warn or (lambda message: tqdm.write(f"warning: {message}", file=sys.stderr))
        self._sinks: tuple[Sink, ...] = ()
        if directory is not None:
            directory = Path(directory)
            self._sinks = (
                JsonLinesSink(directory / LOG_NAME, resumed),
                TensorBoardSink(directory, resumed),
                ConsoleSink(),
            )
        self._warned: set[tuple[str, type, int | None]] = set()
        self._lost = dict.fromkeys((sink.name for sink in self._sinks), 0)
        for sink in self._sinks:
            self._attempt(sink, sink.open)

    def log(self, record: Record) -> None:
        """Write the record to each sink that handles its type; raise TypeError if it is not a record."""
        if not isinstance(record, Record):
            raise TypeError(f"a logbook takes records, not {type(record).__name__}")
        for sink in self._sinks:
            if not self._attempt(sink, partial(sink.write, record)):
                self._lost[sink.name] += 1

    def log_settings(self, text: str) -> None:
        """Log the flags as text at the step from which they apply."""
        self.log(SettingsRecord(self._resumed.step, text))

    def flush(self) -> None:
        """Sync the files to disk.

        Called before a checkpoint is written, so that after a power failure the log does not end before the checkpoint.
        """
        for sink in self._sinks:
            self._attempt(sink, sink.sync)

    def close(self) -> None:
        """Close the sinks, and report the number of lost records, if any."""
        for sink in self._sinks:
            self._attempt(sink, sink.close)
        for name, lost in self._lost.items():
            if lost:
                self._warn_safely(f"{name}: {lost} records were lost, see the warning above")
                # Reported once, also if close() is called twice.
                self._lost[name] = 0

    def __enter__(self) -> "Logbook":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, sink: "Sink", action: Callable[[], None]) -> bool:
        """Return whether the action succeeded; warn once per sink and cause if it did not."""
        try:
            action()
            return True
        except Exception as error:
            # The errno distinguishes, e.g., a full disk from a missing folder.
            cause = (sink.name, type(error), getattr(error, "errno", None))
            if cause not in self._warned:
                self._warned.add(cause)
                self._warn_safely(
                    f"cannot log to {sink.name}: {type(error).__name__}: {error}. Training continues, and each "
                    "record retries: free disk space or restore the folder"
                )
            return False

    def _warn_safely(self, message: str) -> None:
        # Standard error may itself be a closed pipe or a full disk.
        with suppress(Exception):
            self._warn(message)


class ConsoleSink:
    """Output of validations and skipped steps to the terminal, without breaking the progress bar."""

    name = "the console"

    def open(self) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...

    def write(self, record: Record) -> None:
        if isinstance(record, ValidationRecord):
            # tqdm.write clears and redraws the bar; print would tear it.
            tqdm.write(describe_validation(record))
        # Only the first skip of a series: log.jsonl has all of them.
        elif isinstance(record, SkipRecord) and record.consecutive_skips == 1:
            tqdm.write(describe_skip(record))


Sink = JsonLinesSink | TensorBoardSink | ConsoleSink
"""A destination of records. Any method may raise; the logbook catches it."""


def describe_validation(record: ValidationRecord) -> str:
    """Return one line of numbers, then at most five references with their hypotheses."""
    parts = [f"epoch {record.epoch}", f"step {record.step}"]
    parts += [f"valid loss {record.loss:.3f}"] if record.loss is not None else []
    for name, rate, initial in (("WER", record.wer, record.initial_wer), ("CER", record.cer, record.initial_cer)):
        before = f" (initially {100 * initial:.1f} %)" if initial is not None and record.step else ""
        parts += [f"{name} {100 * rate:.1f} %{before}"] if rate is not None else []
    lines = [" · ".join(parts)]
    for pair in record.hypotheses[:PAIRS_ON_CONSOLE]:
        lines.append(f"  reference   {' '.join(pair.reference.split())}")
        lines.append(f"  hypothesis  {' '.join(pair.hypothesis.split())}")
    return "\n".join(lines)


def describe_skip(record: SkipRecord) -> str:
    """Return a message on a skipped step: cause, utterances, and the log that lists all of them."""
    named = record.utterances[:UTTERANCES_ON_CONSOLE]
    omitted = len(record.utterances) - UTTERANCES_ON_CONSOLE
    utterances = ", ".join(named) + (f" and {omitted} others" if omitted > 0 else "")
    return (
        f"Step {record.step + 1} is skipped: {record.reason}. The weights are unchanged. Its utterances: "
        f"{utterances} (log.jsonl lists those of every skipped step)."
    )
