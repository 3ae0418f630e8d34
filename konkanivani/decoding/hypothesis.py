"""Hypotheses of a search, and an order of them that does not depend on the batch.

B batch, N candidates.
"""

import math
from dataclasses import dataclass

import torch

# Log probabilities that differ by less than a step are a tie. Kernels round the same sum differently at other positions
# of a batch; without steps, the last bit would decide ties, and results could differ from decoding one by one.
STEPS_IN_A_NAT = 2**26
# Beyond this number of steps (16,384 nats) below the best all are equal, so that rank and index fit into an int64.
MAX_DISTANCE = 2**40


@dataclass(frozen=True)
class Hypothesis:
    """Token sequence and its log probability in nats, a lower bound if some of its alignments left the beam."""

    tokens: tuple[int, ...]
    log_probability: float


def first_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return indices (B, count) of the highest scores (B, N), highest first; ties in order of index."""
    highest = scores.amax(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    ranks = ((scores - highest) * STEPS_IN_A_NAT).round().clamp(min=-MAX_DISTANCE)
    ranks = ranks.masked_fill(scores == -math.inf, -MAX_DISTANCE - 1).long()
    # All keys differ, so the result does not depend on how a device's topk breaks ties.
    keys = ranks * scores.shape[1] - torch.arange(scores.shape[1], device=scores.device)
    return keys.topk(count, dim=1).indices


def sort_hypotheses(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sort by log probability, highest first; ties by token ids, ascending."""
    highest = max((hypothesis.log_probability for hypothesis in hypotheses), default=0.0)

    def rank(hypothesis: Hypothesis) -> tuple[int, tuple[int, ...]]:
        return round((highest - hypothesis.log_probability) * STEPS_IN_A_NAT), hypothesis.tokens

    return sorted(hypotheses, key=rank)
