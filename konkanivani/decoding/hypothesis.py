"""What a search finds, and the order of what it finds: the same alone and in any batch.

B batch, N what there is to choose from.
"""

import math
from dataclasses import dataclass

import torch

# Log probabilities that differ by less than a step are a tie. Kernels round the same sum differently at other places
# of a batch; without steps such a last bit would decide between equals, and a batch could differ from one by one.
STEPS_IN_A_NAT = 2**26
# Beyond so many steps (16,384 nats) below the best no difference is made, so that a rank and a place fit an int64.
MAX_DISTANCE = 2**40


@dataclass(frozen=True)
class Hypothesis:
    """A token sequence and its log probability in nats; a lower bound where alignments of it left the beam."""

    tokens: tuple[int, ...]
    log_probability: float


def first_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices (B, count) of the highest scores (B, N), highest first, and of equals the first."""
    highest = scores.amax(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    ranks = ((scores - highest) * STEPS_IN_A_NAT).round().clamp(min=-MAX_DISTANCE)
    ranks = ranks.masked_fill(scores == -math.inf, -MAX_DISTANCE - 1).long()
    # Every key is another, so that it does not matter which of equals a device's topk takes.
    keys = ranks * scores.shape[1] - torch.arange(scores.shape[1], device=scores.device)
    return keys.topk(count, dim=1).indices


def sort_hypotheses(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Likeliest first; of equals, the smaller token ids first."""
    highest = max((hypothesis.log_probability for hypothesis in hypotheses), default=0.0)

    def rank(hypothesis: Hypothesis) -> tuple[int, tuple[int, ...]]:
        return round((highest - hypothesis.log_probability) * STEPS_IN_A_NAT), hypothesis.tokens

    return sorted(hypotheses, key=rank)
