"""Peak memory of a training step, measured by running the step on tensors without data.

The actual training step runs on tensors that have a shape but no data (shapes.py), and the bytes of all live storages
are counted at each operation, so that no separate memory model has to match the code. For a CUDA GPU, sizes are rounded
as its allocator does, and autocast is made to behave as on CUDA; costs that a trace cannot see are in devices.py.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from konkanivani.base.lengths import SAMPLE_RATE, Lengths
from konkanivani.data.batch import Batch, GlobalBatch, largest_batch
from konkanivani.decoding.ctc import argmax_tokens
from konkanivani.decoding.decode import Decode
from konkanivani.decoding.network import Network, decoder_of
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.live_bytes import LiveBytes
from konkanivani.memory.plan import model_state_bytes
from konkanivani.memory.shapes import CARD, HOST, Shapes
from konkanivani.model.architecture import Architecture
from konkanivani.model.asr import SpeechNetwork, trained_parameters
from konkanivani.model.decoder import FIRST_CAPACITY
from konkanivani.model.front_end import FeatureExtractor
from konkanivani.model.kernels.packing import PackedEncoder


@dataclass(frozen=True)
class BatchShape:
    """Size of a micro-batch: number of utterances, seconds of each, tokens of each."""

    utterances: int
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors: the state (weights, gradients, optimizer) and the peak of each phase, state included.

    `host` is the peak in host memory of offloaded tensors.
    """

    state: int
    forward: int
    backward: int
    update: int
    host: int = 0

    @property
    def bytes(self) -> int:
        """Peak of the whole step."""
        return max(self.forward, self.backward, self.update)

    def side_by_side(self, count: int) -> "Peak":
        """Return the peak of `count` concurrent micro-batches, if their memory beyond the state peaks together."""
        forward, backward = (self.state + count * (phase - self.state) for phase in (self.forward, self.backward))
        return dataclasses.replace(self, forward=forward, backward=backward)


class TracedParts(Protocol):
    """Parts of a training step that a trace uses; a dataclass with a field `read`, the function for device reads."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model."""

    @property
    def model(self) -> SpeechNetwork:
        """The model."""

    @property
    def forward(self) -> Any:
        """The forward pass, a dataclass."""

    @property
    def optimizer(self) -> Any:
        """The optimizer."""

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that persist between steps."""


Parts = TypeVar("Parts", bound=TracedParts)


@dataclass(frozen=True)
class TracedStep(Generic[Parts]):
    """Functions to trace. They are parameters because this package does not import the training step.

    `build` creates the parts on a CPU from a front end, `train` runs a step on a global batch, `recognize` decodes a
    batch.
    """

    build: Callable[[FeatureExtractor], Parts]
    train: Callable[[Parts, GlobalBatch, int], object]
    recognize: Callable[[Any, Batch, Decode], object]


class StepTracer(Generic[Parts]):
    """Tracer of one model's steps for one device. Building it takes a second, a trace a tenth of a second or more."""

    def __init__(self, step: TracedStep[Parts], front_end: torch.nn.Module, costs: DeviceCosts) -> None:
        """Build the step's parts inside the tracing mode; `front_end` is a real module."""
        self._mode = Shapes()
        self._step = step
        self.costs = costs
        # A copy, because its buffers are replaced by tensors without data.
        front_end = copy.deepcopy(front_end).cpu()
        with self._mode:
            for module in front_end.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, self._mode.from_tensor(buffer))
            parts = step.build(front_end)
            gradients = [torch.empty_like(parameter) for parameter in trained_parameters(parts.model)]
        encoder = parts.model.encoder
        # A CPU skips padding by packing, a GPU pads. Packed as one utterance takes the same memory in fewer operators.
        if isinstance(encoder, PackedEncoder):
            encoder.packs = not costs.is_cuda
            encoder.packs_as_one = True
        # State of a micro-batch after the first one: gradients exist and stay allocated, so that zero_grad must not
        # drop them.
        parts.optimizer.zero_grad = lambda: None
        for parameter, gradient in zip(trained_parameters(parts.model), gradients, strict=True):
            parameter.grad = gradient
        # The trace uses a CPU's autocast, which runs layer norms in half precision; CUDA's runs them in fp32.
        if costs.is_cuda and parts.forward.amp_dtype is not None:
            for module in parts.model.modules():
                if isinstance(module, torch.nn.LayerNorm):
                    module.__class__ = LayerNormInFull
        # A tensor without data has no values to read: .item() and .tolist() would fail.
        self._parts = dataclasses.replace(parts, read=lambda numbers: [0.0] * numbers.numel())

    @property
    def blocks(self) -> int:
        """Number of blocks that can be recomputed."""
        return len(self._parts.model.blocks)

    @property
    def is_half(self) -> bool:
        """Whether the model runs in half precision."""
        return self._parts.forward.amp_dtype is not None

    def state(self) -> int:
        """Return the bytes of weights, gradients and optimizer state on the device."""
        # With offloading, a part of the state is on the host: count by device.
        if not (self._parts.forward.weights and self.costs.is_cuda):
            return model_state_bytes(self._parts.model, self._parts.optimizer.tensors)
        state, _ = self._counted()
        self._count_state(state, with_gradients=True)
        return state.live

    def trace(self, shape: BatchShape, recompute: RecomputePolicy) -> Peak:
        """Trace a step at a micro-batch of this size that is not the step's first one."""
        batch = self._batch(shape)
        tokens = shape.utterances * shape.tokens
        return self.trace_global_batch(GlobalBatch((batch,), tokens, shape.utterances, 0.0, 0.0), recompute)

    def trace_global_batch(self, global_batch: GlobalBatch, recompute: RecomputePolicy) -> Peak:
        """Trace a step over a global batch of real or traced tensors; of its inputs, count only the largest."""
        live, host = self._counted()
        phases = _Phases(live)
        # One micro-batch at a time: the planner adds up concurrent ones.
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
        # All inputs were counted, but in training only one micro-batch is on the device at a time.
        others = sum(sizes) - max(sizes)
        return Peak(
            state=self.state(),
            forward=phases.peaks["forward"] - others,
            # Attention allocates its workspace inside the kernel, where the trace cannot see it.
            backward=phases.peaks["backward"]
            - others
            + self._attention_workspace(largest_batch(global_batch.micro_batches)),
            update=phases.peaks["update"] - others,
            host=host.peak if self.costs.is_cuda else 0,
        )

    def trace_validation(self, shape: BatchShape) -> int:
        """Return the peak bytes of recognising a batch, weights and optimizer state included, without gradients."""
        live, _ = self._counted()
        self._count_state(live, with_gradients=False)
        forward = dataclasses.replace(self._parts.forward, monitor=_Phases(live))
        forward.model.eval()
        batch = self._batch(shape)
        with self._mode, torch.no_grad(), live, forward.decoder_on_device():
            self._step.recognize(forward, batch, _greedy_on_the_device)
        return live.peak

    def _counted(self) -> tuple[LiveBytes, LiveBytes]:
        """Return byte counters of the device and of host memory; a CPU counts both as the device."""
        return LiveBytes(self.costs.rounding, CARD if self.costs.is_cuda else None), LiveBytes(place=HOST)

    def _count_state(self, live: LiveBytes, with_gradients: bool) -> None:
        live.count(self._parts.state_tensors())
        if with_gradients:
            gradients = (parameter.grad for parameter in trained_parameters(self._parts.model))
            live.count(gradient for gradient in gradients if gradient is not None)

    def _attention_workspace(self, batch: Batch) -> int:
        architecture = self._parts.architecture
        frames = architecture.framing.encoded_length(max(batch.sample_lengths))
        return self.costs.attention_workspace(batch.size, frames, architecture.model.d_model, self.is_half)

    def _batch(self, shape: BatchShape) -> Batch:
        """Return a batch without data; with several utterances, one is a frame shorter, because padding costs masks."""
        samples = round(shape.seconds * SAMPLE_RATE)
        tokens = max(1, shape.tokens)
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
    """Replacement of the memory monitor that records the traced peak of each phase in bytes."""

    def __init__(self, live: LiveBytes) -> None:
        self.peaks: dict[str, int] = {}
        self._live = live

    def end_phase(self, phase: str) -> None:
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._live.restart_peak())

    def maybe_empty_cache(self) -> None: ...


def _greedy_on_the_device(model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
    """Run the device part of greedy decoding; the rest runs on the host.

    Without CTC, the decoder's cache grows until a hypothesis has the decoder's maximum number of tokens or, if there is
    no maximum, one token per encoder frame.
    """
    if model.ctc_head is not None:
        argmax_tokens(model, encoded)
        return []
    decoder = decoder_of(model)
    cache = decoder.begin(encoded, encoded_lengths, beam=1)
    tokens = torch.empty(len(encoded), 1, dtype=torch.long)
    most = encoded.shape[1] if math.isinf(decoder.most_tokens) else decoder.most_tokens
    while cache.length < most:
        decoder.output(decoder.step(tokens, cache)).double().log_softmax(dim=-1)
        cache.length = max(FIRST_CAPACITY, 2 * cache.length - 2)  # next length at which the cache has to be enlarged
    return []


class LayerNormInFull(torch.nn.LayerNorm):
    """Layer norm that computes in fp32 under autocast on a CPU, as CUDA's autocast does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float() if torch.is_autocast_enabled("cpu") else x)
