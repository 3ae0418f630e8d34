"""One `log()` fanned out to TensorBoard, JSONL and the console.

A logger that fails never stops training. So nothing stays open between two records, and there is no thread: a record
is appended to each file in one piece, or taken back whole.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from konkanivani.training.logs.jsonl import LOG_NAME, JsonLinesSink
from konkanivani.training.logs.records import (
    FROM_NOTHING,
    Record,
    Resumed,
    SettingsRecord,
    SkipRecord,
    ValidationRecord,
)
from konkanivani.training.logs.tensorboard import TensorBoardSink

PAIRS_ON_CONSOLE = 5
UTTERANCES_ON_CONSOLE = 8


class Logbook:
    """All sinks of a run behind one `log()`, which raises nothing that a disk, a folder or a library can cause.

    Without a directory there is none: of several ranks the first one logs.

    What an earlier process logged beyond what is `resumed` is cut from `log.jsonl` and purged from TensorBoard's
    curves, so each step, skipped window and validation is there once. Where nothing is, the log begins afresh.
    A failing sink is tried again at each record; one warning goes to `warn` per sink and cause,
    and `close()` says how many records are missing.
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
                TensorBoardSink(directory, resumed.step),
                ConsoleSink(),
            )
        self._warned: set[tuple[str, type, int | None]] = set()
        self._lost = dict.fromkeys((sink.name for sink in self._sinks), 0)
        for sink in self._sinks:
            self._attempt(sink, sink.open)

    def log(self, record: Record) -> None:
        """Gives the record to each sink, which takes what concerns it. TypeError for what is not a record."""
        if not isinstance(record, Record):
            raise TypeError(f"a logbook takes records, not {type(record).__name__}")
        for sink in self._sinks:
            if not self._attempt(sink, lambda sink=sink: sink.write(record)):
                self._lost[sink.name] += 1

    def log_settings(self, text: str) -> None:
        """Shows the flags beside the curves, at the step from which they hold."""
        self.log(SettingsRecord(self._resumed.step, text))

    def flush(self) -> None:
        """Has the disk confirm what is written; before a checkpoint, lest the log end before it after a power cut."""
        for sink in self._sinks:
            self._attempt(sink, sink.sync)

    def close(self) -> None:
        """Says which records are missing, if any. There is nothing else to do: no file is open, no thread runs."""
        for name, lost in self._lost.items():
            if lost:
                self._tell(f"{name}: {lost} records were lost, see the warning above")
                self._lost[name] = 0

    def __enter__(self) -> "Logbook":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, sink: "Sink", action: Callable[[], None]) -> bool:
        """Whether the action succeeded; if not, warns once per sink and cause."""
        try:
            action()
            return True
        except Exception as error:
            cause = (sink.name, type(error), getattr(error, "errno", None))
            if cause not in self._warned:
                self._warned.add(cause)
                self._tell(
                    f"cannot log to {sink.name}: {type(error).__name__}: {error}. Training continues, and each "
                    "record retries: free disk space or restore the folder"
                )
            return False

    def _tell(self, message: str) -> None:
        # Standard error may itself be a closed pipe or a full disk.
        with suppress(Exception):
            self._warn(message)


class ConsoleSink:
    """Validations and skipped steps for a person to read, written so that a progress bar stays whole."""

    name = "the console"

    def open(self) -> None: ...

    def sync(self) -> None: ...

    def write(self, record: Record) -> None:
        if isinstance(record, ValidationRecord):
            tqdm.write(describe_validation(record))
        elif isinstance(record, SkipRecord) and record.consecutive_skips == 1:
            tqdm.write(describe_skip(record))


Sink = JsonLinesSink | TensorBoardSink | ConsoleSink
"""Somewhere a record goes. Any method may raise; the logbook sees to it."""


def describe_validation(record: ValidationRecord) -> str:
    """One line of numbers, then at most five references with their hypotheses."""
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
    """What was skipped, why, and where to look."""
    named, others = record.utterances[:UTTERANCES_ON_CONSOLE], len(record.utterances) - UTTERANCES_ON_CONSOLE
    utterances = ", ".join(named) + (f" and {others} others" if others > 0 else "")
    return (
        f"Step {record.step + 1} is skipped: {record.reason}. The weights are unchanged. Its utterances: "
        f"{utterances} (log.jsonl lists those of every skipped step)."
    )
