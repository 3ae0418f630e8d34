"""How much of the device a training step makes use of: its share of the arithmetic that the device can do."""

import torch

from konkanivani.data.batch import GlobalBatch
from konkanivani.model.architecture import Architecture
from konkanivani.model.flops import product_rate, step_flop
from konkanivani.model.kernels.products import fast_linear

# How often the product of two square matrices is timed, as large as it takes to fill the device: fp16's three are
# 24 MiB on a card, fp32's 3 MiB on a CPU of few cores (where four times as many numbers give the same rate).
ROUNDS = {"cuda": 20, "cpu": 5}
MAX_FEW_CORES = 8


class Utilisation:
    """What a step uses of a device that trains in `dtype`; the device's rate is timed here, in some milliseconds."""

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        self.architecture, self.device = architecture, device
        # The product that the model's layers take, so that a library which is faster elsewhere does not flatter it.
        multiply = fast_linear if dtype == torch.float32 else torch.mm
        self.rate = product_rate(multiply, device, dtype, best_side(device), ROUNDS[device.type])
        self._is_card_silent = device.type != "cuda"

    def model_flops_utilisation(self, global_batch: GlobalBatch, seconds: float) -> float:
        """The step's arithmetic a second over the device's rate (MFU; Chowdhery et al., 2022, appendix B).

        Only what the utterances need counts: nothing for padding or for what is recomputed.
        """
        return self.global_batch_flop(global_batch) / (seconds * self.rate)

    def global_batch_flop(self, global_batch: GlobalBatch) -> float:
        """The arithmetic that the window's micro-batches need, forward and backward."""
        return sum(
            step_flop(self.architecture.forward_layers((samples,), tokens), recomputes=False)
            for batch in global_batch.micro_batches
            for samples, tokens in zip(batch.sample_lengths, batch.token_lengths, strict=True)
        )

    def gpu_utilisation(self) -> float | None:
        """The share of the last moments in which a kernel ran on the card (NVML); None where nobody can tell."""
        if self._is_card_silent:
            return None
        try:
            return torch.cuda.utilization(self.device) / 100
        except Exception:  # no NVML, no permission, a slice of a card: training does not depend on knowing
            self._is_card_silent = True
            return None


def best_side(device: torch.device) -> int:
    """The side of square matrices whose product is the fastest that the device has."""
    if device.type == "cuda":
        return 2048
    return 512 if torch.get_num_threads() <= MAX_FEW_CORES else 1024
