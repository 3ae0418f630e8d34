"""Greedy CTC decoding (best path), and the masking of frames that all CTC decoders share.

B batch, T' encoder frames, V vocabulary.
"""

import math

import torch

from konkanivani.base.lengths import CHUNK_FRAMES, Lengths, padding_mask
from konkanivani.decoding.network import Network, ctc_head_of
from konkanivani.model.losses import BLANK


@torch.no_grad()
def greedy_ctc(model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """Return the tokens of the best path through each utterance of encoded (B, T', D)."""
    return collapse_repeats(argmax_tokens(model, encoded), encoded_lengths)


def argmax_tokens(model: Network, encoded: torch.Tensor) -> torch.Tensor:
    """Return each frame's likeliest token (B, T'); logits exist for one chunk of frames at a time."""
    ctc_head = ctc_head_of(model)
    # The argmax needs no softmax.
    return torch.cat([ctc_head(chunk).argmax(dim=-1) for chunk in encoded.split(CHUNK_FRAMES, dim=1)], dim=1)


def blank_frames(paths: torch.Tensor, encoded_lengths: Lengths) -> torch.Tensor:
    """Return the number of blanks among the valid frames of paths (B, T'), 0-dim on their device."""
    return sum(((row[:length] == BLANK).sum() for row, length in zip(paths, encoded_lengths, strict=True)))


def collapse_repeats(paths: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """Turn paths (B, T') into token sequences: valid frames only, repeats merged, then blanks removed."""
    hypotheses = []
    for row, length in zip(paths.cpu(), encoded_lengths, strict=True):  # one transfer for the whole batch
        # Merge first: only repeats without a blank between them are one token.
        merged = torch.unique_consecutive(row[:length])
        hypotheses.append(merged[merged != BLANK].tolist())
    return hypotheses


def mask_padding_as_blank(log_probabilities: torch.Tensor, encoded_lengths: Lengths) -> torch.Tensor:
    """Return log probabilities (B, T', V) cut to the longest utterance, in at least fp32, with blanks in the padding.

    A frame that is blank with probability 1 changes no hypothesis and no probability, so decoders need not handle
    lengths. The padding's former content, NaN included, is overwritten.
    """
    longest = max(encoded_lengths, default=0)
    if len(encoded_lengths) != len(log_probabilities) or longest > log_probabilities.shape[1]:
        raise ValueError(f"Lengths {encoded_lengths} of log probabilities {tuple(log_probabilities.shape)}.")
    dtype = torch.promote_types(log_probabilities.dtype, torch.float32)
    padding = padding_mask(encoded_lengths, longest, log_probabilities.device)
    frames = log_probabilities[:, :longest].to(dtype).masked_fill(padding[:, :, None], -math.inf)
    frames[:, :, BLANK].masked_fill_(padding, 0.0)
    return frames
