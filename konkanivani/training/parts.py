"""What a training step works with, and the gradient that one part of it hands to the next."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from konkanivani.base.config import OptimizerConfig
from konkanivani.base.distributed import ALONE, Topology
from konkanivani.data.batch import Batch, Window
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.recovery import Cut, OomHistory
from konkanivani.model.architecture import Architecture
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.model.losses import LossCounts, LossSums
from konkanivani.training.forward import ForwardPass
from konkanivani.training.optimizer import Optimizer, later_parameters


@dataclass(frozen=True)
class WindowGradient:
    """The window's summed losses in nats, a term each, and its gradient's norm, which lies clipped in each `.grad`.

    `scale` is what the losses were multiplied by for the backward pass, and the gradient divided by since; `splits`
    counts how often the window ran out of memory and was begun again.
    """

    loss_sums: tuple[float, ...]
    norm: float
    scale: float
    splits: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether it can be applied."""
        return math.isfinite(self.norm) and math.isfinite(sum(self.loss_sums))


ComputeGradient = Callable[["GradientTask"], WindowGradient | None]
"""A way to the gradient of a window: of one process alone, summed over ranks, or of weights that ranks share.

It is in the parameters' `.grad`, unscaled and clipped; None, and none there, if interrupted.
"""


@dataclass(frozen=True)
class StepParts:
    """Everything that a step works with."""

    forward: ForwardPass
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    schedule: OptimizerConfig
    total_steps: int
    seed: int
    splits: OomHistory
    compute_gradient: ComputeGradient
    topology: Topology = ALONE
    read: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist
    """The step's only read from the device; a trace, whose tensors hold no numbers, puts zeros in its place."""

    @property
    def architecture(self) -> Architecture:
        """Which recogniser is trained."""
        return self.forward.architecture

    @property
    def model(self) -> KonkaniVaniASR:
        """The model that is trained."""
        return self.forward.model

    def state_tensors(self) -> list[torch.Tensor]:
        """What stays in memory from step to step: weights, buffers, the front end's, the optimizer's state."""
        front_end = self.forward.front_end
        buffers = list(front_end.buffers()) if isinstance(front_end, torch.nn.Module) else []
        copies = self.forward.weights.copies
        return [*self.model.parameters(), *self.model.buffers(), *copies, *buffers, *self.optimizer.tensors]

    @contextmanager
    def stage(self, step: int) -> Iterator[None]:
        """While it lasts, no gradient is made for what a step of this number is too early for (--freeze_steps)."""
        is_early = step < (self.architecture.tuning.freeze_steps or 0)
        later = later_parameters(self.model) if is_early else []
        try:
            for parameter in later:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in later:
                parameter.requires_grad_(True)

    def recomputing(self, policy: RecomputePolicy) -> "StepParts":
        """The same step under another policy of what is recomputed in the backward pass."""
        return dataclasses.replace(self, forward=dataclasses.replace(self.forward, recompute=policy))


ForwardAndBackward = Callable[[StepParts, Batch, LossCounts], LossSums]
"""Adds one micro-batch's gradient, scaled, to the parameters' `.grad`; its summed losses."""


@dataclass(frozen=True)
class GradientTask:
    """What a gradient is asked of: a window, for the optimizer step of this number."""

    parts: StepParts
    window: Window
    step: int
    forward_and_backward: ForwardAndBackward
    is_interrupted: Callable[[], bool] = lambda: False

    @property
    def cut(self) -> Cut:
        """The window's micro-batches as the forward pass runs them."""
        return self.parts.forward.cut(self.window.micro_batches)


def loss_counts(window: Window) -> LossCounts:
    """What the losses of the window are divided by, however it is cut and divided."""
    return LossCounts(window.tokens, window.utterances)
