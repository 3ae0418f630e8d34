"""Corrected transcripts: received from the page, as a manifest with audio for training, and with word times."""

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import soundfile
from websockets.sync.server import ServerConnection

from konkanivani.data.index import Utterance, row_of
from konkanivani.data.text import forbidden_in_transcript
from konkanivani.errors import DataError, ResourceError, explained
from konkanivani.files import atomic_write, exclusive_lock
from konkanivani.inference.word_times import Segment, Word, render
from konkanivani.serve.messages import (
    EditedSegments,
    End,
    Finished,
    Message,
    Part,
    Remove,
    Render,
    Save,
    parse_integers,
    parse_message,
)
from konkanivani.serve.session import Outbox

MANIFEST = "corrections.jsonl"
AUDIO = "audio"
MAX_SECONDS = 60.0
MAX_CHARACTERS = 10_000
KEY = re.compile(r"[0-9a-f]{8,32}-[0-9]{1,6}")  # becomes a file name
ADVICE = "Free disk space, or restart the server with another folder."


@dataclass(frozen=True)
class Correction:
    """Transcript of samples (S,) int16; `key` identifies the line, so that a later correction replaces the row."""

    key: str
    text: str
    sample_rate: int
    samples: np.ndarray


class Corrections:
    """Folder with the manifest `corrections.jsonl` and its audio files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, correction: Correction) -> int:
        """Write the audio and the row; return the number of rows.

        Raises a DataError for an unusable text, and a ResourceError if the files cannot be written.
        """
        text = check_text(correction.text)
        name = _audio_name(correction.key)
        seconds = len(correction.samples) / correction.sample_rate
        path = self._folder / name
        with explained(ResourceError, f"{path} could not be written", ADVICE, soundfile.LibsndfileError):
            path.parent.mkdir(parents=True, exist_ok=True)
        # Only the lock can raise an OSError here.
        with explained(ResourceError, f"{self._folder} could not be locked", ADVICE), exclusive_lock(self._folder):
            # The audio comes first: a row without audio would be invalid, audio without a row is only unused.
            with atomic_write(path) as partial:
                _write_flac(partial, correction)
            row = row_of(Utterance(name, str(path), seconds, text))
            return self._replace_row(name, [json.dumps(row, ensure_ascii=False).encode() + b"\n"])

    def remove(self, key: str) -> int:
        """Remove the row and the audio of a line, if it was saved; return the number of rows.

        Raises a ResourceError if the files cannot be written.
        """
        name = _audio_name(key)
        if not (self._folder / MANIFEST).exists():
            return 0
        with explained(ResourceError, f"{self._folder} could not be changed", ADVICE), exclusive_lock(self._folder):
            rows = self._replace_row(name, [])
            (self._folder / name).unlink(missing_ok=True)
        return rows

    def _replace_row(self, audio: str, new_rows: list[bytes]) -> int:
        """Append the new rows in place of the earlier one with this audio; return the number of rows."""
        path = self._folder / MANIFEST
        with atomic_write(path) as partial:
            rows = [*(line for line in _lines(path) if _audio_of(line) != audio), *new_rows]
            partial.write_bytes(b"".join(rows))
        return len(rows)


def _audio_name(key: str) -> str:
    """Return the path of a line's audio in the folder; raise a DataError if the key cannot be in a file name."""
    if not KEY.fullmatch(key):
        raise DataError("The line to be saved has no valid name. Reload the page.")
    return f"{AUDIO}/{key}.flac"


def open_corrections(folder: str) -> Corrections:
    """Return the corrections of a folder, which may be new; raise a ResourceError if it cannot be written."""
    path = Path(folder).absolute()
    existing = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK):
        raise ResourceError(f"--corrections {folder}: {existing} is not a writable folder. Choose another one.")
    return Corrections(path)


def check_text(text: str) -> str:
    """Return the transcript with single spaces; raise a DataError if no manifest may contain it."""
    text = " ".join(text.split())
    if not text or len(text) > MAX_CHARACTERS:
        raise DataError(f"The text has {len(text)} characters. Write 1 to {MAX_CHARACTERS:,}.")
    character = forbidden_in_transcript(text)
    if character:
        raise DataError(f"The text contains the control character U+{ord(character):04X}. Remove it.")
    return text


def _write_flac(path: Path, correction: Correction) -> None:
    try:
        soundfile.write(path, correction.samples, correction.sample_rate, format="FLAC", subtype="PCM_16")
    except soundfile.LibsndfileError as error:
        raise OSError(str(error)) from None


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a manifest with line ends; none if the file is missing."""
    if path.exists():
        for line in path.read_bytes().splitlines():
            yield line + b"\n"


def _audio_of(line: bytes) -> str | None:
    """Return the audio path of a row; None if the row is invalid, which is kept as it is."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields.get("audio_filepath") if isinstance(fields, dict) else None


def edit_segment(text: str, words: tuple[Word, ...]) -> Segment | None:
    """Return a segment with the edited `text` of the recognised `words`; None if the text is empty.

    Unchanged words keep their times. Changed words divide the time of the words that they replace; inserted words
    divide the gap between their neighbours.
    """
    edited = text.split()
    recognised = [word.text for word in words]
    # Boundaries of the gaps: the segment's start, the words, the segment's end.
    starts = [*(word.start for word in words), words[-1].end]
    ends = [words[0].start, *(word.end for word in words)]
    result: list[Word] = []
    for kind, first, last, start, end in SequenceMatcher(None, recognised, edited, autojunk=False).get_opcodes():
        if kind == "equal":
            result += words[first:last]
        elif kind == "replace":
            result += _distribute_words(edited[start:end], words[first].start, words[last - 1].end)
        elif kind == "insert":
            result += _distribute_words(edited[start:end], ends[first], max(ends[first], starts[first]))
    return Segment(tuple(result)) if result else None


def _distribute_words(texts: list[str], start: float, end: float) -> list[Word]:
    """Return words that divide the time from `start` to `end` by their numbers of characters, without confidence."""
    total = sum(map(len, texts))
    words = []
    done = 0
    for text in texts:
        word_start = start + (end - start) * done / total
        done += len(text)
        words.append(Word(text, word_start, start + (end - start) * done / total, None))
    return words


# --------------------
# Short exchanges with the page: a correction to save, an edited transcript to render.


MAX_TRANSCRIPT_WORDS = 100_000  # about ten hours
AUDIO_TIMEOUTS = 4  # for the audio of a correction, which comes in several messages
WRONG_TIME = "The page sent a message at the wrong time. Reload the page."


def receive_correction(connection: ServerConnection, timeout: float) -> Correction | Remove:
    """Receive a corrected transcript and its audio, or the request to remove one.

    Args:
        timeout: seconds to wait for a message.

    Raises a DataError if it is invalid, and a TimeoutError if it is incomplete.
    """
    message = _receive(connection, timeout)
    if isinstance(message, Remove):
        return message
    if not isinstance(message, Save):
        raise DataError(WRONG_TIME)
    check_text(message.text)
    if not 0 < message.samples <= MAX_SECONDS * message.sample_rate:
        raise DataError(f"The audio of a correction must be at most {MAX_SECONDS:g} s long.")
    samples = _receive_audio(connection, message.samples, AUDIO_TIMEOUTS * timeout)
    return Correction(message.key, message.text, message.sample_rate, samples)


def _receive_audio(connection: ServerConnection, count: int, timeout: float) -> np.ndarray:
    deadline = time.monotonic() + timeout
    blocks: list[np.ndarray] = []
    missing = count
    while missing > 0:
        block = connection.recv(timeout=deadline - time.monotonic())
        if isinstance(block, str):
            raise DataError("The page sent text where audio was expected. Reload the page.")
        blocks.append(parse_integers(block))
        missing -= len(blocks[-1])
    if missing < 0:
        raise DataError("The page sent more audio than it announced. Reload the page.")
    return np.concatenate(blocks)


def render_transcript(connection: ServerConnection, timeout: float) -> None:
    """Receive segments, and send the transcript in the requested format.

    Raises a DataError if a message is invalid, and a TimeoutError if one does not arrive within `timeout` seconds.
    """
    message = _receive(connection, timeout)
    if not isinstance(message, Render):
        raise DataError(WRONG_TIME)
    segments = _receive_segments(connection, timeout)
    # A blocked `send` of a browser that does not read would also stop keepalive and closing; `Outbox.close` ends it.
    outbox = Outbox(connection)
    try:
        for text in render(segments, message.text_format, message.timestamps, message.name):
            outbox.put(Part(text))
        outbox.put(Finished())
    finally:
        outbox.close(timeout)


def _receive_segments(connection: ServerConnection, timeout: float) -> Iterator[Segment]:
    words = 0
    while True:
        message = _receive(connection, timeout)
        if isinstance(message, End):
            return
        if not isinstance(message, EditedSegments):
            raise DataError(WRONG_TIME)
        words += sum(len(edited.words) for edited in message.segments)
        if words > MAX_TRANSCRIPT_WORDS:
            raise DataError(f"A transcript may have at most {MAX_TRANSCRIPT_WORDS:,} words. Split the recording.")
        for edited in message.segments:
            segment = edit_segment(edited.text, edited.words)
            if segment is not None:
                yield segment


def _receive(connection: ServerConnection, timeout: float) -> Message:
    message = connection.recv(timeout=timeout)
    if isinstance(message, bytes):
        raise DataError("The page sent audio where text was expected. Reload the page.")
    return parse_message(message)
