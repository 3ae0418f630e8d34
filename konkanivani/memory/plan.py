"""Memory plan of a run: micro-batch sizes and recomputed blocks by utterance length."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from konkanivani.console import MIB, budget_text, peak_text
from konkanivani.errors import CheckpointError
from konkanivani.lengths import SECONDS, InputUnit
from konkanivani.memory.weights import ON_CARD, OffloadedBlock, Placement
from konkanivani.models.conformer import RunBlock
from konkanivani.ops.recompute import run_recomputed

# --------------------
# Activation checkpointing: the number of blocks whose activations are recomputed in the backward pass.


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
        # Saving and restoring the generators takes a tenth of a millisecond of the host per block.
        keeps_random_state = getattr(block, "draws_random_numbers", True)
        run = partial(run_recomputed, block, keeps_random_state=keeps_random_state)
        if not isinstance(block, OffloadedBlock):
            return partial(run, keeps_attention=True)
        return partial(run, keeps_attention=block.keeps_attention, input_place=block.input_place)


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


# --------------------
# Memory plan of a run: micro-batch sizes and recomputed blocks by utterance length.


STATE_BYTES = 16  # per trained parameter: weight, gradient and AdamW's two moments in fp32


@dataclass(frozen=True)
class BucketPlan:
    """Plan for utterances of up to `seconds` and `tokens`: micro-batch size, recomputed blocks, peak in bytes.

    `utterances` is 0 if not even one fits; `peak` is then the need of one.
    """

    seconds: float
    tokens: int
    utterances: int
    recomputed_blocks: int
    peak: int


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of a run, buckets in ascending order of seconds; all sizes in bytes.

    `forward`, `backward` and `update` are the planned peaks of the most expensive bucket in the device's allocator,
    without `context`, which is allocated by the driver. `validation` is the peak of validating `validation_seconds` of
    padded audio at once. `conditions` is a hash of the device and all settings that the plan depends on.
    """

    conditions: int
    budget: int
    context: int
    buckets: tuple[BucketPlan, ...]
    validation_seconds: float
    forward: int
    backward: int
    update: int
    validation: int
    concurrent_micro_batches: int = 1
    """Micro-batches that run in parallel."""
    placement: Placement = ON_CARD
    """Placement of the weights."""
    host: int = 0
    """Bytes in host memory of the most expensive bucket, if weights are offloaded."""
    has_spare_memory: bool = False
    """Whether the step also fits without the passes that save a GPU's memory (`ROOMY_PASSES` in ops/passes.py)."""

    def recompute_policy(self) -> RecomputePolicy:
        """Return the number of recomputed blocks by utterance length as a policy."""
        return RecomputePolicy("auto", tuple((bucket.seconds, bucket.recomputed_blocks) for bucket in self.buckets))

    def planned_peaks(self, before: float) -> dict[str, float]:
        """Return the planned peak in MiB by phase, as the monitor measures it in a process that used `before` MiB."""
        phases = {"forward": self.forward, "backward": self.backward, "update": self.update}
        if self.validation and self.has_memory_for_search:
            phases["validation"] = self.validation
        return {phase: before + size / MIB for phase, size in phases.items()}

    @property
    def has_memory_for_search(self) -> bool:
        """Whether validation generates texts: an offloaded model's decoder and the batch must fit in memory."""
        return fits_search(self.placement, self.validation + self.context, self.budget)

    def fits_whole_model(self, weights: int) -> bool:
        """Return whether the model, with `weights` bytes in fp32, can be evaluated without offloading."""
        return fits_search(self.placement, self.validation + self.context + weights, self.budget)

    @property
    def peak(self) -> int:
        """Largest planned peak of training in bytes, everything included."""
        return max(bucket.peak for bucket in self.buckets)

    def state_dict(self) -> dict[str, object]:
        """Return the plan as plain values for the checkpoint."""
        return {
            "conditions": self.conditions,
            "budget": self.budget,
            "context": self.context,
            "buckets": [[b.seconds, b.tokens, b.utterances, b.recomputed_blocks, b.peak] for b in self.buckets],
            "validation_seconds": self.validation_seconds,
            "peaks": [self.forward, self.backward, self.update, self.validation],
            "at_once": self.concurrent_micro_batches,
            "placement": [
                self.placement.offloaded_blocks,
                self.placement.half_precision,
                self.host,
                self.placement.prefetch,
            ],
            "spare_memory": self.has_spare_memory,
        }


def fits_search(placement: Placement, needed: int, budget: int) -> bool:
    """Return whether a search with this peak in bytes, context included, is possible within the budget.

    An offloaded model trains block by block, but a search holds its whole decoder on the GPU.
    """
    return not placement.offloaded_blocks or needed <= budget


def read_plan(state: Mapping[str, Any]) -> MemoryPlan:
    """Return the plan that `state_dict` describes; raises a CheckpointError if it is invalid."""
    try:
        buckets = tuple(
            BucketPlan(float(seconds), int(tokens), int(utterances), int(blocks), int(peak))
            for seconds, tokens, utterances, blocks, peak in state["buckets"]
        )
        forward, backward, update, validation = (int(peak) for peak in state["peaks"])
        offloaded_blocks, half_precision, host, prefetch = state.get("placement", (0, False, 0, False))
        plan = MemoryPlan(
            conditions=int(state["conditions"]),
            budget=int(state["budget"]),
            context=int(state["context"]),
            buckets=buckets,
            validation_seconds=float(state["validation_seconds"]),
            forward=forward,
            backward=backward,
            update=update,
            validation=validation,
            # Checkpoints from before --concurrent_micro_batches have no such entry.
            concurrent_micro_batches=int(state.get("at_once", 1)),
            placement=Placement(int(offloaded_blocks), bool(half_precision), bool(prefetch)),
            host=int(host),
            has_spare_memory=bool(state.get("spare_memory", False)),
        )
    except (KeyError, TypeError, ValueError):
        raise CheckpointError("The checkpoint's memory plan cannot be read. Use --replan to make a new one.") from None
    # A bucket without utterances could not be trained: such a plan is never stored.
    ascending = all(shorter.seconds < longer.seconds for shorter, longer in zip(buckets, buckets[1:], strict=False))
    if (
        not buckets
        or not ascending
        or plan.concurrent_micro_batches < 1
        or min(bucket.utterances for bucket in buckets) < 1
    ):
        raise CheckpointError("The checkpoint's memory plan is invalid. Use --replan to make a new one.")
    return plan


def plan_sentences(plan: MemoryPlan, blocks: int, unit: InputUnit = SECONDS) -> str:
    """Describe the plan for the user, one line per bucket."""
    side_by_side = (
        f", {plan.concurrent_micro_batches} micro-batches in parallel" if plan.concurrent_micro_batches > 1 else ""
    )
    spare = ", without the passes that save memory" if plan.has_spare_memory else ""
    lines = [f"Memory plan for {budget_text(plan.budget)}, planned peak {peak_text(plan.peak)}{side_by_side}{spare}:"]
    if not plan.placement.is_on_card:
        host_words = f"; on the host {peak_text(plan.host)}" if plan.host else ""
        lines.append(f"  {plan.placement.describe(blocks)}{host_words}")
    for bucket in plan.buckets:
        longest = f"{bucket.seconds:6.2f} s" if unit == SECONDS else unit.text(bucket.seconds)
        recomputed = f", {min(bucket.recomputed_blocks, blocks)} of {blocks} blocks recomputed"
        lines.append(
            f"  up to {longest}: micro-batch of {bucket.utterances}, "
            f"{peak_text(bucket.peak)}{recomputed if bucket.recomputed_blocks else ''}"
        )
    return "\n".join(lines)


def model_state_bytes(model: torch.nn.Module, optimizer: Iterable[torch.Tensor]) -> int:
    """Return the bytes of weights, gradients and optimizer tensors, without the optimizer's step counters.

    A frozen parameter counts with its weight only: 4 bytes, or 2 in half precision.
    """
    # The step counters are the 0-dimensional tensors.
    optimizer_bytes = sum(tensor.nbytes for tensor in optimizer if tensor.dim())
    # A trained weight has a gradient of its size.
    weights = sum((2 if weight.requires_grad else 1) * weight.nbytes for weight in model.parameters())
    return weights + optimizer_bytes
