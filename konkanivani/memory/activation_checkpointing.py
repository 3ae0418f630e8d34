"""Activation checkpointing: the number of blocks whose activations are recomputed in the backward pass."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from konkanivani.base.randomness import derive_seed, dropout_generator, dropout_seed
from konkanivani.memory.weights.placement import OffloadedBlock
from konkanivani.model.blocks import Block
from konkanivani.model.kernels.recompute import run_recomputed

ALL_BLOCKS = sys.maxsize


@dataclass(frozen=True)
class RecomputedBlocks:
    """Block runner that recomputes the activations of the model's first `count` blocks (Chen et al., 2016).

    The first blocks are chosen because the backward pass reaches them last, when the activations of the others have
    been freed. Fetched (offloaded) blocks are always recomputed.
    """

    count: int

    def __call__(self, block: Block | OffloadedBlock, *inputs: object) -> torch.Tensor:
        # Recomputation has to draw the same dropout masks. Each block gets its own seed, derived from the
        # micro-batch's; without one, checkpointing saves and restores the state of the random generators.
        masks = dropout_generator()
        run: Callable[..., torch.Tensor] = block
        if masks is not None:
            run = _seeded(block, derive_seed(masks.initial_seed(), block.number))
        is_fetched = isinstance(block, OffloadedBlock) and block.is_fetched
        if block.number < self.count or is_fetched:
            return run_recomputed(run, *inputs, keeps_random_state=masks is None, keeps_attention=block.keeps_attention)
        return run(*inputs)


def _seeded(block: Block | OffloadedBlock, seed: int) -> Callable[..., torch.Tensor]:
    """Return the block with dropout masks drawn from `seed`."""

    def run(*inputs: object) -> torch.Tensor:
        with dropout_seed(seed):
            return block(*inputs)

    return run


@dataclass(frozen=True)
class RecomputePolicy:
    """Policy that maps the length of a micro-batch's longest utterance in seconds to a block runner.

    `always` recomputes all blocks, `never` none. `auto` uses `blocks`: pairs of (seconds, count) in ascending order,
    each for utterances up to that length. Longer utterances recompute all blocks.
    """

    mode: Literal["always", "auto", "never"]
    blocks: tuple[tuple[float, int], ...] = ()

    @classmethod
    def first(cls, count: int) -> "RecomputePolicy":
        """Return a policy that recomputes the first `count` blocks at any length."""
        return cls("auto", ((float("inf"), count),))

    def __call__(self, seconds: float) -> RecomputedBlocks:
        if self.mode != "auto":
            return RecomputedBlocks(ALL_BLOCKS if self.mode == "always" else 0)
        counts = (count for longest, count in self.blocks if seconds <= longest)
        return RecomputedBlocks(next(counts, ALL_BLOCKS))
