"""CTC in memory that grows linearly with the utterance: exact, head included, in chunks of frames.

PyTorch's kernel keeps the forward variables of all frames, T' x (2 U + 1) numbers: 1 GB for ten minutes of reading.
Here those of one chunk exist at a time. Each chunk goes from the forward variables before it to those after it and is
recomputed in the backward pass, so only the variables between chunks are kept. With chunks of sqrt(T') frames both take
sqrt(T') x (2 U + 1) numbers: 18 MB each at ten minutes, 260 MB at an hour, where the encoder takes twenty times that.

The recursion is equations 6 and 7 of Graves et al. (2006), in logarithms. They are in double precision whatever the
model's: after ten minutes a path's logarithm is about -10^5, where float32 has steps of 0.008, and they add up.

B batch, T' encoder frames, C frames of a chunk, D model width, V vocabulary, U tokens, S = 2 U + 1 states: the tokens
with a blank before, between and after them. A row of forward variables has S + 2 columns: two that stay impossible
come first, so that a state's predecessors are a shifted view.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import Lengths
from konkanivani.model.kernels.recompute import run_recomputed

BLANK = 0
# The logarithm of zero. Finite, so that no difference of two is undefined; far below that of any path.
IMPOSSIBLE = -1e30

# Per-position features (B, C, D) -> logits (B, C, V).
Head = Callable[[torch.Tensor], torch.Tensor]


def long_ctc_losses(
    encoded: torch.Tensor, head: Head, encoded_lengths: Lengths, tokens: torch.Tensor, token_lengths: Lengths
) -> torch.Tensor:
    """The CTC losses (B,) in float64 of head(encoded (B, T', D)) against tokens (B, U); blank is 0.

    What PyTorch's kernel gives, infinity where there are fewer frames than the tokens need included.
    """
    states = interleave_blanks(tokens[:, : max(token_lengths)])
    skips = log_skips(states)
    log_alpha = torch.full((len(states), states.shape[1] + 2), IMPOSSIBLE, dtype=torch.float64, device=states.device)
    log_alpha[:, 2] = 0.0  # before the first frame: its blank and its first token are the ways on from here
    start, chunk = 0, math.isqrt(encoded.shape[1] - 1) + 1
    for frames in encoded.split(chunk, dim=1):
        left = [min(max(0, length - start), frames.shape[1]) for length in encoded_lengths]
        log_alpha = run_recomputed(_through_chunk, frames, head, states, skips, log_alpha, left)
        start += frames.shape[1]
    return _losses(log_alpha, token_lengths)


def interleave_blanks(tokens: torch.Tensor) -> torch.Tensor:
    """States (B, 2 U + 1) of tokens (B, U)."""
    states = tokens.new_full((tokens.shape[0], 2 * tokens.shape[1] + 1), BLANK)
    states[:, 1::2] = tokens
    return states


def log_skips(states: torch.Tensor) -> torch.Tensor:
    """(B, S) float64: 0 where a state may follow the one two before it (another token), else IMPOSSIBLE."""
    before = F.pad(states[:, :-2], (2, 0), value=BLANK)[:, : states.shape[1]]
    is_open = (states != BLANK) & (states != before)
    return torch.zeros_like(states, dtype=torch.float64).masked_fill_(~is_open, IMPOSSIBLE)


def _through_chunk(
    frames: torch.Tensor,
    head: Head,
    states: torch.Tensor,
    skips: torch.Tensor,
    log_alpha: torch.Tensor,
    left: list[int],
) -> torch.Tensor:
    """The forward variables after these frames (B, C, D), from those before them; the head as autocast has it."""
    logits = head(frames)
    with torch.autocast(logits.device.type, enabled=False):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probabilities = F.log_softmax(logits, dim=-1, dtype=dtype).transpose(0, 1)
        _, after = ctc_chunk(log_probabilities, states, skips, log_alpha, left)
    return after


def _losses(log_alpha: torch.Tensor, token_lengths: Lengths) -> torch.Tensor:
    """Minus the logarithm of all paths that end in the last token or the blank behind it; (B,)."""
    ends = torch.tensor([(2 * length + 1, 2 * length + 2) for length in token_lengths])
    log_likelihood = log_alpha.gather(1, ends.to(log_alpha.device, non_blocking=True)).logsumexp(dim=1)
    return torch.where(log_likelihood < IMPOSSIBLE / 2, math.inf, -log_likelihood)


@torch.library.custom_op("konkanivani::ctc_chunk", mutates_args=())
def ctc_chunk(
    log_probabilities: torch.Tensor, states: torch.Tensor, skips: torch.Tensor, before: torch.Tensor, left: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log forward variables (C, B, S + 2) of each frame, those after the last (B, S + 2)), float64.

    log_probabilities (C, B, V), states and skips (B, S), `before` (B, S + 2); `left` is how many of the chunk's frames
    belong to each utterance: beyond them its variables stay. One operator, so that a trace need not follow the frames.
    """
    ends = _ends(left, log_probabilities)
    log_alphas = before.new_full((len(log_probabilities), *before.shape), IMPOSSIBLE)
    previous = before
    for frame, emissions in enumerate(log_probabilities):
        now = log_alphas[frame, :, 2:]
        torch.logaddexp(previous[:, 2:], previous[:, 1:-1], out=now)
        torch.logaddexp(now, previous[:, :-2] + skips, out=now)
        now += emissions.gather(1, states)
        if frame >= min(left):
            now.copy_(torch.where(ends > frame, now, previous[:, 2:]))
        previous = log_alphas[frame]
    return log_alphas, previous.clone()


@ctc_chunk.register_fake
def _(log_probabilities, states, skips, before, left):
    return before.new_empty((len(log_probabilities), *before.shape)), torch.empty_like(before)


@torch.library.custom_op("konkanivani::ctc_chunk_backward", mutates_args=())
def ctc_chunk_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    states: torch.Tensor,
    skips: torch.Tensor,
    before: torch.Tensor,
    log_alphas: torch.Tensor,
    left: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by the log probabilities (C, B, V) and by `before` (B, S + 2), from that by the last variables.

    A state's gradient is the probability of passing through it. A frame earlier it is shared out among the state's
    predecessors, to each the share that it had in the state's forward variable; a share is never above 1, so nothing
    overflows, whatever the logarithms.
    """
    ends, size = _ends(left, log_probabilities), states.shape[1]
    by_log_probabilities = torch.zeros_like(log_probabilities)
    # For state s: from s itself, from s into s + 1, from s into s + 2.
    ways = torch.stack([torch.zeros_like(skips), torch.zeros_like(skips), F.pad(skips[:, 2:], (0, 2))[:, :size]], dim=1)
    occupied = F.pad(gradient[:, 2:], (0, 2))
    reached = torch.full_like(before, IMPOSSIBLE)
    for frame in range(len(log_probabilities) - 1, -1, -1):
        previous = before if frame == 0 else log_alphas[frame - 1]
        emissions = log_probabilities[frame].gather(1, states)
        torch.sub(emissions, log_alphas[frame, :, 2:], out=reached[:, :size])
        shares = (_successors(reached) + previous[:, None, 2:] + ways).clamp_(max=0.0).exp_()
        earlier = (shares * _successors(occupied)).sum(dim=1)
        now = occupied[:, :size].to(log_probabilities.dtype)
        if frame >= min(left):
            earlier = torch.where(ends > frame, earlier, occupied[:, :size])
            now = now * (ends > frame)
        by_log_probabilities[frame].scatter_add_(1, states, now)
        occupied[:, :size] = earlier
    return by_log_probabilities, F.pad(occupied[:, :size], (2, 0))


@ctc_chunk_backward.register_fake
def _(gradient, log_probabilities, states, skips, before, log_alphas, left):
    return torch.empty_like(log_probabilities), torch.empty_like(before)


def _successors(padded: torch.Tensor) -> torch.Tensor:
    """A view (B, 3, S) of (B, S + 2): the columns s, s + 1 and s + 2 for each state s."""
    return padded.unfold(1, padded.shape[1] - 2, 1)


def _ends(left: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(left).to(like.device, non_blocking=True)[:, None]


def _keep(ctx, inputs, output) -> None:
    log_probabilities, states, skips, before, ctx.left = inputs
    ctx.set_materialize_grads(False)  # else zeros are made for the forward variables
    ctx.save_for_backward(log_probabilities, states, skips, before, output[0])


def _backward(ctx, _gradient_of_alphas, gradient):
    by_log_probabilities, by_before = ctc_chunk_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.left)
    return by_log_probabilities, None, None, by_before, None


ctc_chunk.register_autograd(_backward, setup_context=_keep)
