"""Numbers in 8 bits: of each block of 256 the largest, and for each number the nearest of 256 shares of it.

The shares are the dynamic ones of Dettmers et al. (2022): seven powers of ten, each of twice as many steps as the one
below it, so that numbers ten thousand times smaller than the largest are still told apart.
"""

import torch

BLOCK = 256
POWERS = 7
DROPPED_BITS = 14  # of a float32; the nine that are left of its mantissa are more than the finest steps need
KEPT = 1 << (31 - DROPPED_BITS)  # patterns of each sign


def dynamic_shares(is_signed: bool) -> list[float]:
    """The 256 shares, ascending, with 0 and 1 among them; each is the middle of its step."""
    steps = [(power, 2 ** (power if is_signed else power + 1)) for power in range(POWERS)]
    above = [10.0 ** (power - POWERS + 1) * (0.1 + 0.9 * (i + 0.5) / n) for power, n in steps for i in range(n)]
    return sorted([*(-share for share in above if is_signed), 0.0, *above, 1.0])


class Codebook:
    """The shares, and for the upper bits of any float32 the code of the share that is nearest, on a device.

    A search takes forty times as long. What is above 0 has no code of 0 where there is no sign: Adam divides by it.
    """

    def __init__(self, is_signed: bool, like: torch.Tensor) -> None:
        shares = torch.tensor(dynamic_shares(is_signed), dtype=torch.float32, device=like.device)
        bounds = (shares[1:] + shares[:-1]) / 2
        if not is_signed:
            bounds[0] = 0
        patterns = torch.arange(-KEPT, KEPT, dtype=torch.int32, device=like.device) << DROPPED_BITS
        middles = (patterns + (1 << (DROPPED_BITS - 1))).view(torch.float32)
        middles[KEPT] = 0
        self.nearest = torch.bucketize(middles, bounds).to(torch.uint8)
        self.shares = shares.to(like.dtype)

    def quantize(
        self, numbers: torch.Tensor, codes: torch.Tensor, largest: torch.Tensor, workspace: torch.Tensor
    ) -> None:
        """Quantize numbers (blocks, 256) into `codes` (blocks, 256) and each block's maximum `largest`.

        `workspace` is a float32 tensor of the same shape. A block of zeros has maximum 0 and arbitrary codes. The
        relative error of a value s is at most half its quantization step, and at most s / 1024.
        """
        torch.amax(workspace.copy_(numbers).abs_(), 1, out=largest)
        shares = workspace.copy_(numbers).div_(largest[:, None])
        patterns = shares.view(torch.int32).bitwise_right_shift_(DROPPED_BITS).add_(KEPT)
        torch.index_select(self.nearest, 0, patterns.view(-1), out=codes.view(-1))

    def dequantize(
        self, codes: torch.Tensor, largest: torch.Tensor, workspace: torch.Tensor, numbers: torch.Tensor
    ) -> None:
        """Writes the numbers (blocks, 256) that these codes stand for; `workspace` as for `quantize`."""
        indices = workspace.view(torch.int32).copy_(codes)
        torch.index_select(self.shares, 0, indices.view(-1), out=numbers.view(-1))
        numbers.mul_(largest[:, None])
