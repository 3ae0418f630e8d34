"""When each token and word of a hypothesis was spoken, by its likeliest CTC alignment, whichever decoder found it.

Graves et al. (2006), Connectionist Temporal Classification; Kürzinger et al. (2020), CTC-Segmentation of Large Corpora
for German End-to-end Speech Recognition.

T' encoder frames, V vocabulary, U tokens.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torchaudio

from konkanivani.base.lengths import SAMPLE_RATE, Framing, ctc_frames_needed
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.inference.segmentation import Piece
from konkanivani.inference.transcript import Word
from konkanivani.inference.whisper.alignment import attention_spans
from konkanivani.inference.whisper.segments import timed_segments
from konkanivani.inference.whisper.vocabulary import PromptedVocabulary
from konkanivani.model.kernels.ctc import BLANK
from konkanivani.model.whisper.network import Decoder

# Seconds by which the middle of the frame that says a word's first letter lies after the word's beginning, and by which
# a word goes on after its last letter was said: those of a model of which nothing is known yet.
FIRST_LETTER_DELAY, AFTER_LAST_LETTER = 0.1, 0.06
MAX_DELAY = 0.5  # seconds; beyond, what begins or ends there is no speech
DELAYS_KEPT = 100  # pieces, the latest ones


@dataclass(frozen=True)
class AlignedToken:
    """A token's frames `first` to `end - 1` and their mean probability; None where CTC cannot have said the token."""

    token: int
    first: float
    end: float
    probability: float | None


def align_tokens(log_probabilities: torch.Tensor, tokens: list[int]) -> list[AlignedToken]:
    """Where in log probabilities (T', V) the tokens (U) were spoken, in order, none of them blank.

    A hypothesis of the attention decoder may have more tokens than CTC can say in so few frames: then they are spread
    evenly, without a probability.
    """
    frames = len(log_probabilities)
    if not tokens:
        return []
    if ctc_frames_needed(tokens) > frames:
        return spread_tokens(frames, tokens)
    targets = torch.tensor([tokens], device=log_probabilities.device)
    paths, scores = torchaudio.functional.forced_align(log_probabilities[None].float(), targets, blank=BLANK)
    spans = torchaudio.functional.merge_tokens(paths[0], scores[0].exp(), blank=BLANK)
    return [AlignedToken(span.token, span.start, span.end, span.score) for span in spans]


def spread_tokens(length: float, tokens: Sequence[int]) -> list[AlignedToken]:
    """The tokens (U), evenly over so many frames or seconds, without a probability."""
    each = length / max(1, len(tokens))
    return [AlignedToken(token, place * each, (place + 1) * each, None) for place, token in enumerate(tokens)]


@dataclass(frozen=True)
class SpokenTokens:
    """A word by its tokens; its `letters` are these without a word-boundary mark that stands alone."""

    text: str
    tokens: tuple[AlignedToken, ...]
    letters: tuple[AlignedToken, ...]
    framing: Framing

    @property
    def first_letter(self) -> float:
        """Where its first letter is said, in seconds."""
        return self.framing.encoder_frame_seconds(self.letters[0].first)

    @property
    def last_letter(self) -> float:
        """Where its last letter is said, in seconds."""
        return self.framing.encoder_frame_seconds(self.letters[-1].end - 1)

    @property
    def confidence(self) -> float | None:
        """The mean probability of its tokens."""
        probabilities = [token.probability for token in self.tokens]
        return None if None in probabilities else sum(probabilities) / len(probabilities)


def group_words(aligned: list[AlignedToken], tokenizer: Vocabulary, framing: Framing) -> list[SpokenTokens]:
    """The tokens word by word, as `Vocabulary.decode` would put spaces between them; special tokens are left out."""
    groups: list[list[AlignedToken]] = []
    for token in aligned:
        if token.token in tokenizer.special:
            continue
        if tokenizer.begins_word(token.token) or not groups:
            groups.append([])
        groups[-1].append(token)
    words = []
    for tokens in groups:
        letters = tuple(token for token in tokens if tokenizer.decode([token.token]))
        if letters:
            text = tokenizer.decode([token.token for token in tokens])
            words.append(SpokenTokens(text, tuple(tokens), letters, framing))
    return words


class EmissionDelay:
    """How late a model says words, learnt from the pauses of a recording as it goes by.

    CTC says a token late, in a frame or two, and not for as long as it sounds; how late, each training settles anew and
    nothing in the loss asks for. But the first word after a pause begins where the sound does, and the last one before
    a pause ends with it. The medians over the latest pieces are taken for all words.
    """

    def __init__(self) -> None:
        self._first: deque[float] = deque(maxlen=DELAYS_KEPT)
        self._last: deque[float] = deque(maxlen=DELAYS_KEPT)

    def learn(self, words: list[SpokenTokens], piece: Piece) -> None:
        """Takes in a piece's words, and where its speech begins and ends; words spread evenly tell nothing."""
        if not words or words[0].confidence is None:
            return
        if piece.speech_start is not None:
            _add(self._first, piece.start + words[0].first_letter - piece.speech_start)
        if piece.speech_end is not None:
            _add(self._last, piece.speech_end - piece.start - words[-1].last_letter)

    @property
    def first_letter(self) -> float:
        """Seconds from where a word begins to where its first letter is said."""
        return statistics.median(self._first) if self._first else FIRST_LETTER_DELAY

    @property
    def after_last_letter(self) -> float:
        """Seconds from where a word's last letter is said to where the word ends, if no other one begins before."""
        return statistics.median(self._last) if self._last else AFTER_LAST_LETTER


def _add(delays: deque[float], delay: float) -> None:
    if 0 <= delay <= MAX_DELAY:
        delays.append(delay)


def timed_words(words: list[SpokenTokens], delays: EmissionDelay, seconds: float) -> list[Word]:
    """The words with their times within the `seconds` of their waveform.

    A word begins a delay before its first letter is said, and ends where the next one begins, or a delay after its last
    letter where there is a pause.
    """
    starts = [word.first_letter - delays.first_letter for word in words]
    ends = [word.last_letter + delays.after_last_letter for word in words]
    timed, earliest = [], 0.0
    for place, word in enumerate(words):
        start = min(max(starts[place], earliest), seconds)
        end = min(ends[place], starts[place + 1] if place + 1 < len(words) else seconds)
        earliest = min(max(end, start), seconds)
        timed.append(Word(word.text, start, earliest, word.confidence))
    return timed


def attended_words(
    decoder: Decoder, encoded: torch.Tensor, tokens: list[int], vocabulary: PromptedVocabulary, framing: Framing
) -> list[Word]:
    """The words of a hypothesis (U) by where the decoder's attention is as it says them, in encoded (T', D) of speech.

    Where it has times of its own, no word leaves the stretch that they give it.
    """
    each = framing.encoder_hop / SAMPLE_RATE
    segments = timed_segments(tokens, vocabulary, len(encoded) * each)
    said = [token for segment in segments for token in segment.tokens]
    spans = iter(attention_spans(decoder, encoded, said, vocabulary) if said else ())
    timed = []
    for segment in segments:
        aligned = [AlignedToken(token, *span) for token, span in zip(segment.tokens, spans, strict=False)]
        for word in group_words(aligned, vocabulary, framing):
            ends = (word.tokens[0].first * each, word.tokens[-1].end * each)
            first, end = (min(max(time, segment.begin), segment.end) for time in ends)
            timed.append(Word(word.text, first, end, word.confidence))
    return timed


def spread_words(tokens: list[int], tokenizer: Vocabulary, framing: Framing, seconds: float) -> list[Word]:
    """The words of a hypothesis (U) of which nothing says when they were said, evenly over so many seconds."""
    words = group_words(spread_tokens(seconds, tokens), tokenizer, framing)
    return [Word(word.text, word.tokens[0].first, word.tokens[-1].end, None) for word in words]
