"""Which blocks keep their activations and which recompute them in the backward pass."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from konkanivani.base.randomness import derive_seed, dropout_generator, dropout_seed
from konkanivani.memory.weights.placement import OffloadedBlock
from konkanivani.model.kernels.recompute import run_recomputed

ALL_BLOCKS = sys.maxsize


@dataclass(frozen=True)
class RecomputedBlocks:
    """A block runner that recomputes the model's first `count` blocks (Chen et al., 2016).

    The first ones, because the backward pass reaches them last: what it recomputes then finds the others' activations
    gone. Dropout draws the same masks again: where a micro-batch's masks have a seed, each block's have one that
    follows from it, else the generators' state is kept beside the block's input. What is fetched is always recomputed.
    """

    count: int

    def __call__(self, block: torch.nn.Module | OffloadedBlock, *inputs: object) -> torch.Tensor:
        masks = dropout_generator()
        run = block if masks is None else _seeded(block, derive_seed(masks.initial_seed(), block.number))
        is_fetched = isinstance(block, OffloadedBlock) and block.is_fetched
        if block.number < self.count or is_fetched:
            return run_recomputed(run, *inputs, keeps_random_state=masks is None, keeps_attention=block.keeps_attention)
        return run(*inputs)


def _seeded(block: torch.nn.Module | OffloadedBlock, seed: int) -> Callable[..., torch.Tensor]:
    """The block with masks of this seed."""

    def run(*inputs: object) -> torch.Tensor:
        with dropout_seed(seed):
            return block(*inputs)

    return run


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
