"""When each token and word of a hypothesis was spoken, by its likeliest CTC alignment, whichever decoder found it.

Graves et al. (2006), Connectionist Temporal Classification; Kürzinger et al. (2020), CTC-Segmentation of Large Corpora
for German End-to-end Speech Recognition.

T' encoder frames, V vocabulary, U tokens.
"""

from dataclasses import dataclass

import torch
import torchaudio

from konkanivani.ctc_operator import BLANK
from konkanivani.lengths import ctc_frames_needed, encoder_frame_seconds
from konkanivani.text import Tokenizer
from konkanivani.transcript import Word

# Seconds by which the middle of the frame that says a word's first letter lies after the word's beginning, and by which
# a word goes on after its last letter was said. Medians over the built-in validation set (docs/transcribing.md).
FIRST_LETTER_LAG, AFTER_LAST_LETTER = 0.14, 0.06


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
        share = frames / len(tokens)
        return [AlignedToken(token, place * share, (place + 1) * share, None) for place, token in enumerate(tokens)]
    targets = torch.tensor([tokens], device=log_probabilities.device)
    paths, scores = torchaudio.functional.forced_align(log_probabilities[None].float(), targets, blank=BLANK)
    spans = torchaudio.functional.merge_tokens(paths[0], scores[0].exp(), blank=BLANK)
    return [AlignedToken(span.token, span.start, span.end, span.score) for span in spans]


def timed_words(aligned: list[AlignedToken], tokenizer: Tokenizer, seconds: float) -> list[Word]:
    """The words of the aligned tokens, their times within the `seconds` of the waveform that they were heard in.

    CTC says a token late, in a frame or two, and not for as long as it sounds. So a word begins a fixed time before its
    first letter is said, and ends where the next one begins, or a fixed time after its last letter where there is a
    pause.
    """
    words = _grouped(aligned, tokenizer)
    starts = [encoder_frame_seconds(word.letters[0].first) - FIRST_LETTER_LAG for word in words]
    ends = [encoder_frame_seconds(word.letters[-1].end - 1) + AFTER_LAST_LETTER for word in words]
    timed, earliest = [], 0.0
    for place, word in enumerate(words):
        start = min(max(starts[place], earliest), seconds)
        end = min(ends[place], starts[place + 1] if place + 1 < len(words) else seconds)
        earliest = min(max(end, start), seconds)
        timed.append(Word(word.text, start, earliest, word.confidence))
    return timed


@dataclass(frozen=True)
class _TokensOfWord:
    text: str
    tokens: tuple[AlignedToken, ...]
    letters: tuple[AlignedToken, ...]  # without a word-boundary mark that stands alone

    @property
    def confidence(self) -> float | None:
        """The mean probability of its tokens."""
        probabilities = [token.probability for token in self.tokens]
        return None if None in probabilities else sum(probabilities) / len(probabilities)


def _grouped(aligned: list[AlignedToken], tokenizer: Tokenizer) -> list[_TokensOfWord]:
    """The tokens word by word, as `Tokenizer.decode` would put spaces between them; special tokens are left out."""
    groups: list[list[AlignedToken]] = []
    for token in aligned:
        if token.token <= tokenizer.end:
            continue
        if tokenizer.begins_word(token.token) or not groups:
            groups.append([])
        groups[-1].append(token)
    words = []
    for tokens in groups:
        letters = tuple(token for token in tokens if tokenizer.decode([token.token]))
        if letters:
            text = tokenizer.decode([token.token for token in tokens])
            words.append(_TokensOfWord(text, tuple(tokens), letters))
    return words
