"""Transcripts with the times of their words, and formats of them: text, SRT, VTT and JSON.

L blocks, H heads, U tokens, T' encoder frames, D model dimension, V vocabulary.
"""

import html
import json
import statistics
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torchaudio

from konkanivani.data.text import Vocabulary
from konkanivani.inference.segmentation import Piece
from konkanivani.lengths import SAMPLE_RATE, FrameLengths, ctc_frames_needed
from konkanivani.models.asr import BLANK
from konkanivani.models.whisper.model import Decoder
from konkanivani.models.whisper.vocabulary import PromptedVocabulary, timed_segments

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
    raw_text: str | None = None
    """Text before a correction; None if there was none."""

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
#
# SubRip has no standard; WebVTT is specified by the W3C (w3.org/TR/webvtt1). Cues have at most two lines of 42
# characters and last at most seven seconds (limits of Netflix's Timed Text Style Guides).


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
        if segment.raw_text is not None:
            segments[-1]["raw_text"] = segment.raw_text
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
    previous: Cue | None = None
    for segment in segments:
        for words in [[word] for word in segment.words] if timestamps == "word" else _cue_words(segment.words):
            start = round(words[0].start * 1000)
            if previous is not None:
                # Rounding may give equal starts: move the later cue, so that every cue lasts at least 1 ms.
                start = max(start, previous.start + 1)
                yield _extend_cue(previous, start)
            end = max(round(words[-1].end * 1000), start + 1)
            previous = Cue(start, end, _balance_lines([word.text for word in words]))
    if previous is not None:
        yield _extend_cue(previous, None)


def _extend_cue(cue: Cue, following: int | None) -> Cue:
    """Return the cue, extended to `MIN_CUE` if it is shorter, but not beyond the start of the `following` one."""
    readable = max(cue.end, cue.start + round(MIN_CUE * 1000))
    return Cue(cue.start, readable if following is None else min(readable, following), cue.text)


def _cue_words(words: Iterable[Word]) -> Iterator[list[Word]]:
    """Yield the words of a segment in groups that fit one cue and contain no pause."""
    cue: list[Word] = []
    for word in words:
        lines = _wrap([cue_word.text for cue_word in (*cue, word)], LINE_CHARACTERS)
        fits = len(lines) <= CUE_LINES and word.end - (cue or [word])[0].start <= MAX_CUE
        if cue and not (fits and word.start - cue[-1].end < CUE_PAUSE):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def _balance_lines(words: list[str]) -> str:
    """Wrap words to the minimum number of lines, of similar length."""
    lines = _wrap(words, LINE_CHARACTERS)
    widths = range(max(map(len, words)), LINE_CHARACTERS + 1)
    # The narrowest width with the same number of lines balances them.
    balanced = next((wrapped for width in widths if len(wrapped := _wrap(words, width)) <= len(lines)), lines)
    return "\n".join(balanced)


def _wrap(words: list[str], width: int) -> list[str]:
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


# --------------------
# Token times from the decoder's cross-attention.
#
# As in OpenAI's whisper (timing.py, 2023): the attention weights of some heads are standardised over the tokens,
# smoothed with a median filter over frames and averaged; dynamic time warping then finds a monotonic path through them.


MEDIAN_FRAMES = 7
DIAGONAL, DOWN, RIGHT = range(3)  # steps of the path into a cell


@torch.no_grad()
def attention_spans(
    decoder: Decoder, encoded: torch.Tensor, tokens: list[int], vocabulary: PromptedVocabulary
) -> list[tuple[int, int, float]]:
    """Return for each token (U) its first frame, the frame after its last, and its probability.

    Args:
        encoded: encoded speech (T', D) without frames of padding.
        tokens: text tokens without timestamps.
    """
    prefix = [vocabulary.special.start, *vocabulary.prefix]
    ids = torch.tensor([[*prefix, *tokens, vocabulary.special.end]], device=encoded.device)
    decoded, scores = decoder.with_scores(ids[:, :-1], encoded[None])
    likely = decoder.output(decoded[0, len(prefix) - 1 : -1]).float().softmax(dim=-1)
    probabilities = likely.gather(1, ids[0, len(prefix) : -1, None])[:, 0].tolist()
    # The row of a token predicts the next one, so the last row of the prefix attends to the first token.
    weights = alignment_weights(scores[:, 0].float().softmax(dim=-1), vocabulary.alignment_heads)[len(prefix) - 1 :]
    first = [*first_frames(-weights.double().cpu().numpy()), len(encoded)]
    spans = zip(first, first[1:], strict=False)
    return [(begin, end, probability) for (begin, end), probability in zip(spans, probabilities, strict=False)]


def alignment_weights(weights: torch.Tensor, heads: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Return the standardised and averaged attention weights (U, T') of the alignment heads.

    Args:
        weights: attention weights (L, H, U, T') of all blocks and heads.
        heads: pairs (block, head). If empty, all heads of the upper half of the blocks are used, as in OpenAI's code.
    """
    blocks, count = weights.shape[:2]
    if not heads:
        heads = tuple((block, head) for block in range(blocks // 2, blocks) for head in range(count))
    chosen = torch.stack([weights[block, head] for block, head in heads])
    # Over tokens: a frame to which all tokens attend gets no weight.
    deviation, mean = torch.std_mean(chosen, dim=-2, keepdim=True, unbiased=False)
    # A constant column has deviation 0; the clamp avoids 0 / 0.
    return _median_filter((chosen - mean) / deviation.clamp_min(torch.finfo(chosen.dtype).tiny)).mean(dim=0)


def _median_filter(weights: torch.Tensor) -> torch.Tensor:
    """Return the running median over frames (..., T'); inputs of up to 3 frames are returned unchanged."""
    half_width = MEDIAN_FRAMES // 2
    if weights.shape[-1] <= half_width:
        return weights
    # Reflection needs more frames than it pads.
    mirrored = torch.nn.functional.pad(weights, (half_width, half_width), mode="reflect")
    return mirrored.unfold(-1, MEDIAN_FRAMES, 1).median(dim=-1).values


def first_frames(costs: np.ndarray) -> list[int]:
    """Return the first column of each row on the cheapest monotonic path through costs (U, T').

    The path leads from corner to corner.
    """
    rows, columns = costs.shape
    totals = np.full((rows + 1, columns + 1), np.inf)
    totals[0, 0], directions = 0.0, np.full((rows + 1, columns + 1), RIGHT)
    # One anti-diagonal at a time, vectorised: its cells depend on the two previous anti-diagonals only.
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        before = np.stack([totals[row - 1, column - 1], totals[row - 1, column], totals[row, column - 1]])
        # Ties go to RIGHT, as in OpenAI's code.
        is_diagonal = (before[DIAGONAL] < before[DOWN]) & (before[DIAGONAL] < before[RIGHT])
        is_down = (before[DOWN] < before[DIAGONAL]) & (before[DOWN] < before[RIGHT])
        directions[row, column] = direction = np.select([is_diagonal, is_down], [DIAGONAL, DOWN], RIGHT)
        totals[row, column] = costs[row - 1, column - 1] + np.take_along_axis(before, direction[None], 0)[0]
    first = [0] * rows
    row = rows
    column = columns
    while row > 0:
        # Overwritten until the path leaves the row, so the first column remains.
        first[row - 1] = max(0, int(column) - 1)
        # In column 0 only steps down remain.
        step = int(directions[row, column]) if column else DOWN
        row = row - (step != RIGHT)
        column = column - (step != DOWN)
    return first


# --------------------
# Word times of a hypothesis from its best CTC alignment or from cross-attention, for any decoder.
#
# Graves et al. (2006), Connectionist Temporal Classification; Kürzinger et al. (2020), CTC-Segmentation of Large
# Corpora for German End-to-end Speech Recognition.


# Seconds, used until delays have been measured: from the start of a word to the middle of the frame that emits its
# first letter, and from the emission of its last letter to its end.
FIRST_LETTER_DELAY = 0.1
AFTER_LAST_LETTER = 0.06
MAX_DELAY = 0.5  # seconds; a longer delay means that the sound at the pause is not speech
DELAYS_KEPT = 100  # latest pieces


@dataclass(frozen=True)
class AlignedToken:
    """Token with its frames `first` to `end - 1` and their mean probability, None if CTC cannot align the token."""

    token: int
    first: float
    end: float
    probability: float | None


def align_tokens(log_probabilities: torch.Tensor, tokens: list[int]) -> list[AlignedToken]:
    """Return the best alignment of tokens (U), without blanks, to CTC log probabilities (T', V).

    An attention decoder may return more tokens than CTC can emit in T' frames. They are then spread evenly, without a
    probability.
    """
    frames = len(log_probabilities)
    if not tokens:
        return []
    # CTC needs a blank between equal neighbours, so the minimum can exceed U.
    if ctc_frames_needed(tokens) > frames:
        return spread_tokens(frames, tokens)
    targets = torch.tensor([tokens], device=log_probabilities.device)
    # fp32, since `forced_align` adds log probabilities over all frames.
    paths, scores = torchaudio.functional.forced_align(log_probabilities[None].float(), targets, blank=BLANK)
    spans = torchaudio.functional.merge_tokens(paths[0], scores[0].exp(), blank=BLANK)
    return [AlignedToken(span.token, span.start, span.end, span.score) for span in spans]


def spread_tokens(length: float, tokens: Sequence[int]) -> list[AlignedToken]:
    """Return tokens (U) spread evenly over `length` frames or seconds, without a probability."""
    token_seconds = length / max(1, len(tokens))
    return [
        AlignedToken(token, index * token_seconds, (index + 1) * token_seconds, None)
        for index, token in enumerate(tokens)
    ]


@dataclass(frozen=True)
class SpokenTokens:
    """Word with its tokens; `letters` excludes a word-boundary token without text."""

    text: str
    tokens: tuple[AlignedToken, ...]
    letters: tuple[AlignedToken, ...]
    framing: FrameLengths

    @property
    def first_letter(self) -> float:
        """Time of the emission of the first letter, in seconds."""
        return self.framing.encoder_frame_seconds(self.letters[0].first)

    @property
    def last_letter(self) -> float:
        """Time of the emission of the last letter, in seconds."""
        return self.framing.encoder_frame_seconds(self.letters[-1].end - 1)

    @property
    def confidence(self) -> float | None:
        """Mean probability of the tokens, or None if they were not aligned."""
        probabilities = [token.probability for token in self.tokens if token.probability is not None]
        if len(probabilities) < len(self.tokens):
            return None
        return sum(probabilities) / len(probabilities)


def group_words(aligned: list[AlignedToken], tokenizer: Vocabulary, framing: FrameLengths) -> list[SpokenTokens]:
    """Group tokens into words at the spaces of `Vocabulary.decode`; special tokens are dropped."""
    groups: list[list[AlignedToken]] = []
    for token in aligned:
        if token.token in tokenizer.special:
            continue
        if tokenizer.begins_word(token.token) or not groups:
            groups.append([])
        groups[-1].append(token)
    words = []
    for tokens in groups:
        # A lone word-boundary token may be aligned far from its word.
        letters = tuple(token for token in tokens if tokenizer.decode([token.token]))
        if letters:
            text = tokenizer.decode([token.token for token in tokens])
            words.append(SpokenTokens(text, tuple(tokens), letters, framing))
    return words


class EmissionDelay:
    """Running estimate of the delay between speech and its CTC emission, from the pauses of a recording.

    The first word after a pause starts with the sound, and the last word before a pause ends with it. The medians of
    their delays over the latest pieces are applied to all words.
    """

    def __init__(self) -> None:
        # CTC emits a token late and in one or two frames, not for the token's duration. The loss does not constrain the
        # delay, so it differs from one training run to the next.
        self._first: deque[float] = deque(maxlen=DELAYS_KEPT)
        self._last: deque[float] = deque(maxlen=DELAYS_KEPT)

    def learn(self, words: list[SpokenTokens], piece: Piece) -> None:
        """Add the delays at the start and the end of a piece; words that were spread evenly are ignored."""
        if not words or words[0].confidence is None:
            return
        if piece.speech_start is not None:
            _add(self._first, piece.start + words[0].first_letter - piece.speech_start)
        if piece.speech_end is not None:
            _add(self._last, piece.speech_end - piece.start - words[-1].last_letter)

    @property
    def first_letter(self) -> float:
        """Seconds from the start of a word to the emission of its first letter."""
        return statistics.median(self._first) if self._first else FIRST_LETTER_DELAY

    @property
    def after_last_letter(self) -> float:
        """Seconds from the emission of a word's last letter to the word's end, if no other word starts before."""
        return statistics.median(self._last) if self._last else AFTER_LAST_LETTER


def _add(delays: deque[float], delay: float) -> None:
    if 0 <= delay <= MAX_DELAY:
        delays.append(delay)


def timed_words(words: list[SpokenTokens], delays: EmissionDelay, seconds: float) -> list[Word]:
    """Return the words with their times within a waveform of `seconds`.

    A word starts one delay before the emission of its first letter. It ends at the start of the next word or, before a
    pause, one delay after the emission of its last letter.
    """
    starts = [word.first_letter - delays.first_letter for word in words]
    ends = [word.last_letter + delays.after_last_letter for word in words]
    timed = []
    earliest = 0.0
    for index, word in enumerate(words):
        # Keep words in order: subtracting the delay may move a start before the previous end.
        start = min(max(starts[index], earliest), seconds)
        end = min(ends[index], starts[index + 1] if index + 1 < len(words) else seconds)
        earliest = min(max(end, start), seconds)
        timed.append(Word(word.text, start, earliest, word.confidence))
    return timed


def attended_words(
    decoder: Decoder, encoded: torch.Tensor, tokens: list[int], vocabulary: PromptedVocabulary, framing: FrameLengths
) -> list[Word]:
    """Return the words of a hypothesis (U) with times from cross-attention to encoded speech (T', D).

    If the hypothesis contains timestamps, words stay within their segment.
    """
    frame_seconds = framing.encoder_hop / SAMPLE_RATE  # seconds per encoder frame
    segments = timed_segments(tokens, vocabulary, len(encoded) * frame_seconds)
    # The decoder is run without timestamps, since its alignment heads follow text tokens.
    text_tokens = [token for segment in segments for token in segment.tokens]
    # One pass aligns all segments; each consumes its share of the iterator.
    spans = iter(attention_spans(decoder, encoded, text_tokens, vocabulary) if text_tokens else ())
    timed = []
    for segment in segments:
        aligned = [AlignedToken(token, *span) for token, span in zip(segment.tokens, spans, strict=False)]
        for word in group_words(aligned, vocabulary, framing):
            ends = (word.tokens[0].first * frame_seconds, word.tokens[-1].end * frame_seconds)
            # Attention may leave the segment at its first or last token.
            first, end = (min(max(time, segment.begin), segment.end) for time in ends)
            timed.append(Word(word.text, first, end, word.confidence))
    return timed


def spread_words(tokens: list[int], tokenizer: Vocabulary, framing: FrameLengths, seconds: float) -> list[Word]:
    """Return the words of a hypothesis (U), spread evenly over `seconds` for lack of an alignment."""
    words = group_words(spread_tokens(seconds, tokens), tokenizer, framing)
    return [Word(word.text, word.tokens[0].first, word.tokens[-1].end, None) for word in words]
