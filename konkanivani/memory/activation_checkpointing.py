"""Which blocks keep their activations and which recompute them in the backward pass."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class RecomputePolicy:
    """A block runner: `always` recomputes every block, `never` none (Chen et al., 2016).

    Dropout draws the same masks again, since the generators' state is kept beside each block's input.
    """

    mode: Literal["always", "never"]

    def __call__(self, block: torch.nn.Module, *inputs: object) -> torch.Tensor:
        if self.mode == "always" and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)
