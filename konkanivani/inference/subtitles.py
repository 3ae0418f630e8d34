"""Transcripts as plain text, JSON and subtitles, written segment by segment as they come.

SubRip has no standard; WebVTT is the W3C's (w3.org/TR/webvtt1). Subtitles keep to what is readable: two lines of 42
characters, seven seconds (the limits of Netflix's Timed Text Style Guides).
"""

import html
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from konkanivani.inference.transcript import Segment, Transcript, Word

LINE_CHARACTERS, CUE_LINES = 42, 2
MAX_CUE, MIN_CUE = 7.0, 1.0  # seconds; a shorter one stays on the screen until the next one comes
CUE_PAUSE = 0.7  # seconds without a word, after which another cue begins

TextFormat = Literal["txt", "json", "srt", "vtt"]
Timestamps = Literal["segment", "word"]


def render(segments: Iterable[Segment], text_format: TextFormat, timestamps: Timestamps, name: str) -> Iterator[str]:
    """The segments of the recording `name` in a text format, piece by piece, each as soon as it is known.

    With timestamps "word" plain text has a line for each word (start and end in seconds, the word), subtitles have a
    cue for each, and JSON lists the words.
    """
    if text_format == "json":
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
            # In a cue's text < and & begin something else, and an arrow would be a timing.
            text = html.escape(cue.text, quote=False)
            yield f"{vtt_time(cue.start)} --> {vtt_time(cue.end)}\n{text}\n\n"


def json_text(transcript: Transcript, timestamps: Timestamps, name: str) -> str:
    """The transcript as one line of JSON; times in seconds."""
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
    """What stands on the screen from `start` to `end`, in milliseconds; `text` has line ends."""

    start: int
    end: int
    text: str


def build_cues(segments: Iterable[Segment], timestamps: Timestamps) -> Iterator[Cue]:
    """The cues of the segments, each at least a millisecond long, none over the next one."""
    held: Cue | None = None
    for segment in segments:
        for words in [[word] for word in segment.words] if timestamps == "word" else _cue_words(segment.words):
            start = round(words[0].start * 1000)
            if held is not None:
                start = max(start, held.start + 1)
                yield _shown_until(held, start)
            end = max(round(words[-1].end * 1000), start + 1)
            held = Cue(start, end, _lines([word.text for word in words]))
    if held is not None:
        yield _shown_until(held, None)


def _shown_until(cue: Cue, following: int | None) -> Cue:
    """The cue, shown for as long as its words or long enough to be read, but no longer than to the `following` one."""
    readable = max(cue.end, cue.start + round(MIN_CUE * 1000))
    return Cue(cue.start, readable if following is None else min(readable, following), cue.text)


def _cue_words(words: Iterable[Word]) -> Iterator[list[Word]]:
    """The words of a segment, cue by cue: as many as fit, none of them after a pause."""
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
    """The words on as few lines as will do, and those of about the same length."""
    lines = _wrapped(words, LINE_CHARACTERS)
    widths = range(max(map(len, words)), LINE_CHARACTERS + 1)
    balanced = next((found for width in widths if len(found := _wrapped(words, width)) <= len(lines)), lines)
    return "\n".join(balanced)


def _wrapped(words: list[str], width: int) -> list[str]:
    return textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False)


def srt_time(milliseconds: int) -> str:
    """hh:mm:ss,mmm as SubRip has it."""
    return vtt_time(milliseconds).replace(".", ",")


def vtt_time(milliseconds: int) -> str:
    """hh:mm:ss.mmm as WebVTT has it; more than two digits from 100 hours on."""
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}.{rest:03d}"
