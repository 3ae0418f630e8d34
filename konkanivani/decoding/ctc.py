"""CTC decoding along the best path, and the frames that every CTC decoder reads.

B batch, T' encoder frames, V vocabulary.
"""

import math

import torch

from konkanivani.ctc_operator import BLANK
from konkanivani.lengths import Lengths, padding_mask


def greedy_ctc(logits: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """The best path of logits (B, T', V): each valid frame's likeliest token, repeats merged, blanks (0) gone."""
    best = logits.argmax(dim=-1).cpu()
    hypotheses = []
    for row, length in zip(best, encoded_lengths, strict=True):
        merged = torch.unique_consecutive(row[:length])
        hypotheses.append(merged[merged != 0].tolist())
    return hypotheses


def blank_beyond(log_probabilities: torch.Tensor, encoded_lengths: Lengths) -> torch.Tensor:
    """A copy (B, max(encoded_lengths), V), at least fp32, of log probabilities (B, T', V): certain blanks as padding.

    A certain blank changes no hypothesis and no probability, so a decoder needs no other thought for lengths. What
    stood in the padding, NaN included, is gone.
    """
    longest = max(encoded_lengths, default=0)
    if len(encoded_lengths) != len(log_probabilities) or longest > log_probabilities.shape[1]:
        raise ValueError(f"Lengths {encoded_lengths} of log probabilities {tuple(log_probabilities.shape)}.")
    dtype = torch.promote_types(log_probabilities.dtype, torch.float32)
    padding = padding_mask(encoded_lengths, longest, log_probabilities.device)
    frames = log_probabilities[:, :longest].to(dtype).masked_fill(padding[:, :, None], -math.inf)
    frames[:, :, BLANK].masked_fill_(padding, 0.0)
    return frames
