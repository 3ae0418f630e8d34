"""PyTorch's own CTC kernels as operators whose output shapes follow from lengths on the host.

`F.ctc_loss` takes the same kernels, but tracing it on tensors without data fails: the shape of its forward variables
depends on the lengths, which it takes as data. Here they are plain numbers, so a trace knows every shape.

T' encoder frames, B batch, V vocabulary, U tokens.
"""

import torch

BLANK = 0


@torch.library.custom_op("konkanivani::ctc_loss", mutates_args=())
def ctc_loss(
    log_probabilities: torch.Tensor, tokens: torch.Tensor, encoded_lengths: list[int], token_lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses (B,), log forward variables (B, T', 2 U + 1)) of log_probabilities (T', B, V) and tokens (B, U)."""
    return torch.ops.aten._ctc_loss(log_probabilities, tokens, encoded_lengths, token_lengths, BLANK, False)


@ctc_loss.register_fake
def _(log_probabilities, tokens, encoded_lengths, token_lengths):
    frames, batch, _ = log_probabilities.shape
    shape = batch, frames, 2 * max(token_lengths) + 1
    return log_probabilities.new_empty(batch), log_probabilities.new_empty(shape)


@torch.library.custom_op("konkanivani::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    tokens: torch.Tensor,
    encoded_lengths: list[int],
    token_lengths: list[int],
    losses: torch.Tensor,
    log_alpha: torch.Tensor,
) -> torch.Tensor:
    """The gradient (T', B, V) by the log probabilities, from the losses' gradient (B,)."""
    return torch.ops.aten._ctc_loss_backward(
        gradient, log_probabilities, tokens, encoded_lengths, token_lengths, losses, log_alpha, BLANK, False
    )


@ctc_loss_backward.register_fake
def _(gradient, log_probabilities, tokens, encoded_lengths, token_lengths, losses, log_alpha):
    return torch.empty_like(log_probabilities)


def _keep(ctx, inputs, output) -> None:
    log_probabilities, tokens, ctx.encoded_lengths, ctx.token_lengths = inputs
    ctx.set_materialize_grads(False)  # else zeros are made for the forward variables
    ctx.save_for_backward(log_probabilities, tokens, *output)


def _backward(ctx, gradient, _gradient_of_alpha):
    log_probabilities, tokens, losses, log_alpha = ctx.saved_tensors
    lengths = ctx.encoded_lengths, ctx.token_lengths
    by_log_probabilities = ctc_loss_backward(
        gradient.contiguous(), log_probabilities, tokens, *lengths, losses, log_alpha
    )
    return by_log_probabilities, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_keep)
