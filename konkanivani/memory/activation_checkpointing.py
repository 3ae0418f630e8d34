"""Which blocks keep their activations and which recompute them in the backward pass."""

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

ALL_BLOCKS = sys.maxsize


@dataclass(frozen=True)
class RecomputedBlocks:
    """A block runner that recomputes the model's first `count` blocks (Chen et al., 2016).

    The first ones, because the backward pass reaches them last: what it recomputes then finds the others' activations
    gone. Dropout draws the same masks again, since the generators' state is kept beside each block's input.
    """

    count: int

    def __call__(self, block: torch.nn.Module, *inputs: object) -> torch.Tensor:
        if block.number < self.count and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)


@dataclass(frozen=True)
class RecomputePolicy:
    """From the seconds of a micro-batch's longest utterance to its block runner.

    `always` recomputes every block, `never` none, `auto` as many as `blocks` says: pairs of (seconds, count), ascending
    in seconds, each for utterances up to that length; all of them for longer ones.
    """

    mode: Literal["always", "auto", "never"]
    blocks: tuple[tuple[float, int], ...] = ()

    @classmethod
    def first(cls, count: int) -> "RecomputePolicy":
        """The first `count` blocks, whatever the length."""
        return cls("auto", ((float("inf"), count),))

    def __call__(self, seconds: float) -> RecomputedBlocks:
        if self.mode != "auto":
            return RecomputedBlocks(ALL_BLOCKS if self.mode == "always" else 0)
        counts = (count for longest, count in self.blocks if seconds <= longest)
        return RecomputedBlocks(next(counts, ALL_BLOCKS))
