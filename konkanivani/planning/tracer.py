"""Peak memory of a training step, measured by running the step on tensors without data.

The actual training step runs on tensors that have a shape but no data (tensors.py), and the bytes of all live storages
are counted at each operation, so that no separate memory model has to match the code. For a CUDA GPU, sizes are rounded
as its allocator does, and autocast is made to behave as on CUDA; costs that a trace cannot see are in DeviceCosts.
"""

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.data.batching import Batch, GlobalBatch, largest_batch
from konkanivani.decoding.ctc import Network, argmax_tokens, decoder_of
from konkanivani.lengths import Lengths
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.memory.plan import RecomputePolicy, model_state_bytes
from konkanivani.models.asr import trained_parameters
from konkanivani.models.decoder import FIRST_CAPACITY
from konkanivani.models.front_end import FeatureExtractor
from konkanivani.ops.packing import PackedEncoder
from konkanivani.planning.tensors import TRACED_DEVICE, TRACED_HOST, LiveBytes, Shapes
from konkanivani.training.gradient import local_gradient
from konkanivani.training.optimizer_state import Optimizer
from konkanivani.training.step import StepParts, train_step
from konkanivani.training.validation import recognize


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

    def grown(self, factor: float) -> "Peak":
        """Return the peak with `factor` times the memory beyond the state, in forward and backward."""
        forward, backward = (
            self.state + round(factor * (phase - self.state)) for phase in (self.forward, self.backward)
        )
        return dataclasses.replace(self, forward=forward, backward=backward)


class StepTracer:
    """Tracer of one model's steps for one device. Building it takes a second, a trace a tenth of a second or more."""

    def __init__(
        self, build: Callable[[FeatureExtractor], StepParts], front_end: torch.nn.Module, costs: DeviceCosts
    ) -> None:
        """Build the step inside the tracing mode.

        Args:
            build: returns the parts of the step, on the traced device, with the front end that it is given.
            front_end: a real module, which is copied.
        """
        self._mode = Shapes()
        self.costs = costs
        front_end = copy.deepcopy(front_end).cpu()
        dense_buffers = {buffer: buffer.clone() for buffer in front_end.buffers()}
        with self._mode:
            for module in front_end.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    # A periodic window is a view of a window with one more sample, and a mode may count that sample.
                    setattr(module, name, self._mode.from_tensor(dense_buffers[buffer]))
            parts = build(front_end)
            # Every micro-batch but a step's first one finds gradients, and takes more memory than the first one.
            for parameter in trained_parameters(parts.model):
                parameter.grad = torch.empty_like(parameter)
        encoder = parts.model.encoder
        # A CPU skips padding by packing, a GPU pads. Packed as one utterance takes the same memory in fewer operators.
        if isinstance(encoder, PackedEncoder):
            encoder.packs = not costs.is_cuda
            encoder.packs_as_one = True
        # The trace uses a CPU's autocast, which runs layer norms in half precision; CUDA's runs them in fp32.
        if costs.is_cuda and parts.forward.amp_dtype is not None:
            for module in parts.model.modules():
                if isinstance(module, torch.nn.LayerNorm):
                    module.register_forward_pre_hook(_cast_input_to_fp32)
        self._parts = dataclasses.replace(
            parts,
            optimizer=_OptimizerWithoutReset(parts.optimizer),
            # A tensor without data has no values to read: .item() and .tolist() would fail.
            compute_gradient=functools.partial(local_gradient, read=_read_zeros),
        )

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
        state, _ = self._byte_counters()
        self._count_state(state, with_gradients=True)
        return state.live

    def trace(self, shape: BatchShape, recompute: RecomputePolicy) -> Peak:
        """Trace a step at a micro-batch of this size that is not the step's first one."""
        batch = self._batch(shape)
        tokens = shape.utterances * shape.tokens
        return self.trace_global_batch(GlobalBatch((batch,), tokens, shape.utterances, 0.0, 0.0), recompute)

    def trace_global_batch(self, global_batch: GlobalBatch, recompute: RecomputePolicy) -> Peak:
        """Trace a step over a global batch of real or traced tensors; of its inputs, count only the largest."""
        live, host = self._byte_counters()
        phases = _TracedPhases(live)
        # One micro-batch at a time: the planner adds up concurrent ones.
        forward = dataclasses.replace(self._parts.forward, recompute=recompute, concurrent_micro_batches=1)
        parts = dataclasses.replace(self._parts, forward=forward, monitor=phases)
        for counted in (live, host):
            self._count_state(counted, with_gradients=True)
        with self._mode:
            batches = tuple(batch.with_each(self._mode.from_tensor) for batch in global_batch.micro_batches)
            inputs = [batch.tensors() for batch in batches]
            live.count(tensor for tensors in inputs for tensor in tensors)
            sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in inputs]
            with live, host if parts.forward.weights else contextlib.nullcontext():
                train_step(parts, dataclasses.replace(global_batch, micro_batches=batches), 0)
        # All inputs were counted, but in training only one micro-batch is on the device at a time.
        absent_inputs = sum(sizes) - max(sizes)
        return Peak(
            state=self.state(),
            forward=phases.peaks["forward"] - absent_inputs,
            # Attention allocates its workspace inside the kernel, where the trace cannot see it.
            backward=phases.peaks["backward"]
            - absent_inputs
            + self._attention_workspace(largest_batch(global_batch.micro_batches)),
            update=phases.peaks["update"] - absent_inputs,
            host=host.peak if self.costs.is_cuda else 0,
        )

    def trace_validation(self, shape: BatchShape) -> int:
        """Return the peak bytes of recognising a batch, weights and optimizer state included, without gradients."""
        live, _ = self._byte_counters()
        self._count_state(live, with_gradients=False)
        forward = self._parts.forward
        forward.model.eval()
        batch = self._batch(shape)
        with self._mode, torch.no_grad(), live, forward.decoder_on_device():
            recognize(forward, batch, functools.partial(_greedy_device_part, longest_target=shape.tokens))
        return live.peak

    def _byte_counters(self) -> tuple[LiveBytes, LiveBytes]:
        """Return byte counters of the device and of host memory; a CPU counts both as the device."""
        return LiveBytes(self.costs.rounding, TRACED_DEVICE if self.costs.is_cuda else None), LiveBytes(
            place=TRACED_HOST
        )

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
        unit = self._parts.architecture.framing.unit
        samples = round(shape.seconds * unit.rate)
        tokens = max(1, shape.tokens)
        shorter = 1 if shape.utterances > 1 else 0
        a_frame_less = max(1, samples - self._parts.architecture.framing.encoder_hop)
        with self._mode:
            return Batch(
                utterance_ids=tuple(map(str, range(shape.utterances))),
                waveforms=torch.empty(shape.utterances, samples, dtype=unit.dtype),
                sample_lengths=(samples,) * (shape.utterances - shorter) + (a_frame_less,) * shorter,
                tokens=torch.empty(shape.utterances, tokens, dtype=torch.long),
                token_lengths=(tokens,) * shape.utterances,
                decoder_tokens=torch.empty(shape.utterances, tokens + 1, dtype=torch.long),
                targets=torch.empty(shape.utterances, tokens + 1, dtype=torch.long),
                augment_seeds=None,
            )


class _TracedPhases(MemoryMonitor):
    """Memory monitor that records the traced peak of each phase in bytes."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__(TRACED_DEVICE, empty_cache_interval=0)
        self.peaks: dict[str, int] = {}
        self._live = live

    def end_phase(self, phase: str) -> None:
        """Attribute the peak since the last call to `phase`."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._live.restart_peak())


class _OptimizerWithoutReset(Optimizer):
    """An optimizer whose gradients stay allocated, as they do from one micro-batch of a step to the next."""

    def __init__(self, optimizer: Optimizer) -> None:
        # Not the base class's constructor, which would allocate the state once more.
        self._optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.workspace = optimizer.workspace

    def step(self) -> None:
        """Update one parameter of each layout in every group.

        No update leaves anything allocated, so that the others reach the same peak. Adafactor's slices of all matrices
        of a model with 3 billion parameters would take 85 % of a trace.
        """
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [group | {"params": _distinct_parameters(group["params"])} for group in groups]
        self._optimizer.step()
        self._optimizer.param_groups = groups

    def zero_grad(self) -> None:
        """Keep the gradients."""


def _distinct_parameters(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the first parameter of each shape, layout, dtype and device."""
    first: dict[tuple[object, ...], torch.nn.Parameter] = {}
    for parameter in parameters:
        first.setdefault((parameter.shape, parameter.stride(), parameter.dtype, parameter.device), parameter)
    return list(first.values())


def _read_zeros(numbers: torch.Tensor) -> list[float]:
    return [0.0] * numbers.numel()


def _cast_input_to_fp32(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Cast the input of a layer norm under autocast, as CUDA's autocast does; a forward pre-hook."""
    return tuple(tensor.float() for tensor in inputs) if torch.is_autocast_enabled("cpu") else inputs


def _greedy_device_part(
    model: Network, encoded: torch.Tensor, encoded_lengths: Lengths, longest_target: int
) -> list[list[int]]:
    """Run the device part of greedy decoding; the rest runs on the host.

    Without CTC, the decoder's cache grows until a hypothesis has the decoder's maximum number of tokens or, if there is
    no maximum, the number of encoder frames or the longest target.
    """
    if model.ctc_head is not None:
        argmax_tokens(model, encoded)
        return []
    decoder = decoder_of(model)
    cache = decoder.begin(encoded, encoded_lengths, beam=1)
    tokens = torch.empty(len(encoded), 1, dtype=torch.long)
    max_steps = max(encoded.shape[1], longest_target) if math.isinf(decoder.most_tokens) else decoder.most_tokens
    while cache.length < max_steps:
        decoder.output(decoder.step(tokens, cache)).double().log_softmax(dim=-1)
        cache.length = max(FIRST_CAPACITY, 2 * cache.length - 2)  # next length at which the cache has to be enlarged
    return []
