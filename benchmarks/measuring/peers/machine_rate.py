"""Speed of the machine around each step, because the speed of a shared machine varies over minutes."""

from dataclasses import dataclass

import torch

from konkanivani.model.flops import product_rate
from konkanivani.model.kernels.products import fast_linear

SIDE = 1024  # rows and columns of the matrices


@dataclass(frozen=True)
class MachineRate:
    """FLOP/s of a (SIDE, SIDE) matrix product in fp32, by torch.mm and by the kernel of this project's layers."""

    plain: float
    layers: float


def take_rate(device: str) -> MachineRate:
    """Measure the current rate, with twenty products of each kind."""
    where = torch.device(device)
    return MachineRate(*(product_rate(multiply, where, torch.float32, SIDE) for multiply in (torch.mm, fast_linear)))


def mean_of(before: MachineRate, after: MachineRate) -> MachineRate:
    """Return the mean, an estimate for a step between the two measurements."""
    return MachineRate((before.plain + after.plain) / 2, (before.layers + after.layers) / 2)
