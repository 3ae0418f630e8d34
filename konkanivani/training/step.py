"""One optimizer step: global batch -> micro-batches -> forward -> backward -> gradient -> update.

Evaluation shares the forward pass: waveforms in, hidden states and summed losses out.

If memory runs out in a micro-batch, the global batch is computed again by a plan that needs less memory: smaller
micro-batches, all blocks recomputed or shorter chunks (`MicroBatchPlan.smaller`). With sharded weights the process
restarts instead (gradient.py). The update allocates nothing, so it needs no retry.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from konkanivani.config import OptimizerConfig
from konkanivani.data.batching import Batch, GlobalBatch, order_for_concurrency, split_batch
from konkanivani.distributed import ALONE, Topology
from konkanivani.lengths import CHUNK_FRAMES
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.memory.recovery import MicroBatchPlan, OomHistory
from konkanivani.memory.weights import OffloadedWeights
from konkanivani.models.architecture import Architecture
from konkanivani.models.asr import ASROutput, LossCounts, LossSums, Objective, SpeechNetwork
from konkanivani.models.conformer import WrapBlock
from konkanivani.models.front_end import FeatureExtractor
from konkanivani.training.optimizer_state import Optimizer, RateSchedule, non_head_parameters, set_learning_rate


@dataclass(frozen=True)
class ForwardPass:
    """Model and front end on one device, in one precision.

    Args:
        recompute: selects the recomputed blocks by the length of a batch's longest input, in the unit of the
            architecture's framing: seconds or tokens.
        amp_dtype: autocast dtype; None in full precision.
        chunk_frames: longer sequences of encoder frames or tokens are processed in chunks of this length, with the same
            result. Whisper and T5 do not use it: their inputs are bounded.
        concurrent_micro_batches: micro-batches that training runs in parallel.
    """

    architecture: Architecture
    model: SpeechNetwork
    front_end: FeatureExtractor
    recompute: Callable[[float], WrapBlock]
    device: torch.device
    amp_dtype: torch.dtype | None
    objective: Objective
    weights: OffloadedWeights | None = None
    """Provider of the weights that are offloaded or kept in half precision beside fp32 masters; None without either."""
    chunk_frames: int = CHUNK_FRAMES
    concurrent_micro_batches: int = 1

    def __call__(self, batch: Batch) -> tuple[ASROutput, LossSums]:
        """Return the output of the model for a batch and its summed losses, all on the device."""
        batch = batch.to(self.device)
        features, feature_lengths = self.front_end(batch.waveforms, batch.sample_lengths, batch.augment_seeds)
        with self.autocast():
            # Recomputation is the outer wrapper: its second forward pass fetches the block's weights again.
            wrap_block = self.with_weights(self.recompute(batch.longest_seconds))
            output = self.model(features, feature_lengths, batch.decoder_tokens, wrap_block, self.chunk_frames)
            return output, self.model.loss_sums(output, batch, self.objective, self.chunk_frames)

    def with_weights(self, wrap_block: WrapBlock) -> WrapBlock:
        """Return a wrapper of blocks that also provides offloaded weights on the device."""
        return self.weights.fetching_inside(wrap_block) if self.weights else wrap_block

    def plan(self, micro_batches: tuple[Batch, ...]) -> MicroBatchPlan:
        """Return the plan that runs these micro-batches; a single one is halved if two are to run in parallel."""
        # A micro-batch of one utterance cannot be halved and runs alone.
        if self.concurrent_micro_batches > 1 and len(micro_batches) == 1 and micro_batches[0].size > 1:
            micro_batches = split_batch(micro_batches[0])
        concurrent_micro_batches = max(1, min(self.concurrent_micro_batches, len(micro_batches)))
        in_order = order_for_concurrency(micro_batches, concurrent_micro_batches)
        return MicroBatchPlan(
            in_order, self.recompute == RecomputePolicy("always"), self.chunk_frames, concurrent_micro_batches
        )

    def with_plan(self, plan: MicroBatchPlan) -> "ForwardPass":
        """Return the same forward pass with the recomputation and the chunk length of the plan."""
        recompute = RecomputePolicy("always") if plan.recomputes_all else self.recompute
        return dataclasses.replace(self, recompute=recompute, chunk_frames=plan.chunk_frames)

    def refresh_weights(self) -> None:
        """Update the copies of offloaded weights, before each global batch and each evaluation."""
        if self.weights:
            self.weights.refresh()

    def decoder_on_device(self) -> AbstractContextManager[None]:
        """Return a context that keeps the whole decoder on the device while tokens are generated, without gradients."""
        return self.weights.at_hand(self.model) if self.weights else nullcontext()

    def autocast(self) -> AbstractContextManager:
        """Return the autocast context of the model."""
        # Without autocast's cache of half-precision weights: a forward pass uses each weight once (a head's once per
        # chunk), but the cache would keep all of them until its end, 2 bytes per parameter, when recomputation keeps
        # nothing else.
        enabled = self.amp_dtype is not None
        return torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=enabled, cache_enabled=False)


@dataclass(frozen=True)
class StepGradient:
    """Summed losses and gradient norm of a global batch; the gradient itself is in each parameter's `.grad`, clipped.

    Args:
        loss_sums: summed losses in nats, one per term of the objective.
        norm: norm of the gradient before clipping.
        scale: factor of the losses in the backward pass, by which the gradient has been divided.
        splits: OOM retries of the global batch.
    """

    loss_sums: tuple[float, ...]
    norm: float
    scale: float
    splits: int = 0

    @property
    def is_finite(self) -> bool:
        """Return whether the gradient may be applied."""
        return math.isfinite(self.norm) and math.isfinite(sum(self.loss_sums))


ComputeGradient = Callable[["GradientTask"], StepGradient | None]
"""Computes the gradient of a global batch: a function of gradient.py, or `GraphedGradient` (graphs.py).

The gradient is stored in the parameters' `.grad`, unscaled and clipped. If interrupted, the result is None and no
`.grad` is set. If memory runs out, all but `sharded_gradient` try again: the gradient is dropped and the random
generators are seeded again; weights and optimizer are unchanged.
"""


@dataclass(frozen=True)
class StepParts:
    """Objects that an optimizer step works with.

    Args:
        schedule: settings of the optimizer and of its learning rate.
        rates: learning rate by step, from `schedule` and the length of the run.
        oom_history: sizes of micro-batches that did not fit, which are split before the first attempt.
    """

    forward: ForwardPass
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    schedule: OptimizerConfig
    rates: RateSchedule
    seed: int
    oom_history: OomHistory
    compute_gradient: ComputeGradient
    monitor: MemoryMonitor
    topology: Topology = ALONE

    @property
    def total_steps(self) -> int:
        """Return the optimizer steps of the whole run."""
        return self.rates.run_steps

    @property
    def architecture(self) -> Architecture:
        """Architecture of the trained model."""
        return self.forward.architecture

    @property
    def model(self) -> SpeechNetwork:
        """The trained model."""
        return self.forward.model

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that stay allocated between steps: weights, buffers and optimizer state."""
        front_end = self.forward.front_end
        # A FeatureExtractor may be a plain function.
        buffers = list(front_end.buffers()) if isinstance(front_end, torch.nn.Module) else []
        copies = self.forward.weights.copies if self.forward.weights else []
        return [*self.model.parameters(), *self.model.buffers(), *copies, *buffers, *self.optimizer.tensors]

    @contextmanager
    def stage(self, step: int) -> Iterator[None]:
        """Disable gradients of all parameters but the heads' while `step` is less than --freeze_steps."""
        is_early = step < (self.architecture.tuning.freeze_steps or 0)
        # Only trainable parameters, so those that are frozen for the whole run stay frozen.
        later = non_head_parameters(self.model) if is_early else []
        try:
            for parameter in later:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in later:
                parameter.requires_grad_(True)

    def recomputing(self, policy: RecomputePolicy) -> "StepParts":
        """Return the same step with another recomputation policy."""
        return dataclasses.replace(self, forward=dataclasses.replace(self.forward, recompute=policy))


class ForwardAndBackward(Protocol):
    """Type of `forward_and_backward`: adds the scaled gradient of one micro-batch to the parameters' `.grad`.

    `train_step` passes it, and tests replace it to inject faults.
    """

    def __call__(self, parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        """Return the summed losses of the micro-batch."""
        ...


@dataclass(frozen=True)
class GradientTask:
    """Input of a gradient computation: the global batch of optimizer step `step`."""

    parts: StepParts
    global_batch: GlobalBatch
    step: int
    forward_and_backward: ForwardAndBackward
    is_interrupted: Callable[[], bool] = lambda: False

    @property
    def plan(self) -> MicroBatchPlan:
        """Plan of the global batch's micro-batches."""
        return self.parts.forward.plan(self.global_batch.micro_batches)


def loss_counts(global_batch: GlobalBatch) -> LossCounts:
    """Return the divisors of the losses, which depend on the global batch only, not on its micro-batches or ranks."""
    return LossCounts(global_batch.tokens, global_batch.utterances)


@dataclass(frozen=True)
class StepReport:
    """Result of a step; a skipped step has changed no weight.

    Args:
        loss, ctc_loss, attention_loss: nats per token over the global batch; None for a loss that is not used.
        scale: loss scale of the backward pass.
        splits: OOM retries of the step, of any kind.
    """

    loss: float
    ctc_loss: float | None
    attention_loss: float | None
    gradient_norm: float
    learning_rate: float
    scale: float
    is_skipped: bool
    splits: int


def train_step(
    parts: StepParts,
    global_batch: GlobalBatch,
    step: int,
    is_interrupted: Callable[[], bool] = lambda: False,
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepReport | None:
    """Update the weights from one global batch, or return None without a change if interrupted between micro-batches.

    Everything but the update runs inside of `interruptible`, because no weight has changed until then. A ResourceError
    names an utterance that does not fit in memory even alone.
    """
    # The update runs outside of the block: a signal must not end the process while weights are half updated.
    with interruptible(), parts.stage(step):
        gradient = parts.compute_gradient(GradientTask(parts, global_batch, step, forward_and_backward, is_interrupted))
    return None if gradient is None else update(parts, gradient, loss_counts(global_batch), step)


def forward_and_backward(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
    """Add the scaled contribution of one micro-batch to the parameters' `.grad`; return its summed losses."""
    # The output gets no name here: a local variable would keep the encoder output alive through the backward pass.
    sums = parts.forward(batch)[1]
    parts.monitor.end_phase("forward")
    parts.scaler.scale(parts.forward.objective.total(sums, counts)).backward()
    parts.monitor.end_phase("backward")
    # Detached: the graph would otherwise stay alive through the next micro-batch.
    return tuple(summed.detach() for summed in sums)


def update(parts: StepParts, gradient: StepGradient, counts: LossCounts, step: int) -> StepReport:
    """Apply the gradient of the global batch if it is finite.

    Allocates nothing (see `Optimizer` in optimizer_state.py) for contiguous gradients, as autograd makes them, so it
    cannot fail halfway.
    """
    rate = parts.rates.rate(parts.schedule, step)
    if gradient.is_finite:
        begun = parts.rates.delayed_warmup_factor(parts.schedule, parts.architecture.tuning, step)
        # Before the step, since the rates of the groups are not part of the checkpoint.
        set_learning_rate(parts.optimizer, rate, begun)
        parts.optimizer.step()
    # Also frees the gradient of a skipped update.
    parts.optimizer.zero_grad()
    # GradScaler.step() is not used: the norm has been checked above. update() uses the overflow flag set by unscale_().
    parts.scaler.update()
    parts.monitor.end_phase("update")
    losses = parts.forward.objective.losses(gradient.loss_sums, counts)
    return StepReport(
        loss=losses.all,
        ctc_loss=losses.ctc,
        attention_loss=losses.attention,
        gradient_norm=gradient.norm,
        learning_rate=rate,
        scale=gradient.scale,
        is_skipped=not gradient.is_finite,
        splits=gradient.splits,
    )
