"""What is planned for a run: how its micro-batches are cut and which blocks they recompute, by length."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from konkanivani.base.errors import CheckpointError
from konkanivani.base.units import MIB, budget_text, peak_text
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.weights.placement import ON_CARD, Placement
from konkanivani.model.asr import parameter_count

STATE_BYTES = 16  # a trained parameter's weight, gradient and AdamW's two moments in fp32
TRAINED_BYTES = 8  # its weight and gradient


@dataclass(frozen=True)
class BucketPlan:
    """Utterances of up to `seconds` and `tokens`: so many at once, the first blocks recomputed, the peak in bytes.

    0 utterances where not even one fits; `peak` is then what one would take.
    """

    seconds: float
    tokens: int
    utterances: int
    recomputed_blocks: int
    peak: int


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of a run, buckets ascending in seconds; all sizes in bytes.

    `forward`, `backward` and `update` are the planned peaks of the costliest bucket as the device's allocator counts
    them (without `context`, which the device takes for itself), `validation` that of validating `validation_seconds` of
    padded audio at once. `conditions` is a number that stands for the device and all settings that the plan depends on.
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
    """Micro-batches that are run side by side."""
    placement: Placement = ON_CARD
    """Where the weights are."""
    host: int = 0
    """Of the costliest bucket what lies on the host beside a card."""

    def recompute_policy(self) -> RecomputePolicy:
        """How many blocks are recomputed at what length."""
        return RecomputePolicy("auto", tuple((bucket.seconds, bucket.recomputed_blocks) for bucket in self.buckets))

    def planned_peaks(self, before: float) -> dict[str, float]:
        """The planned peak of each phase in MiB as the monitor measures it, on a process that took `before` MiB."""
        phases = {"forward": self.forward, "backward": self.backward, "update": self.update}
        if self.validation:
            phases["validation"] = self.validation
        return {phase: before + size / MIB for phase, size in phases.items()}

    @property
    def peak(self) -> int:
        """The largest planned peak of training, everything included."""
        return max(bucket.peak for bucket in self.buckets)

    def state_dict(self) -> dict[str, object]:
        """The plan's numbers, for the checkpoint."""
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
        }


def read_plan(state: Mapping[str, object]) -> MemoryPlan:
    """The plan that `state_dict` wrote; a CheckpointError where it is none."""
    try:
        buckets = tuple(
            BucketPlan(float(seconds), int(tokens), int(utterances), int(blocks), int(peak))
            for seconds, tokens, utterances, blocks, peak in state["buckets"]
        )
        peaks = [int(peak) for peak in state["peaks"]]
        offloaded_blocks, half_precision, host, prefetch = state.get("placement", (0, False, 0, False))
        plan = MemoryPlan(
            *(int(state[name]) for name in ("conditions", "budget", "context")),
            buckets,
            float(state["validation_seconds"]),
            *peaks,
            concurrent_micro_batches=int(state.get("at_once", 1)),  # a checkpoint of before there was a choice
            placement=Placement(int(offloaded_blocks), bool(half_precision), bool(prefetch)),
            host=int(host),
        )
    except (KeyError, TypeError, ValueError):
        raise CheckpointError("The checkpoint's memory plan cannot be read. Use --replan to make a new one.") from None
    ascending = all(one.seconds < other.seconds for one, other in zip(buckets, buckets[1:], strict=False))
    if (
        not buckets
        or not ascending
        or plan.concurrent_micro_batches < 1
        or min(bucket.utterances for bucket in buckets) < 1
    ):
        raise CheckpointError("The checkpoint's memory plan is invalid. Use --replan to make a new one.")
    return plan


def plan_sentences(plan: MemoryPlan, blocks: int) -> str:
    """The plan for a person."""
    side_by_side = (
        f", {plan.concurrent_micro_batches} micro-batches in parallel" if plan.concurrent_micro_batches > 1 else ""
    )
    lines = [f"Memory plan for {budget_text(plan.budget)}, planned peak {peak_text(plan.peak)}{side_by_side}:"]
    if not plan.placement.is_on_card:
        beside = f"; on the host {peak_text(plan.host)}" if plan.host else ""
        lines.append(f"  {plan.placement.describe(blocks)}{beside}")
    for bucket in plan.buckets:
        recomputed = f", {min(bucket.recomputed_blocks, blocks)} of {blocks} blocks recomputed"
        lines.append(
            f"  up to {bucket.seconds:6.2f} s: micro-batch of {bucket.utterances}, "
            f"{peak_text(bucket.peak)}{recomputed if bucket.recomputed_blocks else ''}"
        )
    return "\n".join(lines)


def model_state_bytes(model: torch.nn.Module, optimizer: Iterable[torch.Tensor]) -> int:
    """Bytes of the model's weights, gradients and the optimizer's tensors, but its counts of steps.

    Of what is frozen, the weights alone: 4 bytes a number, or 2.
    """
    beside = sum(tensor.nbytes for tensor in optimizer if tensor.dim())
    frozen = sum(weight.nbytes for weight in model.parameters() if not weight.requires_grad)
    return TRAINED_BYTES * parameter_count(model) + frozen + beside
