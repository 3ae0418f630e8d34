"""Log of a run in TensorBoard, JSON lines and the console.

A failing sink never stops training. Each record is in the files when `log` returns, and no JSON file stays open between
two records.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from konkanivani.files import atomic_append, atomic_replace, sync_file
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import VALIDATION
from konkanivani.scoring.metrics import align_words
from konkanivani.training.progress import (
    CURVES,
    DRAWN_PHASES,
    FROM_NOTHING,
    HypothesisPair,
    Record,
    RehearsalRecord,
    Resumed,
    SettingsRecord,
    SkipRecord,
    SpectrogramRecord,
    StepRecord,
    ValidationRecord,
    describe_skip,
    describe_validation,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
# TensorBoard, written by torch's `SummaryWriter`: scalars (tags in progress.py), images, audio and text.
#
# The image of an utterance shows its spectrogram above its CTC posteriors, on one time axis. Axes: T feature frames, T'
# encoder frames, F mel bins, V vocabulary. It is drawn with torch only, without a plotting library.


EVENT_FILES = "events.out.tfevents.*"
WRITER_THREADS = "tensorboard.summary.writer.event_file_writer"
QUEUE_EVENTS = 1000  # more than one record has, so that the main thread does not wait for the writer after each scalar
WIDTH = 900
BIN_HEIGHT = 3
ROW_HEIGHT = 10
ROWS = 24
RULER_HEIGHT = 12


class TensorBoardSink:
    """Curves of a run, with one writer per entry of `CURVES`; training's is in the folder itself.

    TensorBoard treats each subfolder as a run with its own color, and draws equal tags of all of them into one chart.
    Opening imports TensorBoard.

    A writer's thread ends at its first error, such as a full disk. All writers are then closed and the error is raised;
    the next record opens new files, since the last event of the old one may be incomplete.
    """

    def __init__(self, directory: Path, resumed: Resumed):
        self.name = f"TensorBoard in {directory}"
        self._directory = directory
        # A fresh start purges everything, including the settings that an earlier one logged at step 0.
        self._purge_step = 0 if resumed == FROM_NOTHING else resumed.step + 1
        self._purged: set[str] = set()
        self._writers: dict[str, SummaryWriter] = {}

    def open(self) -> None:
        """Hide the records of an earlier process from the purge step on."""
        threading.excepthook = _report_thread_error
        for curve in CURVES:
            # A curve without data gets no folder.
            if not curve or (self._directory / curve).is_dir():
                with self._writer(curve):
                    pass

    def write(self, record: Record) -> None:
        """Write the record to the files of its curves; it is in the files when this returns."""
        if isinstance(record, SkipRecord):
            return  # counted in the next step's record
        for curve in CURVES:
            scalars = [*tagged_numbers(record, curve)]
            has_media = curve == _curve_of_media(record)
            if not scalars and not has_media:
                continue
            with self._writer(curve) as writer:
                for tag, number in scalars:
                    writer.add_scalar(tag, number, record.step)
                if has_media:
                    _write_media(writer, record)

    def sync(self) -> None:
        """Sync the files to disk."""
        for curve in CURVES:
            for path in (self._directory / curve).glob(EVENT_FILES):
                sync_file(path)

    def close(self) -> None:
        """End the writers' threads."""
        for curve in [*self._writers]:
            # Everything has been flushed; only a writer that has failed before may fail here.
            with suppress(Exception):
                self._writers.pop(curve).close()

    @contextmanager
    def _writer(self, curve: str) -> Iterator["SummaryWriter"]:
        """Yield the writer of a curve, opened if necessary, and flush it; close all writers if that fails."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self._directory / curve
        try:
            if curve not in self._writers:
                purge_step = None if curve in self._purged else self._purge_step
                self._writers[curve] = SummaryWriter(str(folder), purge_step=purge_step, max_queue=QUEUE_EVENTS)
            yield self._writers[curve]
            # Flushed after each record, so that a killed process keeps it and a full disk is noticed here.
            self._writers[curve].flush()
            self._purged.add(curve)
        except Exception:
            # All writers: a folder that was removed is lost to each of them.
            self.close()
            _remove_empty_files(folder)
            raise


def _report_thread_error(error: threading.ExceptHookArgs) -> None:
    """Report an uncaught error of a thread, except TensorBoard's writers, whose errors the main thread raises."""
    if type(error.thread).__module__ != WRITER_THREADS:
        threading.__excepthook__(error)


def _remove_empty_files(folder: Path) -> None:
    # On a full disk every record creates a file, which stays empty.
    with suppress(OSError):
        for path in folder.glob(EVENT_FILES):
            if os.path.getsize(path) == 0:
                path.unlink()


def _curve_of_media(record: Record) -> str | None:
    """Return the curve that gets the record's text, image or audio; None if it has none."""
    if isinstance(record, SettingsRecord):
        return ""
    if isinstance(record, SpectrogramRecord) or (isinstance(record, ValidationRecord) and record.hypotheses):
        return VALIDATION
    return None


def _write_media(writer: "SummaryWriter", record: Record) -> None:
    match record:
        case SettingsRecord():
            writer.add_text("settings", f"~~~~\n{record.text}\n~~~~", record.step)
        case ValidationRecord():
            writer.add_text("hypotheses", _hypotheses(record), record.step)
        case SpectrogramRecord():
            # Full scale is [-1, 1]; NaN would make the conversion to integers undefined.
            waveform = record.waveform.detach().float().cpu().nan_to_num(0).clamp(-1, 1)
            image = draw_utterance(record.features, record.posteriors, len(waveform) / SAMPLE_RATE)
            writer.add_image(f"7 picture/{record.utterance_id}", image, record.step, dataformats="HWC")
            if len(waveform):
                writer.add_audio(f"audio/{record.utterance_id}", waveform, record.step, sample_rate=SAMPLE_RATE)


def _hypotheses(record: ValidationRecord) -> str:
    rates = (("WER", record.wer), ("CER", record.cer))
    parts = [f"Epoch {record.epoch}", *(f"{name} {100 * rate:.1f} %" for name, rate in rates if rate is not None)]
    table = hypotheses_table(record.hypotheses)
    return f"{', '.join(parts)}. Words that differ are bold.\n\n{table}"


def hypotheses_table(pairs: tuple[HypothesisPair, ...]) -> str:
    """Return the pairs as a markdown table with differing words in bold.

    Characters with a meaning in markdown or HTML (<unk>, |, *) are escaped.
    """
    rows = ["| utterance | reference | hypothesis |", "|---|---|---|"]
    aligned = align_words([pair.reference for pair in pairs], [pair.hypothesis for pair in pairs])
    for pair, edits in zip(pairs, aligned, strict=True):
        texts = (
            " ".join(
                _plain(word) if edit.kind == "hit" else f"<strong>{_plain(word)}</strong>"
                for edit, word in zip(edits, words, strict=True)
                if word
            )
            for words in ([edit.reference for edit in edits], [edit.hypothesis for edit in edits])
        )
        rows.append(f"| {' | '.join([_plain(pair.utterance_id), *texts])} |")
    return "\n".join(rows)


def _plain(text: str) -> str:
    # Numeric character references are markup neither in markdown nor in HTML.
    marks: dict[str, str | int | None] = {mark: f"&#{ord(mark)};" for mark in "&<>|*_`[]\\"}
    marks |= {"\n": " ", "\r": " "}
    return text.translate(str.maketrans(marks))


def tagged_numbers(record: Record, curve: str) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for each field that TensorBoard draws into this curve and that has a value."""
    if not isinstance(record, StepRecord | ValidationRecord | RehearsalRecord):
        return
    # A step has one PhaseMemory per phase, a validation at most one.
    memory = record.memory if isinstance(record.memory, tuple) else (record.memory,)
    for part in (record, *(phase for phase in memory if phase is not None and phase.phase in DRAWN_PHASES)):
        for entry in fields(part):
            value = getattr(part, entry.name)
            if entry.metadata.get("curve") == curve and value is not None:
                yield entry.metadata["tag"].format(phase=getattr(part, "phase", "")), value


def draw_utterance(features: Tensor, posteriors: Tensor | None, seconds: float) -> Tensor:
    """Return an image (height, width, 3), uint8 RGB: spectrogram, ruler with a tick per second, and CTC posteriors.

    Both parts are stretched to the same width, so T' only has to be T divided by the subsampling factor.

    Args:
        features: (T, F) log-mel; low bins are drawn at the bottom.
        posteriors: (T', V) probabilities; None without CTC.
        seconds: duration of both.
    """
    # 900 pixels, but at least one per encoder frame: a posterior's peak is often one frame wide and must stay visible.
    width = max(WIDTH, 0 if posteriors is None else posteriors.shape[0])
    spectrogram = _stretch(_contrast(features.detach().float().cpu()).T.flip(0), BIN_HEIGHT, width)
    if posteriors is None:
        return torch.cat([colour(spectrogram), _ruler(seconds, width)])
    posteriors = posteriors.detach().float().cpu()
    # The square root makes the low probabilities of early training visible, and maps 0 and 1 to themselves.
    rows = posteriors.T[most_active_tokens(posteriors)].clamp(0, 1).sqrt()
    believed = colour(_stretch(rows, ROW_HEIGHT, width))
    believed[ROW_HEIGHT - 1 :: ROW_HEIGHT] = 40  # a grey line under each row separates it from the next
    return torch.cat([colour(spectrogram), _ruler(seconds, width), believed])


def most_active_tokens(posteriors: Tensor) -> Tensor:
    """Return the ids of at most 24 tokens of posteriors (T', V), in the order of their rows.

    The token with the most mass, usually the blank, is on top; the others follow by the time of their peak, so that a
    learned alignment appears as a falling diagonal.
    """
    peaks, times = posteriors.max(dim=0)
    # By peak, not by mass: a token that is certain in a single frame matters.
    chosen = peaks.argsort(descending=True, stable=True)[:ROWS]
    chosen = chosen[times[chosen].argsort(stable=True)]
    top = posteriors.sum(dim=0).argmax()
    return torch.cat([top[None], chosen[chosen != top]])[:ROWS]


def colour(intensity: Tensor) -> Tensor:
    """Map intensities (...) in [0, 1] to uint8 RGB (..., 3), black to white, with the cubehelix color map.

    Its brightness increases evenly, so it is readable in grey (Green 2011, "A colour scheme for the display of
    astronomical intensity images"; start 0.5, 1.5 rotations, hue 1.0, gamma 1.0, opposite direction of rotation).
    """
    angle = 2 * math.pi * (0.5 / 3 + 1 - 1.5 * intensity)
    amplitude = intensity * (1 - intensity) / 2
    red = intensity + amplitude * (-0.14861 * angle.cos() + 1.78277 * angle.sin())
    green = intensity + amplitude * (-0.29227 * angle.cos() - 0.90649 * angle.sin())
    blue = intensity + amplitude * (1.97294 * angle.cos())
    return (torch.stack([red, green, blue], dim=-1).clamp(0, 1) * 255).round().to(torch.uint8)


def _contrast(features: Tensor) -> Tensor:
    """Scale features (T, F) to [0, 1] between their 2nd and 99.5th percentile; non-finite values become 0."""
    finite = features[features.isfinite()]
    if not finite.numel():
        return torch.zeros_like(features)
    ordered = finite.sort().values  # torch.quantile refuses more than 2^24 values
    low = ordered[int(0.02 * (len(ordered) - 1))]
    high = ordered[int(0.995 * (len(ordered) - 1))]
    return ((features - low) / (high - low).clamp(min=1e-6)).nan_to_num(0, 1, 0).clamp(0, 1)


def _stretch(rows: Tensor, height: int, width: int) -> Tensor:
    """Stretch rows (N, time) to (N * height, width), in time by nearest neighbor."""
    columns = (torch.arange(width) + 0.5) * (rows.shape[1] / width)
    return rows[:, columns.long().clamp(max=rows.shape[1] - 1)].repeat_interleave(height, dim=0)


def _ruler(seconds: float, width: int) -> Tensor:
    """Return a dark band (12, width, 3) with a white tick, two pixels wide, at each whole second."""
    ruler = torch.full((RULER_HEIGHT, width, 3), 40, dtype=torch.uint8)
    for second in range(1, math.ceil(seconds)):
        left = int(second / seconds * width)
        ruler[2:-2, left : left + 2] = 255
    return ruler


# --------------------
# Log of a run: each record is written to TensorBoard, JSON lines and the console.


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
