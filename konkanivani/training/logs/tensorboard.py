"""The event files that TensorBoard reads: the numbers that carry a tag (see records.py), pictures, sound and text.

torch's `SummaryWriter` is not used because it writes from a thread that prints a traceback and ends for good at the
first full disk, and loses what was in its queue. The functions with which it builds pictures, sound and text are used.
"""

import io
import time
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from konkanivani.base.files import atomic_append, sync_file
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.evaluation.metrics import align_words
from konkanivani.memory.monitor import VALIDATION
from konkanivani.training.logs.records import (
    CURVES,
    DRAWN_PHASES,
    HypothesisPair,
    Record,
    RehearsalRecord,
    SettingsRecord,
    SkipRecord,
    SpectrogramRecord,
    StepRecord,
    ValidationRecord,
)
from konkanivani.training.logs.spectrogram import draw_utterance

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary


class TensorBoardSink:
    """A run's curves, an event file of this process for each (`CURVES`), training's in the folder itself.

    TensorBoard takes each folder below for a run with a colour of its own, and draws what has one tag into one chart.
    Imports TensorBoard (1-2 s) when it is opened.
    """

    def __init__(self, directory: Path, resumed_step: int):
        self.name = f"TensorBoard in {directory}"
        self._files = {curve: EventFile(directory / curve, resumed_step) for curve in CURVES}

    def open(self) -> None:
        for curve, file in self._files.items():
            # What an earlier process wrote is to be purged; a curve that there never is has no folder.
            if not curve or file.directory.is_dir():
                file.append(0, [])

    def write(self, record: Record) -> None:
        match record:
            case StepRecord() | RehearsalRecord():
                shown = {}
            case ValidationRecord():
                shown = {VALIDATION: _hypotheses(record) if record.hypotheses else []}
            case SpectrogramRecord():
                shown = {VALIDATION: _picture_and_sound(record)}
            case SettingsRecord():
                shown = {"": _text("settings", f"~~~~\n{record.text}\n~~~~")}
            case SkipRecord():
                return  # counted in the next step's record
        for curve, file in self._files.items():
            values = [*_scalars(record, curve), *shown.get(curve, [])]
            if values:
                file.append(record.step, values)

    def sync(self) -> None:
        for file in self._files.values():
            sync_file(file.path)


class EventFile:
    """The event file of this process in a folder, made when it is first appended to; each append is one event."""

    def __init__(self, directory: Path, resumed_step: int):
        self.directory = directory
        # Nothing of an earlier fresh start is wanted, its settings at step 0 included.
        self._purge_step = resumed_step + 1 if resumed_step else 0

    def append(self, step: int, values: "list[Summary.Value]") -> None:
        """Appends the values of one step; without any the file has its beginning, which purges, and no more."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        atomic_append(self.path, _framed([event]) if values else b"", self._header)

    @cached_property
    def path(self) -> Path:
        """A name after every one that is there: TensorBoard reads files in the order of their names, and a clock
        set back, or a restart within the second, would put the purge before what it should purge."""
        numbers = [path.name.split(".")[3] for path in self.directory.glob("events.out.tfevents.*")]
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
        return self.directory / f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.konkanivani"

    @cached_property
    def _header(self) -> bytes:
        """What an event file begins with: its version, and the restart that hides events from the purge step on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        now = time.time()
        version = Event(wall_time=now, file_version="brain.Event:2")
        restart = Event(wall_time=now, step=self._purge_step, session_log=SessionLog(status=SessionLog.START))
        return _framed([version, restart])


def hypotheses_table(pairs: tuple[HypothesisPair, ...]) -> str:
    """The pairs as a markdown table in which the words that differ are bold.

    What markdown or HTML would take for its own (<unk>, |, *) is escaped.
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
    marks = {mark: f"&#{ord(mark)};" for mark in "&<>|*_`[]\\"} | {"\n": " ", "\r": " "}
    return text.translate(str.maketrans(marks))


def tagged_numbers(record: StepRecord | ValidationRecord | RehearsalRecord, curve: str) -> Iterator[tuple[str, float]]:
    """(tag, number) of each field that TensorBoard draws into this curve and that has a value."""
    memory = record.memory if isinstance(record.memory, tuple) else (record.memory,)
    for part in (record, *(phase for phase in memory if phase is not None and phase.phase in DRAWN_PHASES)):
        for entry in fields(part):
            value = getattr(part, entry.name)
            if entry.metadata.get("curve") == curve and value is not None:
                yield entry.metadata["tag"].format(phase=getattr(part, "phase", "")), value


def _framed(events: "list[Event]") -> bytes:
    """The events as an event file holds them: each with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()


def _scalars(record: Record, curve: str) -> "list[Summary.Value]":
    from tensorboard.compat.proto.summary_pb2 import Summary

    if not isinstance(record, StepRecord | ValidationRecord | RehearsalRecord):
        return []
    return [Summary.Value(tag=tag, simple_value=number) for tag, number in tagged_numbers(record, curve)]


def _text(tag: str, markdown: str) -> "list[Summary.Value]":
    from torch.utils.tensorboard import summary

    return [*summary.text(tag, markdown).value]


def _hypotheses(record: ValidationRecord) -> "list[Summary.Value]":
    rates = (("WER", record.wer), ("CER", record.cer))
    said = [f"Epoch {record.epoch}", *(f"{name} {100 * rate:.1f} %" for name, rate in rates if rate is not None)]
    table = hypotheses_table(record.hypotheses)
    return _text("hypotheses", f"{', '.join(said)}. Words that differ are bold.\n\n{table}")


def _picture_and_sound(record: SpectrogramRecord) -> "list[Summary.Value]":
    from torch.utils.tensorboard import summary

    waveform = record.waveform.detach().float().cpu().nan_to_num(0).clamp(-1, 1)
    picture = draw_utterance(record.features, record.posteriors, len(waveform) / SAMPLE_RATE)
    values = [*summary.image(f"7 picture/{record.utterance_id}", picture, dataformats="HWC").value]
    if len(waveform):
        values += summary.audio(f"audio/{record.utterance_id}", waveform, SAMPLE_RATE).value
    return values
