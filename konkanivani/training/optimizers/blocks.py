"""Block-wise 8-bit quantization: per block of 256 values its maximum, and per value the nearest of 256 fractions of it.

The fractions are the dynamic ones of Dettmers et al. (2022): seven powers of ten, each with twice the number of steps
of the next lower one, so that values ten thousand times smaller than the maximum are still resolved.
"""

import torch

BLOCK = 256
POWERS = 7
DROPPED_BITS = 14  # of a float32; the remaining nine bits of the mantissa exceed the finest step's resolution
KEPT = 1 << (31 - DROPPED_BITS)  # bit patterns per sign


def dynamic_shares(is_signed: bool) -> list[float]:
    """Return the 256 fractions in ascending order, including 0 and 1; each is the middle of its step."""
    steps = [(power, 2 ** (power if is_signed else power + 1)) for power in range(POWERS)]
    above = [10.0 ** (power - POWERS + 1) * (0.1 + 0.9 * (i + 0.5) / n) for power, n in steps for i in range(n)]
    return sorted([*(-share for share in above if is_signed), 0.0, *above, 1.0])


class Codebook:
    """Quantization levels on a device, with a table from the upper bits of a float32 to the nearest level's code.

    A search takes 40 times the time.
    """

    def __init__(self, is_signed: bool, like: torch.Tensor) -> None:
        shares = torch.tensor(dynamic_shares(is_signed), dtype=torch.float32, device=like.device)
        bounds = (shares[1:] + shares[:-1]) / 2
        if not is_signed:
            # Positive values never round to code 0 in an unsigned codebook: Adam divides by the second moment.
            bounds[0] = 0
        # Upper 18 bits of all floats; negative int32 patterns are the floats with the sign bit set.
        patterns = torch.arange(-KEPT, KEPT, dtype=torch.int32, device=like.device) << DROPPED_BITS
        middles = (patterns + (1 << (DROPPED_BITS - 1))).view(torch.float32)
        # Pattern 0 contains exact zeros, so it maps to level 0 and not to the middle of its interval.
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
        # In place on the bits of the workspace. An arithmetic shift keeps the sign, so patterns range from -KEPT to
        # KEPT - 1.
        patterns = shares.view(torch.int32).bitwise_right_shift_(DROPPED_BITS).add_(KEPT)
        # index_select with `out` allocates nothing, unlike indexing.
        torch.index_select(self.nearest, 0, patterns.view(-1), out=codes.view(-1))

    def dequantize(
        self, codes: torch.Tensor, largest: torch.Tensor, workspace: torch.Tensor, numbers: torch.Tensor
    ) -> None:
        """Dequantize the codes into `numbers` (blocks, 256); `workspace` as in `quantize`."""
        indices = workspace.view(torch.int32).copy_(codes)
        torch.index_select(self.shares, 0, indices.view(-1), out=numbers.view(-1))
        numbers.mul_(largest[:, None])
