"""The event file that TensorBoard reads: the numbers that carry a tag (see records.py), pictures, sound and text.

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

from konkanivani.appended_file import append_whole, sync_file
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
        sync_file(self._path)

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
