#!/usr/bin/env python3
"""Measure steps with and without --cuda_graphs in turn: time, busy share, launches, memory, capture, gradient.

    python3 benchmarks/graphs.py --models original minimal whisper-base
    python3 benchmarks/graphs.py --device cpu --models tiny --steps 2

    python3 benchmarks/graphs.py --check losses --device cpu --models tiny --longest 4
    python3 benchmarks/graphs.py --check growth --device cpu --models tiny --longest 4
    python3 benchmarks/graphs.py --check padding --manifests data/builtin/train.jsonl

Each step has new utterances of noise, of 3 to 12 s. On a CPU the recorder of operators takes the place of CUDA graphs:
it shows that the script works, and its times mean nothing. A line of JSON per model.

--check losses: 200 steps in half precision, by graphs and without, from the same weights and with the same dropout
masks. The exit code is 5 if a loss differs by more than 0.5 %.
--check growth: 2,000 steps of new lengths by graphs. The exit code is 6 if more than 32 shapes are captured, or if the
resident memory grows by more than 16 MiB after the first tenth of the steps.
--check padding: frames and decoder positions that padding to the captured shapes adds, without training a model. The
shapes are chosen from some epochs of a manifest and measured on those of another seed. A token is a character.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import itertools
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch

from benchmarks.measuring.common import VOCABULARY, random_example, wait_for_device
from konkanivani.command_line import read_flags, run_script
from konkanivani.config import PRESETS, DataConfig, LossConfig, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.console import MIB
from konkanivani.data.batching import EpochPlanner, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.data.manifest import read_manifest
from konkanivani.data.shape_grid import MAX_SHAPES, MicroBatchSizes, choose_grid, measure_padding, micro_batch_sizes
from konkanivani.data.text import OUR_TOKENS
from konkanivani.distributed import choose_device
from konkanivani.errors import NumericsError, ResourceError, UsageError
from konkanivani.flags import LITTLE_SPEEDS
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import resident_mib, set_mmap_threshold
from konkanivani.models.architecture import Architecture, architecture_of
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.ops.capturable import make_capturable
from konkanivani.ops.graph_backends import CudaGraphBackend, RecorderBackend
from konkanivani.randomness import derive_seed
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.gradient import local_gradient
from konkanivani.training.graphs import NO_SHAPES, GraphedGradient
from konkanivani.training.step import GradientTask, StepParts, forward_and_backward, train_step

TINY = ModelConfig(d_model=16, encoder_layers=2, decoder_layers=1, attention_heads=2, subsampling_channels=4)
# A NeMo Conformer-CTC (medium): relative positions, striding subsampling, a folded BatchNorm, no decoder.
NEMO = dataclasses.replace(
    ModelConfig(d_model=256, encoder_layers=18, decoder_layers=0),
    attention_positions="relative",
    convolution_norm="none",
    subsampling="striding",
    scaled_input=True,
    entry_norm=False,
)
NATIVE: dict[str, ModelConfig] = {**PRESETS, "nemo": NEMO, "tiny": TINY}
WHISPER = {
    "whisper-base": WhisperShape(512, 8, 6, 6, 2048, 80, 51_865),
    "whisper-tiny": WhisperShape(16, 2, 2, 2, 32, 80, VOCABULARY, source_positions=600),
}
TOTAL_STEPS = 1000
LOSS_STEPS = 200
MAX_LOSS_DIFFERENCE = 0.005
GROWTH_STEPS = 2000
MAX_GROWTH_MIB = 16.0
# Of --check padding.
GLOBAL_BATCH = 8
BATCH_SIZES = (2, 4, 8)
SPEEDS = {"no": (1.0,), "yes": LITTLE_SPEEDS}
EPOCH_SEEDS = (1, 2)  # of the epochs that the shapes are chosen from, and of those that are measured
Model = Literal["original", "optimized", "minimal", "nemo", "tiny", "whisper-base", "whisper-speech", "whisper-tiny"]


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    models: tuple[Model, ...] = ("original", "minimal", "optimized", "whisper-base", "whisper-speech", "nemo")
    """Models to measure; whisper-speech is Whisper base over the speech alone."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to measure on."""
    utterances: int = 8
    """Utterances of a step."""
    micro_batches: int = 2
    """Micro-batches of a step."""
    steps: int = 8
    """Timed steps of each."""
    fp32: bool = False
    """In full precision, not fp16 (bf16 on a CPU)."""
    seed: int = 0
    """Seed of the utterances."""
    shortest: float = 3.0
    """Seconds of the shortest utterances."""
    longest: float = 12.0
    """Seconds of the longest utterances."""
    check: Literal["losses", "growth", "padding"] | None = None
    """Check many steps, or the padding of manifests, in place of measuring some steps (see above)."""
    manifests: tuple[str, ...] = ()
    """Training manifests for --check padding."""
    check_steps: int | None = None
    """Steps of a check (None: 200 for losses, 2,000 for growth)."""


@dataclass(frozen=True)
class Side:
    """Measurements of steps with or without graphs; times in seconds, memory in MiB."""

    step_s: float
    busy_share: float
    launches: int
    peak_mib: float
    reserved_mib: float


@dataclass(frozen=True)
class Comparison:
    """Result for one model; `gradient_difference` is relative, in float64 and without dropout."""

    model: str
    device: str
    eager: Side
    graphs: Side
    ratio: float
    shapes: int
    first_step_s: float
    gradient_difference: float


def measure(flags: Flags) -> str:
    """Measure or check each model."""
    if not 0.2 <= flags.shortest <= flags.longest:
        raise UsageError("--shortest must be at least 0.2, and --longest no less.")
    if flags.steps < 1 or (flags.check_steps is not None and flags.check_steps < 10):
        raise UsageError("--steps must be at least 1, and --check_steps at least 10.")
    if (flags.check == "padding") != bool(flags.manifests):
        raise UsageError("Give --manifests with --check padding, and only with it.")
    if flags.check == "padding":
        return padding_table(flags.manifests)
    device = choose_device(flags.device)
    run = {None: compare, "losses": check_losses, "growth": check_growth}[flags.check]
    for model in flags.models:
        print(json.dumps(asdict(run(model, flags, device))), flush=True)
    return ""


@dataclass(frozen=True)
class LossCheck:
    """Losses of steps by graphs beside those without; `difference` is the largest relative one."""

    model: str
    device: str
    steps: int
    first_loss: float
    last_loss: float
    last_eager_loss: float
    difference: float


def check_losses(model: str, flags: Flags, device: torch.device) -> LossCheck:
    """Train by graphs and without; raise NumericsError if the losses differ."""
    steps = flags.check_steps or LOSS_STEPS
    # Some batches again and again, so that the model learns and differences add up.
    batches = [build_batch(flags, step) for step in range(min(steps, 20))]
    losses = []
    for has_graphs in (True, False):
        parts = build(model, flags, device)
        gradient = with_graphs(parts, batches)
        if not has_graphs:
            gradient.grid = NO_SHAPES
        parts = dataclasses.replace(parts, compute_gradient=gradient)
        losses.append([loss_of(parts, batches[step % len(batches)], step) for step in range(steps)])
        if has_graphs and not gradient.captured_shapes:
            raise NumericsError("No shape was captured, so nothing was compared. Read the message above, start again.")
    by_graphs, eager = losses
    difference = max(abs(one - other) / abs(other) for one, other in zip(by_graphs, eager, strict=True))
    check = LossCheck(model, name_of(device), steps, eager[0], by_graphs[-1], eager[-1], difference)
    if not difference <= MAX_LOSS_DIFFERENCE:
        raise NumericsError(f"Steps by graphs have other losses: {check}. Train with --cuda_graphs off.")
    return check


def loss_of(parts: StepParts, batch: GlobalBatch, step: int) -> float:
    """Return the loss of a step."""
    report = train_step(parts, batch, step)
    if report is None:
        raise NumericsError("The step was interrupted. Start again.")
    return report.loss


@dataclass(frozen=True)
class GrowthCheck:
    """Captured shapes and resident memory in MiB after the first tenth of the steps and after all."""

    model: str
    device: str
    steps: int
    shapes: int
    resident_mib: float
    growth_mib: float


def check_growth(model: str, flags: Flags, device: torch.device) -> GrowthCheck:
    """Run steps of new lengths by graphs; raise ResourceError if captures or memory grow."""
    set_mmap_threshold()  # as in a run: otherwise freed tensors leave holes in glibc's heap
    steps = flags.check_steps or GROWTH_STEPS
    parts = build(model, flags, device)
    # The shapes are chosen from other batches, as in later epochs of a run.
    gradient = with_graphs(parts, [build_batch(flags, -step) for step in range(1, 1 + min(steps, 100))])
    parts = dataclasses.replace(parts, compute_gradient=gradient)
    before = 0.0
    for step in range(steps):
        train_step(parts, build_batch(flags, step), step)
        if step == steps // 10:
            before = resident_mib()
    growth = round(resident_mib() - before, 1)
    check = GrowthCheck(model, name_of(device), steps, len(gradient.captured_shapes), round(before, 1), growth)
    if not 0 < check.shapes <= MAX_SHAPES or growth > MAX_GROWTH_MIB:
        raise ResourceError(f"Captures or memory grow: {check}. Train with --cuda_graphs off.")
    return check


def padding_table(manifests: tuple[str, ...]) -> str:
    """Return a table of the padding, with a row per manifest, micro-batch and speed perturbation."""
    lines = ["| manifest | micro-batch | speed perturbation | shapes | frames | decoder positions | not captured |"]
    lines.append("|---|---|---|---|---|---|---|")
    for manifest in manifests:
        utterances = list(read_manifest(manifest))
        durations = np.array([utterance.duration for utterance in utterances])
        tokens = np.array([len(utterance.text) for utterance in utterances])
        longest = int(durations.max() / min(SPEEDS["yes"]) * SAMPLE_RATE) + 1
        for batch_size, (perturbed, speeds) in itertools.product(BATCH_SIZES, SPEEDS.items()):
            chosen, measured = (
                micro_batch_sizes(EpochPlanner(durations, GLOBAL_BATCH, seed), tokens, same_size(batch_size), speeds)
                for seed in EPOCH_SEEDS
            )
            grid = choose_grid(chosen, longest)
            found = measure_padding(grid, measured)
            lines.append(
                f"| {manifest} | {batch_size} | {perturbed} | {len(grid.shapes)} | +{found.added_frames:.1%} "
                f"| +{found.added_tokens:.0%} | {found.uncaptured:.1%} |"
            )
    return "\n".join(lines)


def name_of(device: torch.device) -> str:
    """Return the name of the device, and on a CPU what takes the place of CUDA graphs."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (recorder)"


def compare(model: str, flags: Flags, device: torch.device) -> Comparison:
    """Measure steps of one model, with and without graphs in turn, on the same utterances."""
    batches = [build_batch(flags, step) for step in range(flags.steps + 1)]
    # The trainer's usual step, with its own dropout: the losses of the two sides are therefore not compared.
    eager = build(model, flags, device)
    graphs = build(model, flags, device)
    gradient = with_graphs(graphs, batches)
    graphs = dataclasses.replace(graphs, compute_gradient=gradient)
    started = time.perf_counter()
    timed(graphs, batches[0], 0)
    first = time.perf_counter() - started
    timed(eager, batches[0], 0)
    times: dict[bool, list[float]] = {False: [], True: []}
    for step, batch in enumerate(batches[1:], start=1):
        for has_graphs, parts in ((False, eager), (True, graphs)):
            times[has_graphs].append(timed(parts, batch, step))
    sides = [
        profiled(parts, batches[-1], statistics.median(times[has_graphs]))
        for has_graphs, parts in ((False, eager), (True, graphs))
    ]
    return Comparison(
        model=model,
        device=name_of(device),
        eager=sides[0],
        graphs=sides[1],
        ratio=round(sides[1].step_s / sides[0].step_s, 3),
        shapes=len(gradient.captured_shapes),
        first_step_s=round(first, 2),
        gradient_difference=gradient_difference(model, flags, device),
    )


def build_batch(flags: Flags, step: int, dtype: torch.dtype = torch.float32) -> GlobalBatch:
    """Return the utterances of a step: noise of `shortest` to `longest` seconds."""
    generator = torch.Generator().manual_seed(derive_seed(flags.seed, step))
    drawn = torch.rand(flags.utterances, generator=generator)
    seconds = (flags.shortest + (flags.longest - flags.shortest) * drawn).tolist()
    speeches = [random_example(length, VOCABULARY, generator) for length in seconds]
    speeches = [dataclasses.replace(speech, waveform=speech.waveform.to(dtype)) for speech in speeches]
    return split_into_micro_batches(speeches, same_size(flags.utterances // flags.micro_batches), OUR_TOKENS)


def build(model: str, flags: Flags, device: torch.device, dropout: float = 0.1) -> StepParts:
    """Return the parts of a step of a model."""
    is_half = not flags.fp32 and torch.get_default_dtype() == torch.float32
    config, architecture = settings_of(model, is_half, dropout)
    return build_step_parts(config, architecture, device, TOTAL_STEPS)


def with_graphs(parts: StepParts, batches: list[GlobalBatch]) -> GraphedGradient:
    """Make the model capturable, and return a gradient by graphs of the shapes of these batches."""
    make_capturable(parts.model)
    framing = parts.architecture.framing
    micro_batches = [batch for global_batch in batches for batch in global_batch.micro_batches]
    sizes = MicroBatchSizes(
        np.array([batch.size for batch in micro_batches]),
        np.array([max(batch.sample_lengths) for batch in micro_batches]),
        np.array([max(batch.token_lengths) for batch in micro_batches]),
        has_fixed_length=framing.feature_length(1) == framing.feature_length(SAMPLE_RATE),
    )
    device = parts.forward.device
    backend = CudaGraphBackend(device) if device.type == "cuda" else RecorderBackend()
    return GraphedGradient(backend, choose_grid(sizes, int(sizes.samples.max())))


def settings_of(model: str, is_half: bool, dropout: float) -> tuple[TrainConfig, Architecture]:
    """Return the settings and the architecture of a model; Whisper recomputes all of its blocks."""
    data = DataConfig(concurrent_micro_batches=1)
    if model in NATIVE:
        shape = dataclasses.replace(NATIVE[model], dropout=dropout)
        loss = LossConfig(ctc_weight=0.3 if shape.decoder_layers else 1.0)
        config = TrainConfig(model=shape, data=data, loss=loss, memory=MemoryConfig(mixed_precision=is_half))
        return config, architecture_of(config, VOCABULARY)
    memory = MemoryConfig(mixed_precision=is_half, gradient_checkpointing="always")
    config = TrainConfig(data=data, loss=LossConfig(ctc_weight=0.0), memory=memory)
    if model == "whisper-speech":
        return config, WhisperArchitecture(WHISPER["whisper-base"], audio_context="speech")
    return config, WhisperArchitecture(WHISPER[model])


def timed(parts: StepParts, batch: GlobalBatch, step: int) -> float:
    """Return the seconds of a step."""
    wait_for_device(parts.forward.device)
    started = time.perf_counter()
    train_step(parts, batch, step)
    wait_for_device(parts.forward.device)
    return time.perf_counter() - started


def profiled(parts: StepParts, batch: GlobalBatch, seconds: float) -> Side:
    """Return the measurements of a side, with those of one more step under PyTorch's profiler."""
    device = parts.forward.device
    is_cuda = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.profiler.profile(activities=[kind]) as profile:
        train_step(parts, batch, TOTAL_STEPS - 1)
        wait_for_device(device)
    events = profile.key_averages()
    # Kernels of a replay are recorded one by one, like those of an eager step.
    kernels = sum(event.self_device_time_total for event in events) * 1e-6
    return Side(
        step_s=round(seconds, 4),
        busy_share=round(kernels / seconds, 3),
        launches=sum(event.count for event in events),
        peak_mib=round(torch.cuda.max_memory_allocated(device) / MIB, 1) if is_cuda else 0.0,
        reserved_mib=round(torch.cuda.memory_reserved(device) / MIB, 1) if is_cuda else 0.0,
    )


def gradient_difference(model: str, flags: Flags, device: torch.device) -> float:
    """Return the relative difference of the gradients of a global batch in float64, without dropout."""
    torch.set_default_dtype(torch.float64)
    try:
        batch = build_batch(flags, 0, torch.float64)
        parts = build(model, flags, device, dropout=0.0)
        gradient = with_graphs(parts, [batch])
    finally:
        torch.set_default_dtype(torch.float32)
    found = []
    for compute in (local_gradient, gradient):
        compute(GradientTask(parts, batch, 0, forward_and_backward))
        gradients = [weight.grad.flatten() for weight in parts.model.parameters() if weight.grad is not None]
        found.append(torch.cat(gradients).clone())
        parts.optimizer.zero_grad()
    return float((found[0] - found[1]).norm() / found[0].norm())


if __name__ == "__main__":
    sys.exit(run_script(lambda: measure(read_flags(Flags, sys.argv[1:]))))
