"""TensorBoard event files: scalars with a tag (see records.py), images, audio and text.

torch's `SummaryWriter` is not used: it writes from a thread that prints a traceback and stops forever at the first full
disk, and loses its queue. Its functions that build image, audio and text summaries are used.
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
    """Curves of a run, with one event file of this process per entry of `CURVES`; training's is in the folder itself.

    TensorBoard treats each subfolder as a run with its own color, and draws equal tags of all of them into one chart.
    Opening imports TensorBoard (1-2 s).
    """

    def __init__(self, directory: Path, resumed_step: int):
        self.name = f"TensorBoard in {directory}"
        self._files = {curve: EventFile(directory / curve, resumed_step) for curve in CURVES}

    def open(self) -> None:
        for curve, file in self._files.items():
            # An empty event purges the records of an earlier process; a curve without data gets no folder.
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
    """Event file of this process in a folder, created on the first append; each append writes one event."""

    def __init__(self, directory: Path, resumed_step: int):
        self.directory = directory
        # A fresh start purges everything, including the settings that an earlier one logged at step 0.
        self._purge_step = resumed_step + 1 if resumed_step else 0

    def append(self, step: int, values: "list[Summary.Value]") -> None:
        """Append the values of one step; without values, only write the header, which purges."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        # The header is written together with the first event.
        atomic_append(self.path, _framed([event]) if values else b"", self._header)

    @cached_property
    def path(self) -> Path:
        """Path that sorts after every existing event file.

        TensorBoard reads files in the order of their names. A clock set back, or a restart within the same second,
        would sort the purge before the events to be purged.
        """
        numbers = [path.name.split(".")[3] for path in self.directory.glob("events.out.tfevents.*")]
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
        return self.directory / f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.konkanivani"

    @cached_property
    def _header(self) -> bytes:
        """First two events: the file version, and a session start that hides older events from the purge step on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        now = time.time()
        version = Event(wall_time=now, file_version="brain.Event:2")
        restart = Event(wall_time=now, step=self._purge_step, session_log=SessionLog(status=SessionLog.START))
        return _framed([version, restart])


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


def tagged_numbers(record: StepRecord | ValidationRecord | RehearsalRecord, curve: str) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for each field that TensorBoard draws into this curve and that has a value."""
    # A step has one PhaseMemory per phase, a validation at most one.
    memory = record.memory if isinstance(record.memory, tuple) else (record.memory,)
    for part in (record, *(phase for phase in memory if phase is not None and phase.phase in DRAWN_PHASES)):
        for entry in fields(part):
            value = getattr(part, entry.name)
            if entry.metadata.get("curve") == curve and value is not None:
                yield entry.metadata["tag"].format(phase=getattr(part, "phase", "")), value


def _framed(events: "list[Event]") -> bytes:
    """Return the events in the record format of event files, each with its length and checksums."""
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

    # Full scale is [-1, 1]; NaN would make the conversion to integers undefined.
    waveform = record.waveform.detach().float().cpu().nan_to_num(0).clamp(-1, 1)
    picture = draw_utterance(record.features, record.posteriors, len(waveform) / SAMPLE_RATE)
    values = [*summary.image(f"7 picture/{record.utterance_id}", picture, dataformats="HWC").value]
    if len(waveform):
        values += summary.audio(f"audio/{record.utterance_id}", waveform, SAMPLE_RATE).value
    return values
