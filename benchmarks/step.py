#!/usr/bin/env python3
"""Measure one optimizer step on a fixed batch of features: seconds, audio seconds per second, peak memory.

    python3 benchmarks/step.py --preset original --batch 8 --accum 4 --json

Other trainers were measured on the same batch (features of 3 to 12 s, 62.6 s in all for 8 utterances, vocabulary 1000).
The step is the trainer's own `train_step`: both losses, clipping, the check for finite values, fused AdamW.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from konkanivani.command_line import read_flags, run_script
from konkanivani.config import PRESETS, DataConfig, MemoryConfig, RunConfig, TrainConfig
from konkanivani.errors import UsageError
from konkanivani.rules import check_config


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    preset: Literal["original", "optimized", "minimal"] = "original"
    """Model shape."""
    batch: int = 8
    """Utterances in the step."""
    accum: int = 4
    """Micro-batches of the step; must divide --batch."""
    concurrent_micro_batches: int = 1
    """Concurrent micro-batches, on a CPU."""
    steps: int = 3
    """Timed steps, after a warm-up."""
    gradient_checkpointing: Literal["always", "never"] = "never"
    """Recompute every block's activations in the backward pass."""
    recomputed_blocks: int | None = None
    """Recompute only the first N blocks, like the trainer's auto (None: --gradient_checkpointing decides)."""
    dropout: float = 0.1
    """Dropout of the model."""
    device: Literal["auto", "cuda", "cpu"] = "cpu"
    """Device to measure on."""
    mixed_precision: bool = False
    """Autocast: fp16 with loss scaling on CUDA, bf16 on a CPU."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""


def measure_step(flags: Flags) -> str:
    """Return the report."""
    config = config_of(flags)
    from benchmarks.measuring.common import measure

    result = measure(config, flags.steps, flags.recomputed_blocks)
    return json.dumps(dataclasses.asdict(result)) if flags.json else result.sentence()


def config_of(flags: Flags) -> TrainConfig:
    """Return the trainer's settings for these flags; raise UsageError if they are invalid."""
    if min(flags.batch, flags.accum, flags.steps) < 1 or flags.batch % flags.accum:
        raise UsageError("--batch, --accum and --steps must be at least 1, and --accum must divide --batch.")
    config = dataclasses.replace(
        TrainConfig(),
        run=RunConfig(preset=flags.preset, device=flags.device),
        data=DataConfig(
            batch_size=flags.batch // flags.accum,
            gradient_accumulation_steps=flags.accum,
            concurrent_micro_batches=flags.concurrent_micro_batches,
        ),
        model=dataclasses.replace(PRESETS[flags.preset], dropout=flags.dropout),
        memory=MemoryConfig(mixed_precision=flags.mixed_precision, gradient_checkpointing=flags.gradient_checkpointing),
    )
    check_config(config)
    return config


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure_step(flags)))
