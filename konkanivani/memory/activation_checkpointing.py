"""Activation checkpointing: the number of blocks whose activations are recomputed in the backward pass."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

from konkanivani.memory.weights import OffloadedBlock
from konkanivani.models.conformer import RunBlock
from konkanivani.ops.recompute import run_recomputed

ALL_BLOCKS = sys.maxsize


@dataclass(frozen=True)
class RecomputedBlocks:
    """`WrapBlock` that recomputes the activations of the model's first `count` blocks (Chen et al., 2016).

    The first blocks are chosen because the backward pass reaches them last, when the activations of the others have
    been freed. Fetched (offloaded) blocks are always recomputed.
    """

    count: int

    def __call__(self, number: int, block: RunBlock) -> RunBlock:
        is_fetched = isinstance(block, OffloadedBlock) and block.is_fetched
        if number >= self.count and not is_fetched:
            return block
        keeps_attention = not isinstance(block, OffloadedBlock) or block.keeps_attention
        return partial(run_recomputed, block, keeps_random_state=True, keeps_attention=keeps_attention)


@dataclass(frozen=True)
class RecomputePolicy:
    """Policy that maps the length of a micro-batch's longest utterance in seconds to a `WrapBlock`.

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
