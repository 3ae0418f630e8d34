"""The CTC and the attention loss as sums, with the counts that a whole window divides them by.

Both take hidden states and the head that makes logits of them, since the logits of a long utterance are never there all
at once.

B batch, T' encoder frames, D model width, U tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import CHUNK_FRAMES, Lengths
from konkanivani.model.kernels.ctc import ctc_loss
from konkanivani.model.kernels.long_ctc import Head, long_ctc_losses
from konkanivani.model.kernels.recompute import recomputed

TARGET_PADDING = -1


@dataclass(frozen=True)
class LossCounts:
    """What the losses of one window are divided by: its tokens, and its utterances (one end token each)."""

    tokens: float
    utterances: float


@dataclass(frozen=True)
class LossSums:
    """Losses in nats, summed over a micro-batch's utterances and tokens: 0-dim tensors."""

    ctc: torch.Tensor
    attention: torch.Tensor


def joint_loss(sums: LossSums, counts: LossCounts, ctc_weight: float) -> torch.Tensor:
    """ctc_weight x CTC + (1 - ctc_weight) x attention loss, each a token, with end tokens (Watanabe et al., 2017)."""
    return ctc_weight * sums.ctc / counts.tokens + (1 - ctc_weight) * sums.attention / (
        counts.tokens + counts.utterances
    )


def ctc_loss_sum(
    encoded: torch.Tensor,
    head: Head,
    encoded_lengths: Lengths,
    tokens: torch.Tensor,
    token_lengths: Lengths,
    chunk_frames: int = CHUNK_FRAMES,
) -> torch.Tensor:
    """The summed CTC loss of head(encoded (B, T', D)) against tokens (B, U); blank is 0.

    At least in fp32 whatever the autocast: the forward variables span hundreds of nats (Graves et al., 2006). Beyond
    `chunk_frames` frames in memory that grows linearly, with the same result.
    """
    if encoded.shape[1] > chunk_frames:
        losses = long_ctc_losses(encoded, head, encoded_lengths, tokens, token_lengths)
        return losses.sum().to(_at_least_float32(encoded))
    logits = head(encoded)
    with torch.autocast(logits.device.type, enabled=False):
        log_probabilities = F.log_softmax(logits, dim=-1, dtype=_at_least_float32(logits)).transpose(0, 1)
        losses = ctc_loss(log_probabilities, tokens, encoded_lengths, token_lengths)
        return losses.sum()


def attention_loss_sum(
    decoded: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    label_smoothing: float,
    chunk_frames: int = CHUNK_FRAMES,
) -> torch.Tensor:
    """The summed, smoothed cross entropy of head(decoded (B, U + 1, D)) against targets (B, U + 1); padding is -1.

    At least in fp32 whatever the autocast. Beyond `chunk_frames` tokens chunk by chunk, with the same result.
    """
    if decoded.shape[1] <= chunk_frames:
        return _cross_entropy_sum(decoded, head, targets, label_smoothing)
    chunks = zip(decoded.split(chunk_frames, dim=1), targets.split(chunk_frames, dim=1), strict=True)
    sums = [recomputed(_cross_entropy_sum, chunk, head, aims, label_smoothing) for chunk, aims in chunks]
    return torch.stack(sums).sum()


def _cross_entropy_sum(
    decoded: torch.Tensor, head: Head, targets: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    logits = head(decoded)
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(
            logits.flatten(0, 1).to(_at_least_float32(logits)),
            targets.flatten(),
            reduction="sum",
            label_smoothing=label_smoothing,
            ignore_index=TARGET_PADDING,
        )


def _at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
