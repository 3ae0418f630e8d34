"""The peak of memory predicted by tracing the real training step on tensors without data.

The step that trains is run on PyTorch's fake CPU tensors, and the bytes of the storages that live at each moment are
counted: no formula of the model is kept beside the model. What only CUDA adds (allocator rounding, workspaces, the
context, half precision) is not in the figures yet: they are a CPU's, in full precision.

torch.distributed's private MemTracker was read and not taken: it sorts bytes by module and kind through hooks on every
module, which the step does not need, and does not survive from one PyTorch to the next; a peak takes thirty lines.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from konkanivani.audio import MEL_BINS
from konkanivani.chunks import CHUNK_FRAMES
from konkanivani.config import PRESETS, TextConfig
from konkanivani.data.batch import Batch, Window
from konkanivani.errors import ResourceError, UsageError
from konkanivani.lengths import HOP_SAMPLES, SAMPLE_RATE, SUBSAMPLING
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.live_bytes import LiveBytes
from konkanivani.model.asr import KonkaniVaniASR, parameter_count
from konkanivani.training.forward import FeatureExtractor
from konkanivani.training.step import StepParts, train_step

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
TOKENS_PER_SECOND = 15  # of Konkani read aloud, in characters: the most that a tokenizer makes of it
LONGEST_SECONDS = 3600.0
MOST_UTTERANCES = 512
STATE_BYTES = 16  # a parameter's weight, gradient and two moments in fp32


def parse_budget(text: str) -> int:
    """Bytes of a budget such as `4GiB` or `700 MiB`; a UsageError without a unit or beyond sense."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", text)
    if match is None:
        raise UsageError(f"--memory_budget {text}: give a number and a unit, for example 4GiB or 700MiB.")
    size = int(float(match.group(1)) * UNITS[match.group(2)])
    if not 2**20 <= size <= 2**43:
        raise UsageError(f"--memory_budget {text} is not a size of a memory: between 1MiB and 8192GiB.")
    return size


@dataclass(frozen=True)
class Load:
    """A micro-batch by its size: so many utterances of so many seconds."""

    utterances: int
    seconds: float


@dataclass(frozen=True)
class Peak:
    """Bytes: weights, buffers and optimizer state, and the peak of a step over a window, state included."""

    state: int
    peak: int


class StepTracer:
    """Traces steps of one model. Building it takes a second or so, each trace about as long as its layers are many."""

    def __init__(self, build: Callable[[FeatureExtractor], StepParts], front_end: torch.nn.Module) -> None:
        """`build` makes the step's parts from a front end, inside the trace's mode; `front_end` is a real one."""
        self._mode = FakeTensorMode()
        front_end = copy.deepcopy(front_end)
        with self._mode:
            for module in front_end.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, self._mode.from_tensor(buffer))
            parts = build(front_end)
        self._parts = dataclasses.replace(parts, read=lambda numbers: [0.0] * numbers.numel())

    def state(self) -> int:
        """Bytes of weights, gradients and optimizer."""
        return STATE_BYTES * parameter_count(self._parts.model)

    def trace(self, load: Load, recompute: RecomputePolicy) -> Peak:
        """The peak of a step over two such micro-batches: the second finds the first one's gradients there."""
        batch = self._batch(load)
        window = Window((batch, batch), 2 * sum(batch.token_lengths), 2 * load.utterances, 0.0, 0.0)
        return self.trace_window(window, recompute)

    def trace_window(self, window: Window, recompute: RecomputePolicy) -> Peak:
        """The peak of a step over a window of real or traced tensors."""
        parts = dataclasses.replace(self._parts, forward=dataclasses.replace(self._parts.forward, recompute=recompute))
        live = LiveBytes()
        live.count([*parts.model.parameters(), *parts.model.buffers()])
        live.count(tensor for state in parts.optimizer.state.values() for tensor in state.values())
        state = live.live
        with self._mode:
            traced = dataclasses.replace(window, micro_batches=tuple(map(self._traced, window.micro_batches)))
            with live:
                train_step(parts, traced, step=0)
        return Peak(state, live.peak)

    def _batch(self, load: Load) -> Batch:
        """A batch in which one utterance is shorter, where there are several: padding costs masks."""
        samples, tokens = round(load.seconds * SAMPLE_RATE), max(1, round(load.seconds * TOKENS_PER_SECOND))
        shorter = 1 if load.utterances > 1 else 0
        with self._mode:
            return Batch(
                utterance_ids=tuple(map(str, range(load.utterances))),
                waveforms=torch.empty(load.utterances, samples),
                sample_lengths=(samples,) * (load.utterances - shorter) + (samples * 9 // 10,) * shorter,
                tokens=torch.empty(load.utterances, tokens, dtype=torch.long),
                token_lengths=(tokens,) * load.utterances,
                decoder_tokens=torch.empty(load.utterances, tokens + 1, dtype=torch.long),
                targets=torch.empty(load.utterances, tokens + 1, dtype=torch.long),
                augment_seeds=None,
            )

    def _traced(self, batch: Batch) -> Batch:
        names = ("waveforms", "tokens", "decoder_tokens", "targets")
        tensors = {name: self._mode.from_tensor(getattr(batch, name)) for name in names}
        return dataclasses.replace(batch, **tensors)


@dataclass(frozen=True)
class BucketPlan:
    """The largest micro-batch of utterances of `seconds` that fits, and its peak in bytes; 0 and 0 where none does."""

    seconds: float
    utterances: int
    peak: int


@dataclass(frozen=True)
class MemoryPlan:
    """What fits a budget, with or without activation checkpointing; bytes and seconds."""

    recompute: str
    state: int
    buckets: tuple[BucketPlan, ...]
    longest_seconds: float


def plan_memory(tracer: StepTracer, budget: int, recompute: RecomputePolicy, buckets: tuple[float, ...]) -> MemoryPlan:
    """The plan for one policy. Every answer in it was traced itself, not only reckoned from others.

    A ResourceError where the model's state alone, gradients included, is beyond the budget.
    """
    state = tracer.state()
    if state > budget:
        raise ResourceError(
            f"The weights, gradients and optimizer of this model take {state / 2**20:.0f} MiB before any audio, "
            f"and the budget is {budget / 2**20:.0f} MiB. {_largest_preset(budget)}"
        )
    growth = fit_growth(tracer, recompute)
    plans = tuple(_largest_batch(tracer, growth, budget, recompute, seconds) for seconds in buckets)
    return MemoryPlan(recompute.mode, state, plans, _longest_utterance(tracer, growth, budget, recompute))


def _largest_preset(budget: int) -> str:
    """A sentence about the largest preset whose state is within the budget."""
    for name, shape in PRESETS.items():
        with torch.device("meta"):
            parameters = parameter_count(KonkaniVaniASR(shape, TextConfig().vocab_size, MEL_BINS))
        if STATE_BYTES * parameters <= budget:
            return f"--preset {name} takes {STATE_BYTES * parameters / 2**20:.0f} MiB."
    return "No preset is small enough."


@dataclass(frozen=True)
class Growth:
    """A peak in bytes reckoned as base + utterances x (linear x seconds + square x seconds^2).

    The square is that of CTC's forward variables, and below zero where the longest of the three is run in chunks.
    """

    base: float
    linear: float
    square: float

    def of_utterance(self, seconds: float) -> float:
        """Bytes that one more utterance of `seconds` adds."""
        return max(1.0, self.linear * seconds + self.square * seconds**2)

    def longest(self, budget: int) -> float:
        """The seconds at which one utterance reaches the budget."""
        room = budget - self.base
        if self.square <= 0:
            return room / max(1.0, self.linear)
        return (math.sqrt(self.linear**2 + 4 * self.square * room) - self.linear) / (2 * self.square)


def fit_growth(tracer: StepTracer, recompute: RecomputePolicy) -> Growth:
    """The growth through three traces of one utterance."""
    seconds = np.array([10.0, 60.0, 240.0])
    peaks = [tracer.trace(Load(1, length), recompute).peak for length in seconds]
    base, linear, square = np.linalg.solve(np.stack([seconds**0, seconds, seconds**2], axis=1), np.array(peaks, float))
    return Growth(float(base), float(linear), float(square))


def _largest_batch(
    tracer: StepTracer, growth: Growth, budget: int, recompute: RecomputePolicy, seconds: float
) -> BucketPlan:
    """The largest batch that fits, to within what a straight line from the state through the last trace tells."""
    utterances = int(np.clip((budget - growth.base) / growth.of_utterance(seconds), 1, MOST_UTTERANCES))
    state, fits, too_large = tracer.state(), BucketPlan(seconds, 0, 0), MOST_UTTERANCES + 1
    while fits.utterances < utterances < too_large:
        peak = tracer.trace(Load(utterances, seconds), recompute).peak
        if peak <= budget:
            fits = BucketPlan(seconds, utterances, peak)
        else:
            too_large = utterances
        reached = int(utterances * (budget - state) / max(1, peak - state))
        utterances = min(reached, too_large - 1)
    return fits


def _longest_utterance(tracer: StepTracer, growth: Growth, budget: int, recompute: RecomputePolicy) -> float:
    """The longest utterance that trains alone, in whole seconds, up to an hour; 0 where none does.

    An utterance just long enough for chunks takes less than a somewhat shorter one, so it is tried first. Between a
    length that fits and one that does not, a straight line says where to look next; a twentieth is close enough.
    """
    fits, too_long = (0.0, growth.base), None
    seconds = min(LONGEST_SECONDS, float(int(growth.longest(budget))))
    in_chunks = math.ceil(CHUNK_FRAMES * SUBSAMPLING * HOP_SAMPLES / SAMPLE_RATE) + 1.0
    peak = tracer.trace(Load(1, in_chunks), recompute).peak
    if peak <= budget:
        fits, seconds = (in_chunks, float(peak)), max(seconds, 2 * in_chunks)
    while seconds > fits[0]:
        peak = tracer.trace(Load(1, seconds), recompute).peak
        if peak <= budget:
            fits = (seconds, float(peak))
        else:
            too_long = (seconds, float(peak))
        if too_long is None or too_long[0] - fits[0] <= max(1.0, too_long[0] / 20):
            break
        slope = (too_long[1] - fits[1]) / (too_long[0] - fits[0])
        seconds = float(int(fits[0] + 0.99 * (budget - fits[1]) / slope))
    return fits[0]
