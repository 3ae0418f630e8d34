"""CTC decoding.

B batch, T' encoder frames, V vocabulary.
"""

import torch

from konkanivani.lengths import Lengths


def greedy_ctc(logits: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """The best path of logits (B, T', V): each valid frame's likeliest token, repeats merged, blanks (0) gone."""
    best = logits.argmax(dim=-1).cpu()
    hypotheses = []
    for row, length in zip(best, encoded_lengths, strict=True):
        merged = torch.unique_consecutive(row[:length])
        hypotheses.append(merged[merged != 0].tolist())
    return hypotheses
