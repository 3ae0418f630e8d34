"""Utilization of the device by a training step, as a fraction of the arithmetic that the device can do."""

import torch

from konkanivani.data.batch import GlobalBatch
from konkanivani.model.architecture import Architecture
from konkanivani.model.flops import product_rate, step_flop
from konkanivani.model.kernels.products import fast_linear

# Repetitions of the timed matrix product. The square matrices are just large enough to fill the device: the three
# (two factors and the product) take 24 MiB in fp16 on a GPU, and 3 MiB in fp32 on a CPU with few cores, where matrices
# of four times the size give the same rate.
ROUNDS = {"cuda": 20, "cpu": 5}
MAX_FEW_CORES = 8


class Utilisation:
    """Utilization of a device that trains in `dtype`.

    The constructor measures the device's rate in FLOP/s, which takes some milliseconds.
    """

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        self.architecture = architecture
        self.device = device
        # Time the product that the model's layers call, so that both sides of the ratio use the same library.
        multiply = fast_linear if dtype == torch.float32 else torch.mm
        self.rate = product_rate(multiply, device, dtype, best_side(device), ROUNDS[device.type])
        self._is_card_silent = device.type != "cuda"

    def model_flops_utilisation(self, global_batch: GlobalBatch, seconds: float) -> float:
        """Return the model FLOP/s of the step as a fraction of the device's rate (MFU).

        Definition: Chowdhery et al., 2022, appendix B. Padding and recomputation do not count as model FLOP.
        """
        return self.global_batch_flop(global_batch) / (seconds * self.rate)

    def global_batch_flop(self, global_batch: GlobalBatch) -> float:
        """Return the FLOP of forward and backward pass that the utterances of this rank's micro-batches need."""
        return sum(
            step_flop(self.architecture.forward_layers((samples,), tokens), recomputes=False)
            for batch in global_batch.micro_batches
            for samples, tokens in zip(batch.sample_lengths, batch.token_lengths, strict=True)
        )

    def gpu_utilisation(self) -> float | None:
        """Return the fraction of the last sampling period in which the GPU ran a kernel (NVML), or None if unknown."""
        if self._is_card_silent:
            return None
        try:
            return torch.cuda.utilization(self.device) / 100
        except Exception:  # no NVML, no permission, or a MIG slice: not needed for training
            self._is_card_silent = True
            return None


def best_side(device: torch.device) -> int:
    """Return the side of square matrices that reach the highest rate on the device."""
    if device.type == "cuda":
        return 2048
    return 512 if torch.get_num_threads() <= MAX_FEW_CORES else 1024
