"""The Conformer's depthwise convolution along frames, made fast on a CPU in both directions.

B batch, T frames, D model width, K kernel.
"""

import torch
import torch.nn.functional as F


def convolved(x: torch.Tensor, depthwise: torch.nn.Conv1d) -> torch.Tensor:
    """What `depthwise`, whose kernel is odd and keeps the length, makes of x (B, T, D) along T: (B, T, D).

    On a CPU in full precision under autocast too, which takes as long: in bf16 oneDNN 3.10 makes such a kernel without
    end where a thread's share is 16 channels or fewer.
    """
    if x.device.type != "cpu":
        return depthwise(x.transpose(1, 2)).transpose(1, 2)
    with torch.autocast("cpu", enabled=False):
        frames = x.to(depthwise.weight.dtype)
        if torch.is_grad_enabled():
            return _Convolved.apply(frames, depthwise.weight, depthwise.bias).to(x.dtype)
        return _convolve(frames, depthwise.weight, depthwise.bias).to(x.dtype)


class _Convolved(torch.autograd.Function):
    """The gradient by the kernel is a convolution as well: of x by the gradient, which is a kernel of T frames.

    oneDNN's own for it takes four to ten times as long, the more the longer the utterance (docs/LOG.md).
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, kernel)
        return _convolve(x, kernel, bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, kernel = ctx.saved_tensors
        by_x = _convolve(gradient, kernel.flip(2))
        return by_x, _convolve_by(gradient, x, kernel.shape[2]), gradient.sum((0, 1))


def _convolve(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (B, T, D) by kernel (D, 1, K): (B, T, D).

    As one of images a frame high whose channels lie innermost, as D does: the same numbers ten times as fast as Conv1d,
    which takes the channels outermost.
    """
    image = _as_image(x)
    made = F.conv2d(image, kernel[:, :, None, :], bias, padding=(0, kernel.shape[2] // 2), groups=x.shape[2])
    return made[:, :, 0, :].transpose(1, 2)


def _convolve_by(gradient: torch.Tensor, x: torch.Tensor, size: int) -> torch.Tensor:
    """The gradient by a kernel (D, 1, size) of x's convolution, given that by its output; both (B, T, D).

    Each utterance's channels are channels of their own, convolved by their own gradient, and summed over B.
    """
    batch, frames, width = x.shape
    image, kernel = (_as_image(part.transpose(0, 1).reshape(1, frames, batch * width)) for part in (x, gradient))
    made = F.conv2d(image, kernel.transpose(0, 1), padding=(0, size // 2), groups=batch * width)
    return made.view(batch, width, 1, size).sum(0)


def _as_image(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)[:, :, None, :]
