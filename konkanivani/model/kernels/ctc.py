"""PyTorch's own CTC kernels as operators whose output shapes follow from lengths on the host.

`F.ctc_loss` takes the same kernels, but tracing it on tensors without data fails: the shape of its forward variables
depends on the lengths, which it takes as data. Here they are plain numbers, so a trace knows every shape.

T' encoder frames, B batch, V vocabulary, U tokens.
"""

import torch

from konkanivani.base.lengths import Lengths

BLANK = 0

# Not `torch.library.custom_op`, whose operators load PyTorch's compiler when they are called: a hundred megabytes.
_LIBRARY = torch.library.Library("konkanivani", "DEF")
_LIBRARY.define("ctc_loss(Tensor scores, Tensor tokens, int[] frames, int[] lengths) -> (Tensor, Tensor)")
_LIBRARY.define(
    "ctc_loss_backward(Tensor gradient, Tensor scores, Tensor tokens, int[] frames, int[] lengths, Tensor losses, "
    "Tensor log_alpha) -> Tensor"
)


def ctc_loss(
    log_probabilities: torch.Tensor, tokens: torch.Tensor, encoded_lengths: Lengths, token_lengths: Lengths
) -> torch.Tensor:
    """The losses (B,) of log_probabilities (T', B, V) and tokens (B, U)."""
    return _CTCLoss.apply(log_probabilities, tokens, encoded_lengths, token_lengths)


class _CTCLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, log_probabilities: torch.Tensor, tokens: torch.Tensor, encoded_lengths: Lengths, token_lengths: Lengths
    ) -> torch.Tensor:
        ctx.lengths = encoded_lengths, token_lengths
        losses, log_alpha = torch.ops.konkanivani.ctc_loss(log_probabilities, tokens, encoded_lengths, token_lengths)
        ctx.save_for_backward(log_probabilities, tokens, losses, log_alpha)
        return losses

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_probabilities, tokens, losses, log_alpha = ctx.saved_tensors
        by_log_probabilities = torch.ops.konkanivani.ctc_loss_backward(
            gradient.contiguous(), log_probabilities, tokens, *ctx.lengths, losses, log_alpha
        )
        return by_log_probabilities, None, None, None


@torch.library.impl(_LIBRARY, "ctc_loss", "CompositeExplicitAutograd")
def _forward(
    scores: torch.Tensor, tokens: torch.Tensor, frames: list[int], lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses (B,) and log forward variables (B, T', 2 U + 1)."""
    return torch.ops.aten._ctc_loss(scores, tokens, frames, lengths, BLANK, False)


@torch.library.impl(_LIBRARY, "ctc_loss", "Meta")
def _shapes_of_forward(
    scores: torch.Tensor, tokens: torch.Tensor, frames: list[int], lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    longest, batch, _ = scores.shape
    return scores.new_empty(batch), scores.new_empty(batch, longest, 2 * max(lengths) + 1)


@torch.library.impl(_LIBRARY, "ctc_loss_backward", "CompositeExplicitAutograd")
def _backward(
    gradient: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    frames: list[int],
    lengths: list[int],
    losses: torch.Tensor,
    log_alpha: torch.Tensor,
) -> torch.Tensor:
    """The gradient (T', B, V) by the log probabilities, from the losses' gradient (B,)."""
    return torch.ops.aten._ctc_loss_backward(gradient, scores, tokens, frames, lengths, losses, log_alpha, BLANK, False)


@torch.library.impl(_LIBRARY, "ctc_loss_backward", "Meta")
def _shape_of_backward(gradient: torch.Tensor, scores: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(scores)
