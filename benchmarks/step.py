#!/usr/bin/env python3
"""Measures one optimizer step on a fixed batch of features: seconds, audio seconds a second, peak memory.

    python3 benchmarks/step.py --preset original --batch 8 --accum 4 --json

The batch is the one on which other trainers were measured (features of 3 to 12 s, 62.6 s in all for 8 utterances,
vocabulary 1000), the step is the product's own `train_step`: both losses, clipping, the finite check, fused AdamW.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from benchmarks.live_bytes import LiveBytes
from konkanivani.audio import MEL_BINS
from konkanivani.config import PRESETS, DataConfig, MemoryConfig, TrainConfig
from konkanivani.data.batch import Speech, Window, collate
from konkanivani.errors import KonkaniVaniError, NumericsError, UsageError
from konkanivani.flags import check_config
from konkanivani.memory.monitor import MIB, MemoryMonitor, resident_mib
from konkanivani.model.asr import parameter_count
from konkanivani.recipe import build_step_parts, choose_device
from konkanivani.text import Tokenizer
from konkanivani.training.step import StepParts, StepReport, train_step

VOCABULARY = 1000
FIRST_TOKEN = 5
FRAMES_PER_SECOND, TOKENS_PER_SECOND = 100, 4
MOST_WARM_UP_STEPS = 25
TOTAL_STEPS = 1000  # of the run that these steps pretend to begin


@dataclass(frozen=True)
class Flags:
    """What is measured."""

    preset: Literal["original", "optimized", "minimal"] = "original"
    """Model shape."""
    batch: int = 8
    """Utterances in the step."""
    accum: int = 4
    """Micro-batches that the step is cut into; must divide --batch."""
    steps: int = 3
    """Timed steps, after a warm-up."""
    gradient_checkpointing: Literal["always", "never"] = "never"
    """Recompute every block's activations in the backward pass."""
    dropout: float = 0.1
    """Dropout of the model."""
    device: Literal["auto", "cuda", "cpu"] = "cpu"
    """Where to measure."""
    mixed_precision: bool = False
    """Autocast: fp16 with loss scaling on CUDA, bf16 on a CPU."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""


@dataclass(frozen=True)
class FixedSpeech:
    """The utterances, longest first: features (B, T, F), frames (B,), tokens (B, U), token_lengths (B,), seconds."""

    features: torch.Tensor
    frames: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class StepResult:
    """What was measured; step_s is the median, memory in MiB, loss in nats a token."""

    peer: str
    params: int
    batch: int
    accum: int
    step_s: float
    audio_s: float
    audio_s_per_s: float
    peak_mib: int
    rss_mib: int
    rss_growth_mib: int
    loss: float
    torch: str
    preset: str
    device: str
    mixed_precision: bool
    gradient_checkpointing: str
    dropout: float
    skipped_steps: int


def main(arguments: list[str]) -> int:
    """Measures and prints; returns the exit code."""
    flags = tyro.cli(
        Flags, args=arguments, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,), use_underscores=True
    )
    try:
        result = measure(flags)
    except KonkaniVaniError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted: nothing was measured.", file=sys.stderr)
        return 130
    print(json.dumps(dataclasses.asdict(result)) if flags.json else sentence(result), flush=True)
    return 0


def measure(flags: Flags) -> StepResult:
    """Builds the model, warms up, times the steps and then takes the peak of one more."""
    config = config_of(flags)
    device = choose_device(flags.device)
    speech = build_speech(flags.batch)
    window = build_window(speech, flags.accum)
    resident_before = resident_mib()
    parts = build_step_parts(config, VOCABULARY, device, TOTAL_STEPS)
    parts = dataclasses.replace(parts, front_end=take_features_as_given)
    warm_up(parts, window)
    times, reports = zip(*timed_steps(parts, window, flags.steps), strict=True)
    resident_peak = peak_resident_mib()  # before the tracker, which holds an entry a tensor
    step_seconds = statistics.median(times)
    return StepResult(
        peer="konkanivani",
        params=parameter_count(parts.model),
        batch=flags.batch,
        accum=flags.accum,
        step_s=round(step_seconds, 4),
        audio_s=round(speech.seconds, 1),
        audio_s_per_s=round(speech.seconds / step_seconds, 2),
        peak_mib=round(peak_mib(parts, window)),
        rss_mib=round(resident_peak),
        rss_growth_mib=round(resident_peak - resident_before),
        loss=round(reports[-1].loss, 3),
        torch=torch.__version__,
        preset=flags.preset,
        device=device.type,
        mixed_precision=flags.mixed_precision,
        gradient_checkpointing=flags.gradient_checkpointing,
        dropout=flags.dropout,
        skipped_steps=sum(report.is_skipped for report in reports),
    )


def config_of(flags: Flags) -> TrainConfig:
    """The trainer's settings for these flags; a UsageError where they cannot work."""
    if min(flags.batch, flags.accum, flags.steps) < 1 or flags.batch % flags.accum:
        raise UsageError("--batch, --accum and --steps must be at least 1, and --accum must divide --batch.")
    config = dataclasses.replace(
        TrainConfig(),
        data=DataConfig(batch_size=flags.batch // flags.accum, gradient_accumulation_steps=flags.accum),
        model=dataclasses.replace(PRESETS[flags.preset], dropout=flags.dropout),
        memory=MemoryConfig(mixed_precision=flags.mixed_precision, gradient_checkpointing=flags.gradient_checkpointing),
    )
    check_config(config)
    return config


def build_speech(utterances: int) -> FixedSpeech:
    """The fixed utterances, the same numbers on every machine: 3 to 12 s each, random features and tokens."""
    lengths = random.Random(0)
    seconds = sorted((lengths.uniform(3.0, 12.0) for _ in range(utterances)), reverse=True)
    frames = torch.tensor([int(length * FRAMES_PER_SECOND) for length in seconds])
    token_lengths = torch.tensor([max(2, int(length * TOKENS_PER_SECOND)) for length in seconds])
    generator = torch.Generator().manual_seed(0)  # the features are drawn first, then the tokens
    features = torch.randn(utterances, int(frames.max()), MEL_BINS, generator=generator)
    tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (utterances, int(token_lengths.max())), generator=generator)
    return FixedSpeech(features, frames, tokens, token_lengths, sum(seconds))


def build_window(speech: FixedSpeech, micro_batches: int) -> Window:
    """The utterances as one window; `Batch.waveforms` carries their features (B, T, F), `sample_lengths` the frames."""
    rows = zip(speech.features, speech.frames.tolist(), speech.tokens, speech.token_lengths.tolist(), strict=True)
    speeches = [
        Speech(str(number), features[:length], tokens[:token_length].tolist(), augment_seed=None)
        for number, (features, length, tokens, token_length) in enumerate(rows)
    ]
    size = len(speeches) // micro_batches
    pieces = [speeches[start : start + size] for start in range(0, len(speeches), size)]
    batches = tuple(collate(piece, Tokenizer.start, Tokenizer.end) for piece in pieces)
    return Window(
        micro_batches=batches,
        tokens=int(speech.token_lengths.sum()),
        utterances=len(speeches),
        audio_seconds=speech.seconds,
        padding_share=1 - int(speech.frames.sum()) * MEL_BINS / sum(batch.waveforms.numel() for batch in batches),
    )


def take_features_as_given(
    waveforms: torch.Tensor, sample_lengths: torch.Tensor, augment_seeds: tuple[int, ...] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A front end for batches that carry features already."""
    return waveforms, sample_lengths


def warm_up(parts: StepParts, window: Window) -> None:
    """Steps until one has changed the weights: the first steps in fp16 only find the loss scale."""
    for step in range(MOST_WARM_UP_STEPS):
        if not train_step(parts, window, step).is_skipped:
            return
    raise NumericsError(f"The gradients of {MOST_WARM_UP_STEPS} steps in a row are not finite: nothing to measure.")


def timed_steps(parts: StepParts, window: Window, count: int) -> Iterator[tuple[float, StepReport]]:
    """So many steps, each with its wall time in seconds."""
    for step in range(1, count + 1):
        wait_for_device(parts.device)
        started = time.perf_counter()
        report = train_step(parts, window, step)
        wait_for_device(parts.device)
        yield time.perf_counter() - started, report


def wait_for_device(device: torch.device) -> None:
    """Returns when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(parts: StepParts, window: Window) -> float:
    """The peak of one more step, weights and optimizer state included: by the allocator, on a CPU of live tensors."""
    if parts.device.type == "cuda":
        # The monitor resets the allocator's peak at the end of each phase, and keeps the largest.
        monitor = MemoryMonitor(parts.device, parts.monitor.empty_cache_interval)
        torch.cuda.reset_peak_memory_stats(parts.device)
        train_step(dataclasses.replace(parts, monitor=monitor), window, step=0)
        return monitor.overall_peak_mib()
    live = LiveBytes()
    live.count([*parts.model.parameters(), *parts.model.buffers()])
    live.count(value for state in parts.optimizer.state.values() for value in state.values())
    with live:
        train_step(parts, window, step=0)
    return live.peak / MIB


def peak_resident_mib() -> float:
    """VmHWM of this process in MiB; not ru_maxrss, in which a process inherits the peak of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def sentence(result: StepResult) -> str:
    """The result for a person."""
    return (
        f"{result.preset}, {result.params / 1e6:.1f} M parameters, {result.batch} utterances in {result.accum} "
        f"micro-batches on {result.device}: {result.step_s:.2f} s a step, {result.audio_s_per_s:.1f} audio s/s, "
        f"peak {result.peak_mib} MiB, resident +{result.rss_growth_mib} MiB"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
