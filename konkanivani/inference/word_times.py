"""Word times of a hypothesis from its best CTC alignment or from cross-attention, for any decoder.

Graves et al. (2006), Connectionist Temporal Classification; Kürzinger et al. (2020), CTC-Segmentation of Large Corpora
for German End-to-end Speech Recognition.

T' encoder frames, D model dimension, V vocabulary, U tokens.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torchaudio

from konkanivani.data.text import Vocabulary
from konkanivani.inference.segmentation import Piece
from konkanivani.inference.subtitles import Word
from konkanivani.lengths import SAMPLE_RATE, FrameLengths, ctc_frames_needed
from konkanivani.models.losses import BLANK
from konkanivani.models.whisper.alignment import attention_spans
from konkanivani.models.whisper.model import Decoder
from konkanivani.models.whisper.vocabulary import PromptedVocabulary, timed_segments

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
    each = length / max(1, len(tokens))
    return [AlignedToken(token, place * each, (place + 1) * each, None) for place, token in enumerate(tokens)]


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
    for place, word in enumerate(words):
        # Keep words in order: subtracting the delay may move a start before the previous end.
        start = min(max(starts[place], earliest), seconds)
        end = min(ends[place], starts[place + 1] if place + 1 < len(words) else seconds)
        earliest = min(max(end, start), seconds)
        timed.append(Word(word.text, start, earliest, word.confidence))
    return timed


def attended_words(
    decoder: Decoder, encoded: torch.Tensor, tokens: list[int], vocabulary: PromptedVocabulary, framing: FrameLengths
) -> list[Word]:
    """Return the words of a hypothesis (U) with times from cross-attention to encoded speech (T', D).

    If the hypothesis contains timestamps, words stay within their segment.
    """
    each = framing.encoder_hop / SAMPLE_RATE  # seconds per encoder frame
    segments = timed_segments(tokens, vocabulary, len(encoded) * each)
    # The decoder is run without timestamps, since its alignment heads follow text tokens.
    said = [token for segment in segments for token in segment.tokens]
    # One pass aligns all segments; each consumes its share of the iterator.
    spans = iter(attention_spans(decoder, encoded, said, vocabulary) if said else ())
    timed = []
    for segment in segments:
        aligned = [AlignedToken(token, *span) for token, span in zip(segment.tokens, spans, strict=False)]
        for word in group_words(aligned, vocabulary, framing):
            ends = (word.tokens[0].first * each, word.tokens[-1].end * each)
            # Attention may leave the segment at its first or last token.
            first, end = (min(max(time, segment.begin), segment.end) for time in ends)
            timed.append(Word(word.text, first, end, word.confidence))
    return timed


def spread_words(tokens: list[int], tokenizer: Vocabulary, framing: FrameLengths, seconds: float) -> list[Word]:
    """Return the words of a hypothesis (U), spread evenly over `seconds` for lack of an alignment."""
    words = group_words(spread_tokens(seconds, tokens), tokenizer, framing)
    return [Word(word.text, word.tokens[0].first, word.tokens[-1].end, None) for word in words]
