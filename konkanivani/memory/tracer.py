"""The peak of memory found by running the real training step on tensors without data.

The step that trains is run on tensors that have shapes and no data (shapes.py), and the bytes of the storages that live
at each moment are counted: no formula of the model is kept beside the model. For a CUDA card the sizes are rounded as
its allocator does, and autocast is made to do what it does there; what no trace sees is in devices.py.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from konkanivani.base.lengths import SAMPLE_RATE, Lengths
from konkanivani.data.batch import Batch, GlobalBatch, largest_batch
from konkanivani.decoding.ctc import argmax_tokens
from konkanivani.decoding.decode import Decode
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.live_bytes import LiveBytes
from konkanivani.memory.plan import model_state_bytes
from konkanivani.memory.shapes import CARD, HOST, Shapes
from konkanivani.model.architecture import Architecture
from konkanivani.model.asr import KonkaniVaniASR, trained_parameters
from konkanivani.model.cache import FIRST_ROOM
from konkanivani.model.front_end import FeatureExtractor


@dataclass(frozen=True)
class BatchShape:
    """A micro-batch by its size: so many utterances of so many seconds, with so many tokens each."""

    utterances: int
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors: the state (weights, gradients, optimizer) and the peaks of the phases, state included.

    Beside a card, `host` is the peak of what lies on the host because its place is not on the card.
    """

    state: int
    forward: int
    backward: int
    update: int
    host: int = 0

    @property
    def bytes(self) -> int:
        """The peak of the whole step."""
        return max(self.forward, self.backward, self.update)

    def side_by_side(self, count: int) -> "Peak":
        """Of so many micro-batches at once: what each takes beside the state may be there at one time."""
        forward, backward = (self.state + count * (phase - self.state) for phase in (self.forward, self.backward))
        return dataclasses.replace(self, forward=forward, backward=backward)


class TracedParts(Protocol):
    """What a trace needs of the parts of a step, a dataclass with `read` for what reads from the device."""

    architecture: Architecture
    model: KonkaniVaniASR
    forward: Any
    optimizer: Any

    def state_tensors(self) -> list[torch.Tensor]:
        """What stays in memory from step to step."""


@dataclass(frozen=True)
class TracedStep:
    """The functions that are traced; they are handed in, since the memory that a step takes is known below the step.

    `build` makes the parts on a CPU from a front end, `train` steps on a window, `recognize` on a batch.
    """

    build: Callable[[FeatureExtractor], TracedParts]
    train: Callable[[TracedParts, GlobalBatch, int], object]
    recognize: Callable[[Any, Batch, Decode], object]


class StepTracer:
    """Traces steps of one model for one device. Building it takes a second, a trace a tenth of one or more."""

    def __init__(self, step: TracedStep, front_end: torch.nn.Module, costs: DeviceCosts) -> None:
        """The step's parts are built inside the trace's mode; `front_end` is real."""
        self._mode, self._step, self.costs = Shapes(), step, costs
        front_end = copy.deepcopy(front_end).cpu()
        with self._mode:
            for module in front_end.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, self._mode.from_tensor(buffer))
            parts = step.build(front_end)
            gradients = [torch.empty_like(parameter) for parameter in trained_parameters(parts.model)]
        encoder = parts.model.encoder
        encoder.packs = not costs.is_cuda
        encoder.packs_as_one = True
        # As a second micro-batch finds them: the first one's gradients are there, and nothing takes them away.
        parts.optimizer.zero_grad = lambda: None
        for parameter, gradient in zip(trained_parameters(parts.model), gradients, strict=True):
            parameter.grad = gradient
        if costs.is_cuda and parts.forward.amp_dtype is not None:
            for module in parts.model.modules():
                if isinstance(module, torch.nn.LayerNorm):
                    module.__class__ = LayerNormInFull
        self._parts = dataclasses.replace(parts, read=lambda numbers: [0.0] * numbers.numel())

    @property
    def blocks(self) -> int:
        """Blocks of the model that can be recomputed."""
        return len(self._parts.model.blocks)

    @property
    def is_half(self) -> bool:
        """Whether the model runs in half precision."""
        return self._parts.forward.amp_dtype is not None

    def state(self) -> int:
        """Bytes of weights, gradients and optimizer, on the device."""
        if not (self._parts.forward.weights and self.costs.is_cuda):
            return model_state_bytes(self._parts.model, self._parts.optimizer.tensors)
        state, _ = self._counted()
        self._count_state(state, with_gradients=True)
        return state.live

    def trace(self, shape: BatchShape, recompute: RecomputePolicy) -> Peak:
        """The peaks of a step at a micro-batch of this size, not the step's first."""
        batch = self._batch(shape)
        tokens = shape.utterances * shape.tokens
        return self.trace_global_batch(GlobalBatch((batch,), tokens, shape.utterances, 0.0, 0.0), recompute)

    def trace_global_batch(self, global_batch: GlobalBatch, recompute: RecomputePolicy) -> Peak:
        """The peaks of a step over a window of real or traced tensors; its other micro-batches wait elsewhere."""
        live, host = self._counted()
        phases = _Phases(live)
        # One after another: what goes side by side is added up by the planner.
        forward = dataclasses.replace(
            self._parts.forward, recompute=recompute, monitor=phases, concurrent_micro_batches=1
        )
        parts = dataclasses.replace(self._parts, forward=forward)
        for counted in (live, host):
            self._count_state(counted, with_gradients=True)
        with self._mode:
            batches = tuple(batch.with_each(self._mode.from_tensor) for batch in global_batch.micro_batches)
            inputs = [batch.tensors() for batch in batches]
            live.count(tensor for tensors in inputs for tensor in tensors)
            sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in inputs]
            with live, host if parts.forward.weights else nullcontext():
                self._step.train(parts, dataclasses.replace(global_batch, micro_batches=batches), 0)
        others = sum(sizes) - max(sizes)
        return Peak(
            state=self.state(),
            forward=phases.peaks["forward"] - others,
            backward=phases.peaks["backward"]
            - others
            + self._attention_workspace(largest_batch(global_batch.micro_batches)),
            update=phases.peaks["update"] - others,
            host=host.peak if self.costs.is_cuda else 0,
        )

    def trace_validation(self, shape: BatchShape) -> int:
        """Bytes at the peak of recognising such a batch, weights and optimizer included; no gradients are there."""
        live, _ = self._counted()
        self._count_state(live, with_gradients=False)
        forward = dataclasses.replace(self._parts.forward, monitor=_Phases(live))
        forward.model.eval()
        batch = self._batch(shape)
        with self._mode, torch.no_grad(), live, forward.decoder_on_device():
            self._step.recognize(forward, batch, _greedy_on_the_device)
        return live.peak

    def _counted(self) -> tuple[LiveBytes, LiveBytes]:
        """Counts of what is on the device, which a CPU shares with the host, and of what is on the host."""
        return LiveBytes(self.costs.rounding, CARD if self.costs.is_cuda else None), LiveBytes(place=HOST)

    def _count_state(self, live: LiveBytes, with_gradients: bool) -> None:
        live.count(self._parts.state_tensors())
        if with_gradients:
            live.count(parameter.grad for parameter in trained_parameters(self._parts.model))

    def _attention_workspace(self, batch: Batch) -> int:
        architecture = self._parts.architecture
        frames = architecture.framing.encoded_length(max(batch.sample_lengths))
        return self.costs.attention_workspace(batch.size, frames, architecture.model.d_model, self.is_half)

    def _batch(self, shape: BatchShape) -> Batch:
        """A batch in which one utterance is a little shorter, where there are several: padding costs masks."""
        samples, tokens = round(shape.seconds * SAMPLE_RATE), max(1, shape.tokens)
        shorter = 1 if shape.utterances > 1 else 0
        a_frame_less = max(1, samples - self._parts.architecture.framing.encoder_hop)
        with self._mode:
            return Batch(
                utterance_ids=tuple(map(str, range(shape.utterances))),
                waveforms=torch.empty(shape.utterances, samples),
                sample_lengths=(samples,) * (shape.utterances - shorter) + (a_frame_less,) * shorter,
                tokens=torch.empty(shape.utterances, tokens, dtype=torch.long),
                token_lengths=(tokens,) * shape.utterances,
                decoder_tokens=torch.empty(shape.utterances, tokens + 1, dtype=torch.long),
                targets=torch.empty(shape.utterances, tokens + 1, dtype=torch.long),
                augment_seeds=None,
            )


class _Phases:
    """In the place of the monitor: the traced peak of each phase, in bytes."""

    def __init__(self, live: LiveBytes) -> None:
        self.peaks: dict[str, int] = {}
        self._live = live

    def end_phase(self, phase: str) -> None:
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._live.restart_peak())

    def maybe_empty_cache(self) -> None: ...


def _greedy_on_the_device(model: KonkaniVaniASR, encoded: torch.Tensor, lengths: Lengths) -> list[list[int]]:
    """What greedy decoding does on the device; the rest of it is the host's.

    Without CTC it is the decoder's, whose cache grows until a hypothesis has as many tokens as it takes, or, where it
    takes any number, as there are frames.
    """
    if model.ctc_head is not None:
        argmax_tokens(model, encoded)
        return []
    cache = model.decoder.begin(encoded, lengths, beam=1)
    tokens = torch.empty(len(encoded), 1, dtype=torch.long)
    most = encoded.shape[1] if math.isinf(model.decoder.most_tokens) else model.decoder.most_tokens
    while cache.length < most:
        model.decoder.output(model.decoder.step(tokens, cache)).double().log_softmax(dim=-1)
        cache.length = max(FIRST_ROOM, 2 * cache.length - 2)  # to where there is no more room
    return []


class LayerNormInFull(torch.nn.LayerNorm):
    """Under a CPU's autocast, what CUDA's does and a CPU's does not: takes and gives fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float() if torch.is_autocast_enabled("cpu") else x)
