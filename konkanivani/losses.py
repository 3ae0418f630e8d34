"""The CTC and the attention loss as sums, with the counts that a whole window divides them by.

B batch, T' encoder frames, U tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.config import LossConfig
from konkanivani.ctc_operator import ctc_loss
from konkanivani.lengths import Lengths


@dataclass(frozen=True)
class LossCounts:
    """What the losses of one window are divided by: its tokens, and its utterances (one end token each)."""

    tokens: int
    utterances: int


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
    logits: torch.Tensor, encoded_lengths: Lengths, tokens: torch.Tensor, token_lengths: Lengths
) -> torch.Tensor:
    """The summed CTC loss of logits (B, T', V) against tokens (B, U); blank is 0.

    At least in fp32 whatever the autocast: the forward variables span hundreds of nats (Graves et al., 2006).
    """
    with torch.autocast(logits.device.type, enabled=False):
        log_probabilities = F.log_softmax(logits, dim=-1, dtype=_at_least_float32(logits)).transpose(0, 1)
        losses, _ = ctc_loss(log_probabilities, tokens, list(encoded_lengths), list(token_lengths))
        return losses.sum()


def attention_loss_sum(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float, ignored: int
) -> torch.Tensor:
    """The summed, smoothed cross entropy of logits (B, U + 1, V) against targets (B, U + 1); `ignored` is padding."""
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(
            logits.flatten(0, 1).to(_at_least_float32(logits)),
            targets.flatten(),
            reduction="sum",
            label_smoothing=label_smoothing,
            ignore_index=ignored,
        )


def loss_sums(
    ctc_logits: torch.Tensor,
    attention_logits: torch.Tensor,
    encoded_lengths: Lengths,
    tokens: torch.Tensor,
    token_lengths: Lengths,
    targets: torch.Tensor,
    config: LossConfig,
) -> LossSums:
    """Both losses of one micro-batch; shapes as in the two functions above, token padding in `targets` is -1."""
    return LossSums(
        ctc=ctc_loss_sum(ctc_logits, encoded_lengths, tokens, token_lengths),
        attention=attention_loss_sum(attention_logits, targets, config.label_smoothing, ignored=-1),
    )


def _at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
