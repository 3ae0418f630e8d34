"""Weights stored in bf16 without fp32 masters (`--weight_dtype bf16`), updated with stochastic rounding.

bf16 has 8 significant bits: rounded to the nearest number, an update below a 512th of a weight would be lost.
Stochastic rounding (Gupta et al., 2015) rounds up with the probability of the remainder, so that the mean of many
updates is exact. Weights, gradients and AdamW's moments take 2 bytes each per parameter instead of 4.

The random bits are a hash of the update's number, the tensor and the position (Salmon et al., 2011): they depend on no
generator, so that a resumed run rounds as the run that was not stopped, and a GPU as a CPU.
"""

import torch

from konkanivani.models.asr import TiedEmbedding
from konkanivani.randomness import GOLDEN, MASK_64, mix_in_place, mixed, signed

SMALLEST = 4096  # elements: smaller matrices, such as position biases, save nothing
DROPPED_BITS = 16  # of a float32, which bf16 does not have


def store_in_bf16(model: torch.nn.Module) -> None:
    """Store the weights of linear layers and token embeddings in bf16; norms, biases and LoRA's products stay."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | TiedEmbedding) and module.weight.numel() >= SMALLEST:
            weight = module.weight
            module.weight = torch.nn.Parameter(weight.detach().to(torch.bfloat16), weight.requires_grad)


def in_bf16(parameter: torch.Tensor) -> bool:
    """Return whether the parameter is stored in bf16."""
    return parameter.dtype == torch.bfloat16


class StochasticRounding:
    """Rounding of fp32 slices to bf16 on one device; all memory is allocated in the constructor."""

    def __init__(self, elements: int, device: torch.device) -> None:
        """`elements` is the size of the largest slice."""
        # 64 bits serve four elements.
        groups = -(-elements // 4)
        self._counts = torch.arange(groups, device=device).mul_(signed(GOLDEN))
        self._bits = torch.empty_like(self._counts)
        self._shifted = torch.empty_like(self._counts)
        self._remainders = torch.empty(4 * groups, dtype=torch.int32, device=device)
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self._start_shifted = torch.zeros_like(self._start)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the workspace."""
        return [*vars(self).values()]

    def round_into(
        self, target: torch.Tensor, numbers: torch.Tensor, step: torch.Tensor, tensor: int, first: int
    ) -> None:
        """Round fp32 numbers (N,), which are overwritten, into target (N,) in bf16.

        Args:
            step: number of the update, a 0-dimensional tensor on the device.
            tensor: number of the tensor among those of the optimizer, for random bits of its own.
            first: position of the first element in its tensor.
        """
        groups = -(-len(numbers) // 4)
        # Each slice of each update has a stream that starts at a hash, so that two streams do not overlap.
        site = (mixed(tensor + 1) + mixed(-first - 1)) & MASK_64
        self._start.copy_(step).mul_(signed(GOLDEN)).add_(signed(site))
        mix_in_place(self._start, self._start_shifted)
        bits = torch.add(self._counts[:groups], self._start, out=self._bits[:groups])
        mix_in_place(bits, self._shifted[:groups])
        remainders = self._remainders[: 4 * groups].copy_(bits.view(torch.int16))
        remainders.bitwise_and_(2**DROPPED_BITS - 1)
        # Adding to the bits adds to the magnitude, of negative numbers too; the carry reaches the exponent correctly.
        pattern = numbers.view(torch.int32)
        pattern.add_(remainders[: len(numbers)]).bitwise_and_(-(2**DROPPED_BITS))
        target.copy_(numbers)
