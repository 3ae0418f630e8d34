"""When each token of a hypothesis was spoken: its likeliest CTC alignment, also of what another decoder has found.

Graves et al. (2006), Connectionist Temporal Classification; Kürzinger et al. (2020), CTC-Segmentation of Large Corpora
for German End-to-end Speech Recognition.

T' encoder frames, V vocabulary, U tokens.
"""

from dataclasses import dataclass

import torch
import torchaudio

from konkanivani.ctc_operator import BLANK
from konkanivani.lengths import ctc_frames_needed


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
