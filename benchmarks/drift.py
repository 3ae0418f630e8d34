#!/usr/bin/env python3
"""Train for many steps on utterances of mixed durations and measure whether memory grows with time.

    python3 benchmarks/drift.py --steps 2000 --preset minimal

The step is the trainer's own `train_step` with its front end, including SpecAugment, on noise that is generated on
demand. All tensors that are alive between two steps are counted, from the first step to the last, and must not grow by
a byte; the resident memory may grow by 5 % from step 200 on. The exit code is 0 in any case, since this is a
measurement.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Literal

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.config import PRESETS, DataConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from konkanivani.base.errors import UsageError
from konkanivani.base.rules import check_config

MIN_SECONDS, MAX_SECONDS = 0.5, 60.0


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    steps: int = 2000
    """Optimizer steps."""
    preset: Literal["original", "optimized", "minimal"] = "minimal"
    """Model shape; single flags override it."""
    batch_size: int = 1
    """Utterances in one micro-batch."""
    gradient_accumulation_steps: int = 2
    """Micro-batches in one optimizer step."""
    shortest: float = 1.0
    """Duration of the shortest utterances in seconds."""
    longest: float = 12.0
    """Duration of the longest utterances in seconds."""
    distinct: int | None = None
    """Number of different global batches, which are then repeated (None: every one is different)."""
    gradient_checkpointing: Literal["always", "never"] = "never"
    """Recompute every block's activations in the backward pass."""
    mixed_precision: bool = False
    """Autocast: fp16 with loss scaling on CUDA, bf16 on a CPU."""
    device: Literal["auto", "cuda", "cpu"] = "cpu"
    """Device to measure on."""
    seed: int = 1234
    """Seed of all random numbers."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""
    model: ModelConfig = field(default_factory=ModelConfig)


def read_drift_flags(arguments: list[str]) -> Flags:
    """Return the flags of the command line; single model flags override the preset's shape."""
    first = read_flags(Flags, arguments, Flags())
    # Parsed twice: the first pass only finds the preset, which gives the defaults of the second.
    return read_flags(Flags, arguments, Flags(model=PRESETS[first.preset]))


def measure_drift(flags: Flags) -> str:
    """Return the report."""
    config = config_of(flags)
    from benchmarks.measuring.many_steps import measure

    drift = measure(config, flags.steps, flags.shortest, flags.longest, flags.distinct)
    return json.dumps(dataclasses.asdict(drift)) if flags.json else drift.sentence()


def config_of(flags: Flags) -> TrainConfig:
    """Return the trainer's settings for these flags; raise UsageError if they are invalid."""
    if flags.steps < 2:
        raise UsageError("--steps must be at least 2.")
    if flags.distinct is not None and flags.distinct < 1:
        raise UsageError("--distinct must be at least 1.")
    if not MIN_SECONDS <= flags.shortest <= flags.longest <= MAX_SECONDS:
        raise UsageError(f"--shortest and --longest must be from {MIN_SECONDS:g} to {MAX_SECONDS:g}, in that order.")
    memory = MemoryConfig(mixed_precision=flags.mixed_precision, gradient_checkpointing=flags.gradient_checkpointing)
    config = dataclasses.replace(
        TrainConfig(),
        run=RunConfig(preset=flags.preset, device=flags.device, seed=flags.seed),
        data=DataConfig(batch_size=flags.batch_size, gradient_accumulation_steps=flags.gradient_accumulation_steps),
        model=flags.model,
        memory=memory,
    )
    check_config(config)
    return config


if __name__ == "__main__":
    flags = read_drift_flags(sys.argv[1:])
    sys.exit(run_script(lambda: measure_drift(flags)))
