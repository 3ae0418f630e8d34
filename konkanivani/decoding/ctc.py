"""CTC decoding along the best path, and the frames that every CTC decoder reads.

B batch, T' encoder frames, V vocabulary.
"""

import math

import torch

from konkanivani.base.lengths import CHUNK_FRAMES, Lengths, padding_mask
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.model.kernels.ctc import BLANK


@torch.no_grad()
def greedy_ctc(model: KonkaniVaniASR, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """The tokens of the best path through each of encoded (B, T', D)."""
    return collapse_repeats(argmax_tokens(model, encoded), encoded_lengths)


def argmax_tokens(model: KonkaniVaniASR, encoded: torch.Tensor) -> torch.Tensor:
    """(B, T'): each frame's likeliest token; logits exist for a chunk of frames at a time."""
    return torch.cat([model.ctc_head(chunk).argmax(dim=-1) for chunk in encoded.split(CHUNK_FRAMES, dim=1)], dim=1)


def blank_frames(paths: torch.Tensor, encoded_lengths: Lengths) -> torch.Tensor:
    """How many of the valid frames of paths (B, T') are blanks: 0-dim, on their device."""
    return sum(((row[:length] == BLANK).sum() for row, length in zip(paths, encoded_lengths, strict=True)))


def collapse_repeats(paths: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """Token ids a frame (B, T') as transcripts: the valid frames', repeats merged, blanks gone."""
    hypotheses = []
    for row, length in zip(paths.cpu(), encoded_lengths, strict=True):
        merged = torch.unique_consecutive(row[:length])
        hypotheses.append(merged[merged != BLANK].tolist())
    return hypotheses


def mask_padding_as_blank(log_probabilities: torch.Tensor, encoded_lengths: Lengths) -> torch.Tensor:
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
