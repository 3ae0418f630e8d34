"""Messages between the page and the server: JSON objects with a `type`, and binary samples.

    /listen   page: start, samples (float32) …, finish    server: ready, partial, final, progress …, finished
    /save     page: save, samples (int16) …, or remove    server: saved
    /render   page: render, segments …, end               server: part …, finished

Each exchange may end with an `error` of the server, a sentence for the user.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

import numpy as np

from konkanivani.console import show_text
from konkanivani.data.audio.files import MAX_RATE, MIN_RATE
from konkanivani.errors import DataError
from konkanivani.inference.listener import Final, Partial
from konkanivani.inference.word_times import TextFormat, Timestamps, Word

Value = TypeVar("Value", str, int, list)

FLOAT_BYTES = 4
INTEGER_BYTES = 2
MAX_SECONDS = 1e6
MAX_WORDS = 500  # of one line, which lasts 30 s: comparing an edited line with the recognised one is quadratic
TEXT_FORMATS: tuple[TextFormat, ...] = ("txt", "json", "srt", "vtt")
TIMESTAMPS: tuple[Timestamps, ...] = ("segment", "word")

# --------------------
# Messages of the page.


@dataclass(frozen=True)
class Start:
    """Start of a recording."""

    sample_rate: int


@dataclass(frozen=True)
class Finish:
    """End of a recording: the rest is decoded."""


@dataclass(frozen=True)
class Save:
    """Corrected transcript of `samples` samples, which follow as int16; `key` identifies the line of the transcript."""

    key: str
    text: str
    sample_rate: int
    samples: int


@dataclass(frozen=True)
class Remove:
    """Request to remove the correction of the line `key`."""

    key: str


@dataclass(frozen=True)
class Render:
    """Request for a transcript in a text format; its segments follow."""

    text_format: TextFormat
    timestamps: Timestamps
    name: str


@dataclass(frozen=True)
class EditedSegment:
    """Recognised words with their times, and the text as the user has edited it."""

    text: str
    words: tuple[Word, ...]


@dataclass(frozen=True)
class EditedSegments:
    """Consecutive segments of a transcript."""

    segments: tuple[EditedSegment, ...]


@dataclass(frozen=True)
class End:
    """End of the segments."""


Message = Start | Finish | Save | Remove | Render | EditedSegments | End


def parse_message(text: str) -> Message:
    """Return the message in a JSON object; raise a DataError if it is invalid."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise DataError("The page sent a message that is not a JSON object. Reload the page.")
    kind = _field(fields, "type", str)
    if kind == "start":
        return Start(_sample_rate(fields))
    if kind == "finish":
        return Finish()
    if kind == "save":
        return Save(
            _field(fields, "key", str),
            _field(fields, "text", str),
            _sample_rate(fields),
            _field(fields, "samples", int),
        )
    if kind == "remove":
        return Remove(_field(fields, "key", str))
    if kind == "render":
        text_format = _field(fields, "format", str)
        timestamps = _field(fields, "timestamps", str)
        for known_format in TEXT_FORMATS:
            for known_timestamps in TIMESTAMPS:
                if (known_format, known_timestamps) == (text_format, timestamps):
                    return Render(known_format, known_timestamps, _field(fields, "name", str))
        raise _invalid("format", text_format)
    if kind == "segments":
        return EditedSegments(tuple(map(_segment, _field(fields, "segments", list))))
    if kind == "end":
        return End()
    raise _invalid("type", kind)


def parse_samples(message: bytes) -> np.ndarray:
    """Return the samples (S,) of a binary message of little-endian float32; raise a DataError for half a sample."""
    if len(message) % FLOAT_BYTES:
        raise DataError(f"A message of {len(message)} bytes is not a whole number of float32 samples. Reload the page.")
    return np.frombuffer(message, dtype="<f4")


def parse_integers(message: bytes) -> np.ndarray:
    """Return the samples (S,) of a binary message of little-endian int16; raise a DataError for half a sample."""
    if len(message) % INTEGER_BYTES:
        raise DataError(f"A message of {len(message)} bytes is not a whole number of int16 samples. Reload the page.")
    return np.frombuffer(message, dtype="<i2")


def _invalid(name: str, value: object) -> DataError:
    return DataError(f"The page sent a message with the {name} {show_text(repr(value), 60)}. Reload the page.")


def _field(fields: Mapping[str, object], name: str, kind: type[Value]) -> Value:
    value = fields.get(name)
    # `type`, because a bool is an int. JSON can escape half a surrogate pair, which no text file can contain.
    if type(value) is not kind or (isinstance(value, str) and not _is_encodable(value)):
        raise _invalid(name, value)
    return value


def _is_encodable(text: str) -> bool:
    """Return whether text can be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sample_rate(fields: Mapping[str, object]) -> int:
    rate = _field(fields, "sample_rate", int)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DataError(
            f"The sample rate {rate} Hz is not between {MIN_RATE} and {MAX_RATE} Hz. Choose another microphone, or "
            "another rate in the system's sound settings."
        )
    return rate


def _segment(fields: object) -> EditedSegment:
    if not isinstance(fields, dict):
        raise _invalid("segments", fields)
    words = tuple(map(_word, _field(fields, "words", list)))
    text = _field(fields, "text", str)
    if not 0 < len(words) <= MAX_WORDS or len(text.split()) > MAX_WORDS:
        raise DataError(f"A line of the transcript must have 1 to {MAX_WORDS} words. Split the recording.")
    return EditedSegment(text, words)


def _word(fields: object) -> Word:
    if not isinstance(fields, dict):
        raise _invalid("words", fields)
    confidence = fields.get("confidence")
    return Word(
        _field(fields, "text", str),
        _seconds(fields, "start"),
        _seconds(fields, "end"),
        None if confidence is None else _seconds(fields, "confidence"),
    )


def _seconds(fields: Mapping[str, object], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_SECONDS:
        raise _invalid(name, value)
    return float(value)


# --------------------
# Messages of the server.


@dataclass(frozen=True)
class Ready:
    """Answer to Start; `can_save` is whether corrections are accepted."""

    model: str
    language: str
    can_save: bool


@dataclass(frozen=True)
class Progress:
    """Seconds of audio that are decoded and that wait; `load` is computing time divided by audio duration."""

    decoded: float
    backlog: float
    load: float


@dataclass(frozen=True)
class Finished:
    """End of the results."""


@dataclass(frozen=True)
class Failure:
    """Sentence for the user; the server closes the connection after it."""

    message: str


@dataclass(frozen=True)
class Saved:
    """Answer to Save and Remove: number of utterances in the manifest of corrections."""

    rows: int


@dataclass(frozen=True)
class Part:
    """Part of a rendered transcript."""

    text: str


ServerMessage = Ready | Partial | Final | Progress | Finished | Failure | Saved | Part
Kind = Literal["ready", "partial", "final", "progress", "finished", "error", "saved", "part"]
KINDS: Mapping[type, Kind] = {
    Ready: "ready",
    Partial: "partial",
    Final: "final",
    Progress: "progress",
    Finished: "finished",
    Failure: "error",
    Saved: "saved",
    Part: "part",
}


def format_message(message: ServerMessage) -> str:
    """Return a message as JSON; numbers that JSON does not have become null."""
    fields = {"type": KINDS[type(message)]} | asdict(message)
    return json.dumps(_finite(fields), ensure_ascii=False)


def _finite(value: object) -> object:
    """Round numbers to milliseconds, and replace NaN and infinity by None."""
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
