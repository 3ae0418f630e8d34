"""Transcripts with times, and their formats: text, SRT, VTT and JSON.

SubRip has no standard; WebVTT is specified by the W3C (w3.org/TR/webvtt1). Cues have at most two lines of 42 characters
and last at most seven seconds (limits of Netflix's Timed Text Style Guides).
"""

import html
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

# --------------------
# Transcript of a recording as segments of words. Times are seconds from the start of the recording.


@dataclass(frozen=True)
class Word:
    """Word with its start and end time; `confidence` is from 0 to 1, or None if unknown."""

    text: str
    start: float
    end: float
    confidence: float | None


@dataclass(frozen=True)
class Segment:
    """One or more words that were recognised together, usually the speech between two pauses."""

    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        """Words joined by spaces."""
        return " ".join(word.text for word in self.words)

    @property
    def start(self) -> float:
        """Start of the first word."""
        return self.words[0].start

    @property
    def end(self) -> float:
        """End of the last word."""
        return self.words[-1].end


@dataclass(frozen=True)
class Transcript:
    """All segments of a recording, in order; empty if there is no speech."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """Segments joined by spaces."""
        return " ".join(segment.text for segment in self.segments)

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of all segments."""
        return tuple(word for segment in self.segments for word in segment.words)


# --------------------
# Transcripts as plain text, JSON or subtitles, written segment by segment.


LINE_CHARACTERS = 42
CUE_LINES = 2
# seconds; a shorter cue is extended, up to the next one
MAX_CUE = 7.0
MIN_CUE = 1.0
CUE_PAUSE = 0.7  # seconds of silence that end a cue

TextFormat = Literal["txt", "json", "srt", "vtt"]
Timestamps = Literal["segment", "word"]


def render(segments: Iterable[Segment], text_format: TextFormat, timestamps: Timestamps, name: str) -> Iterator[str]:
    """Yield the transcript of the recording `name` in a text format, in parts, as soon as each segment is available.

    Args:
        timestamps: "segment", or "word" for one line per word in plain text (start and end in seconds, word), one cue
            per word in subtitles, and a list of words in JSON.
    """
    if text_format == "json":
        # A JSON record is complete only at the end of the recording.
        yield json_text(Transcript(tuple(segments)), timestamps, name)
    elif text_format == "txt":
        for segment in segments:
            if timestamps == "segment":
                yield segment.text + "\n"
            else:
                yield "".join(f"{word.start:.3f}\t{word.end:.3f}\t{word.text}\n" for word in segment.words)
    elif text_format == "srt":
        for number, cue in enumerate(build_cues(segments, timestamps), start=1):
            yield f"{number}\n{srt_time(cue.start)} --> {srt_time(cue.end)}\n{cue.text}\n\n"
    else:
        yield "WEBVTT\n\n"
        for cue in build_cues(segments, timestamps):
            # In cue text, < and & start markup, and an arrow would be read as a timing.
            text = html.escape(cue.text, quote=False)
            yield f"{vtt_time(cue.start)} --> {vtt_time(cue.end)}\n{text}\n\n"


def json_text(transcript: Transcript, timestamps: Timestamps, name: str) -> str:
    """Return the transcript as one line of JSON, with times in seconds."""
    segments = []
    for segment in transcript.segments:
        segments.append(_timed_row(segment))
        if timestamps == "word":
            confidences = [None if word.confidence is None else round(word.confidence, 4) for word in segment.words]
            words = zip(segment.words, confidences, strict=True)
            segments[-1]["words"] = [_timed_row(word) | {"confidence": confidence} for word, confidence in words]
    record = {"audio_filepath": name, "text": transcript.text, "segments": segments}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _timed_row(part: Segment | Word) -> dict[str, object]:
    return {"start": round(part.start, 3), "end": round(part.end, 3), "text": part.text}


@dataclass(frozen=True)
class Cue:
    """Subtitle shown from `start` to `end`, in milliseconds; `text` may contain line breaks."""

    start: int
    end: int
    text: str


def build_cues(segments: Iterable[Segment], timestamps: Timestamps) -> Iterator[Cue]:
    """Yield the cues of segments, at least 1 ms long and without overlap."""
    # The end of a cue depends on the next one, so output lags by one cue.
    held: Cue | None = None
    for segment in segments:
        for words in [[word] for word in segment.words] if timestamps == "word" else _cue_words(segment.words):
            start = round(words[0].start * 1000)
            if held is not None:
                # Rounding may give equal starts: move the later cue, so that every cue lasts at least 1 ms.
                start = max(start, held.start + 1)
                yield _shown_until(held, start)
            end = max(round(words[-1].end * 1000), start + 1)
            held = Cue(start, end, _lines([word.text for word in words]))
    if held is not None:
        yield _shown_until(held, None)


def _shown_until(cue: Cue, following: int | None) -> Cue:
    """Return the cue, extended to `MIN_CUE` if it is shorter, but not beyond the start of the `following` one."""
    readable = max(cue.end, cue.start + round(MIN_CUE * 1000))
    return Cue(cue.start, readable if following is None else min(readable, following), cue.text)


def _cue_words(words: Iterable[Word]) -> Iterator[list[Word]]:
    """Yield the words of a segment in groups that fit one cue and contain no pause."""
    cue: list[Word] = []
    for word in words:
        lines = _wrapped([each.text for each in (*cue, word)], LINE_CHARACTERS)
        fits = len(lines) <= CUE_LINES and word.end - (cue or [word])[0].start <= MAX_CUE
        if cue and not (fits and word.start - cue[-1].end < CUE_PAUSE):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def _lines(words: list[str]) -> str:
    """Wrap words to the minimum number of lines, of similar length."""
    lines = _wrapped(words, LINE_CHARACTERS)
    widths = range(max(map(len, words)), LINE_CHARACTERS + 1)
    # The narrowest width with the same number of lines balances them.
    balanced = next((found for width in widths if len(found := _wrapped(words, width)) <= len(lines)), lines)
    return "\n".join(balanced)


def _wrapped(words: list[str], width: int) -> list[str]:
    # A word longer than a line stays whole.
    return textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False)


def srt_time(milliseconds: int) -> str:
    """Return a time as hh:mm:ss,mmm for SubRip."""
    return vtt_time(milliseconds).replace(".", ",")


def vtt_time(milliseconds: int) -> str:
    """Return a time as hh:mm:ss.mmm for WebVTT; from 100 hours on, hours have more than two digits."""
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}.{rest:03d}"
