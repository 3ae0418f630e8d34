"""The machine's rate about each step: shared machines have fast and slow minutes, and so has a step."""

from dataclasses import dataclass

import torch

from konkanivani.model.flops import product_rate
from konkanivani.model.kernels.products import fast_linear

SIDE = 1024  # of the matrices


@dataclass(frozen=True)
class MachineRate:
    """FLOP a second of a product of two matrices of `SIDE` in fp32: as PyTorch takes it, and as our layers do."""

    plain: float
    layers: float


def take_rate(device: str) -> MachineRate:
    """The rate now, of twenty products each way."""
    where = torch.device(device)
    return MachineRate(*(product_rate(multiply, where, torch.float32, SIDE) for multiply in (torch.mm, fast_linear)))


def mean_of(before: MachineRate, after: MachineRate) -> MachineRate:
    """What a step between the two could have had."""
    return MachineRate((before.plain + after.plain) / 2, (before.layers + after.layers) / 2)
