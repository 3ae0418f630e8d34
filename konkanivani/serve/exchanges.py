"""Short exchanges with the page: a correction to save, an edited transcript to render."""

import time
from collections.abc import Iterator
from difflib import SequenceMatcher

import numpy as np
from websockets.sync.server import ServerConnection

from konkanivani.errors import DataError
from konkanivani.inference.word_times import Segment, Word, render
from konkanivani.serve.corrections import MAX_SECONDS, Correction, check_text
from konkanivani.serve.messages import (
    EditedSegments,
    End,
    Finished,
    Message,
    Part,
    Render,
    Save,
    format_message,
    parse_integers,
    parse_message,
)

MAX_TRANSCRIPT_WORDS = 100_000  # about ten hours
AUDIO_TIMEOUTS = 4  # for the audio of a correction, which comes in several messages
WRONG_TIME = "The page sent a message at the wrong time. Reload the page."


def receive_correction(connection: ServerConnection, timeout: float) -> Correction:
    """Receive a corrected transcript and its audio.

    Args:
        timeout: seconds to wait for a message.

    Raises a DataError if it is invalid, and a TimeoutError if it is incomplete.
    """
    message = _receive(connection, timeout)
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
    for text in render(segments, message.text_format, message.timestamps, message.name):
        connection.send(format_message(Part(text)))
    connection.send(format_message(Finished()))


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
            result += _divide(edited[start:end], words[first].start, words[last - 1].end)
        elif kind == "insert":
            result += _divide(edited[start:end], ends[first], max(ends[first], starts[first]))
    return Segment(tuple(result)) if result else None


def _divide(texts: list[str], start: float, end: float) -> list[Word]:
    """Return words that divide the time from `start` to `end` by their numbers of characters, without confidence."""
    total = sum(map(len, texts))
    words = []
    done = 0
    for text in texts:
        word_start = start + (end - start) * done / total
        done += len(text)
        words.append(Word(text, word_start, start + (end - start) * done / total, None))
    return words
