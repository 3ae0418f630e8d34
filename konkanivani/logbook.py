"""One `log()` fanned out to TensorBoard, JSONL and the console.

TensorBoard draws the numbers that carry a tag (see records.py). JSONL gets every field of a step, a skipped one or a
validation, exactly, and null where a number is not finite.

A logger that fails never stops training. So nothing here stays open between two records, and there is no thread:
a record is appended to each file in one piece, or taken back whole. torch's `SummaryWriter` is not used because it
writes from a thread that prints a traceback and ends for good at the first full disk, and loses what was in its queue.
The functions with which it builds pictures, sound and text are used.
"""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from konkanivani.lengths import SAMPLE_RATE
from konkanivani.pictures import draw_utterance
from konkanivani.records import (
    HypothesisPair,
    Record,
    RehearsalRecord,
    SettingsRecord,
    SkipRecord,
    SpectrogramRecord,
    StepRecord,
    ValidationRecord,
)

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

LOG_NAME = "log.jsonl"
PAIRS_ON_CONSOLE = 5
UTTERANCES_ON_CONSOLE = 8

# Regular expressions over tags: TensorBoard anchors them at the start only.
CUSTOM_LAYOUT = {
    "Loss": {
        "total": ["Multiline", ["loss/total$", "validation/loss$"]],
        "ctc": ["Multiline", ["loss/ctc$", "validation/ctc_loss$"]],
        "attention": ["Multiline", ["loss/attention$", "validation/attention_loss$"]],
    },
    "Error rates": {"WER and CER": ["Multiline", ["validation/wer$", "validation/cer$"]]},
    # One expression for both lines of a phase: one that matches nothing, as where nothing is planned, is complained of.
    "Memory (MiB)": {"peak and planned": ["Multiline", ["memory/.*/(peak|planned)_mib$"]]}
    | {
        name: ["Multiline", [f"memory/.*/{name}_mib$"]]
        for name in ("allocated", "reserved", "fragmentation", "resident")
    },
}


class Sink(Protocol):
    """Somewhere a record goes. Any method may raise; the logbook sees to it."""

    name: str

    def open(self) -> None: ...
    def write(self, record: Record) -> None: ...
    def sync(self) -> None: ...


class Logbook:
    """All sinks of a run behind one `log()`, which raises nothing that a disk, a folder or a library can cause.

    Without a directory there is none: of several ranks the first one logs.

    `resumed_step` is the step that training goes on from, with `resumed_skips` windows skipped on the way: what an
    earlier process logged beyond them is cut from `log.jsonl` and purged from TensorBoard's curves, so each step and
    each skipped window is there once. Where both are 0 the log begins afresh.
    A failing sink is tried again at each record; one warning goes to `warn` per sink and cause,
    and `close()` says how many records are missing.
    """

    def __init__(
        self,
        directory: str | Path | None,
        *,
        resumed_step: int = 0,
        resumed_skips: int = 0,
        warn: Callable[[str], None] | None = None,
    ):
        self.resumed_step = resumed_step
        self._warn = warn or _warn_on_stderr
        self._sinks: tuple[Sink, ...] = ()
        if directory is not None:
            directory = Path(directory)
            self._sinks = (
                JsonLinesSink(directory / LOG_NAME, resumed_step, resumed_skips),
                TensorBoardSink(directory, resumed_step),
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
        self.log(SettingsRecord(self.resumed_step, text))

    def flush(self) -> None:
        """Has the disk confirm what is written; before a checkpoint, lest the log end before it after a power cut."""
        for sink in self._sinks:
            self._attempt(sink, sink.sync)

    def close(self) -> None:
        """Says which records are missing, if any. There is nothing else to do: no file is open, no thread runs."""
        for name, lost in self._lost.items():
            if lost:
                self._tell(f"{name}: {lost} records are missing, see the warning above")
                self._lost[name] = 0

    def __enter__(self) -> "Logbook":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, sink: Sink, action: Callable[[], None]) -> bool:
        """Whether the action succeeded; if not, warns once per sink and cause."""
        try:
            action()
            return True
        except Exception as error:
            cause = (sink.name, type(error), getattr(error, "errno", None))
            if cause not in self._warned:
                self._warned.add(cause)
                self._tell(
                    f"cannot log to {sink.name}: {type(error).__name__}: {error}. Training goes on without it, "
                    "and each record tries again: free the disk or restore the folder to have it back"
                )
            return False

    def _tell(self, message: str) -> None:
        # Standard error may itself be a closed pipe or a full disk.
        with suppress(Exception):
            self._warn(message)


class JsonLinesSink:
    """`log.jsonl`: one JSON object a line, "kind" first, numbers that read back as the same floats."""

    def __init__(self, path: Path, resumed_step: int, resumed_skips: int):
        self.name = str(path)
        self._path = path
        self._resumed_step, self._resumed_skips = resumed_step, resumed_skips
        self._is_cut = False

    def open(self) -> None:
        """Cuts the lines past what is resumed, and those that a kill tore; until that succeeds nothing is appended."""
        if not self._is_cut:
            if self._path.is_file():
                self._cut()
            self._is_cut = True

    def write(self, record: Record) -> None:
        match record:
            case StepRecord():
                kind = "step"
            case SkipRecord():
                kind = "skip"
            case ValidationRecord():
                kind = "validation"
            case RehearsalRecord():
                kind = "rehearsal"
            case _:
                return
        self.open()
        line = json.dumps({"kind": kind} | _finite(asdict(record)), ensure_ascii=False, allow_nan=False)
        append_whole(self._path, line.encode() + b"\n")

    def sync(self) -> None:
        _sync(self._path)

    def _cut(self) -> None:
        beside = self._path.with_name(self._path.name + ".partial")
        with open(self._path, "rb") as old, open(beside, "wb") as new:
            for line in old:
                if self._is_kept(line):
                    new.write(line.rstrip(b"\n") + b"\n")
            new.flush()
            os.fsync(new.fileno())
        os.replace(beside, self._path)

    def _is_kept(self, line: bytes) -> bool:
        """Whether a line is of before the resumed step; one that is torn or is no record is not."""
        if not self._resumed_step and not self._resumed_skips:
            return False
        try:
            record = json.loads(line)
            # Windows are skipped between two steps: before or after the checkpoint, their own count says.
            is_too_late = record.get("kind") == "skip" and record["skipped_steps"] > self._resumed_skips
            return isinstance(record["step"], int) and record["step"] <= self._resumed_step and not is_too_late
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False


class TensorBoardSink:
    """One event file of this process, each record one event in it. Imports TensorBoard (1-2 s) when it is opened."""

    def __init__(self, directory: Path, resumed_step: int):
        self.name = f"TensorBoard in {directory}"
        self._directory = directory
        # Nothing of an earlier fresh start is wanted, its settings at step 0 included.
        self._purge_step = resumed_step + 1 if resumed_step else 0

    def open(self) -> None:
        append_whole(self._path, b"", self._header)

    def write(self, record: Record) -> None:
        from torch.utils.tensorboard import summary

        match record:
            case StepRecord() | RehearsalRecord():
                values = _scalars(record)
            case ValidationRecord():
                table = summary.text("hypotheses", hypotheses_table(record.hypotheses)).value
                values = [*_scalars(record), *(table if record.hypotheses else ())]
            case SpectrogramRecord():
                values = _picture_and_sound(record)
            case SettingsRecord():
                values = summary.text("settings", f"~~~~\n{record.text}\n~~~~").value
            case SkipRecord():
                return  # counted in the next step's record
        append_whole(self._path, _framed([_event(record.step, values)]), self._header)

    def sync(self) -> None:
        _sync(self._path)

    @cached_property
    def _path(self) -> Path:
        """A name after every one that is there: TensorBoard reads files in the order of their names, and a clock
        set back, or a restart within the second, would put the purge before what it should purge."""
        self._directory.mkdir(parents=True, exist_ok=True)
        numbers = [path.name.split(".")[3] for path in self._directory.glob("events.out.tfevents.*")]
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
        return self._directory / f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.konkanivani"

    @cached_property
    def _header(self) -> bytes:
        """What an event file begins with: its version, the restart that hides events from the purge step on, charts."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import summary

        now = time.time()
        version = Event(wall_time=now, file_version="brain.Event:2")
        restart = Event(wall_time=now, step=self._purge_step, session_log=SessionLog(status=SessionLog.START))
        return _framed([version, restart, _event(0, summary.custom_scalars(CUSTOM_LAYOUT).value)])


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


def describe_validation(record: ValidationRecord) -> str:
    """One line of numbers, then at most five references with their hypotheses."""
    parts = [f"epoch {record.epoch}", f"step {record.step}"]
    parts += [f"valid loss {record.loss:.3f}"] if record.loss is not None else []
    rates = (("WER", record.wer), ("CER", record.cer))
    parts += [f"{name} {100 * rate:.1f} %" for name, rate in rates if rate is not None]
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
        f"Step {record.step + 1} is skipped: {record.reason}. No weight has changed. Its utterances: {utterances} "
        "(log.jsonl names those of every skipped step)."
    )


def hypotheses_table(pairs: tuple[HypothesisPair, ...]) -> str:
    """The pairs as a markdown table; what markdown or HTML would take for its own (<unk>, |, *) is escaped."""
    plain = str.maketrans({mark: f"&#{ord(mark)};" for mark in "&<>|*_`[]\\"} | {"\n": " ", "\r": " "})
    cells = ((pair.utterance_id, pair.reference, pair.hypothesis) for pair in pairs)
    rows = [f"| {' | '.join(cell.translate(plain) for cell in row)} |" for row in cells]
    return "\n".join(["| utterance | reference | hypothesis |", "|---|---|---|", *rows])


def tagged_numbers(record: StepRecord | ValidationRecord | RehearsalRecord) -> Iterator[tuple[str, float]]:
    """(tag, number) of each field that TensorBoard draws and that has a value."""
    memory = record.memory if isinstance(record.memory, tuple) else (record.memory,)
    for part in (record, *(phase for phase in memory if phase is not None)):
        for entry in fields(part):
            value = getattr(part, entry.name)
            if "tag" in entry.metadata and value is not None:
                yield entry.metadata["tag"].format(phase=getattr(part, "phase", "")), value


def append_whole(path: Path, data: bytes, header: bytes = b"") -> None:
    """Appends the data, or takes back what was written of it and raises. An empty or absent file gets the header first.

    Opened anew each time (tens of microseconds): a file kept open goes on swallowing data once its folder is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        remaining = memoryview(data if start else header + data)
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except BaseException:  # an interruption too must not leave half a record
            with suppress(OSError):
                file.truncate(start)
            raise


def _sync(path: Path) -> None:
    with suppress(FileNotFoundError), open(path, "rb") as file:
        os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    """The same JSON-like value with None for each number that JSON cannot say."""
    match value:
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value


def _event(step: int, values: "list[Summary.Value]") -> "Event":
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))


def _framed(events: "list[Event]") -> bytes:
    """The events as an event file holds them: each with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()


def _scalars(record: StepRecord | ValidationRecord | RehearsalRecord) -> "list[Summary.Value]":
    from tensorboard.compat.proto.summary_pb2 import Summary

    return [Summary.Value(tag=tag, simple_value=number) for tag, number in tagged_numbers(record)]


def _picture_and_sound(record: SpectrogramRecord) -> "list[Summary.Value]":
    from torch.utils.tensorboard import summary

    waveform = record.waveform.detach().float().cpu().nan_to_num(0).clamp(-1, 1)
    picture = draw_utterance(record.features, record.posteriors, len(waveform) / SAMPLE_RATE)
    values = [*summary.image(f"spectrogram/{record.utterance_id}", picture, dataformats="HWC").value]
    if len(waveform):
        values += summary.audio(f"audio/{record.utterance_id}", waveform, SAMPLE_RATE).value
    return values


def _warn_on_stderr(message: str) -> None:
    tqdm.write(f"warning: {message}", file=sys.stderr)
