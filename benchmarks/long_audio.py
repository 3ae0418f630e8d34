#!/usr/bin/env python3
"""Measure the memory of one optimizer step on one utterance for several durations, each in its own process.

    python3 benchmarks/long_audio.py --seconds 60 600 --tokens_per_second 4 --json

The step is the trainer's own `train_step` on a random waveform, after a step on a short one. The live peak counts
tensors beyond weights, gradients and optimizer state. The growth is the peak of the resident memory (VmHWM) minus its
value before the model is built. The time of attention grows with the square of the duration: a step on ten minutes of
audio takes minutes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
import subprocess
from dataclasses import dataclass
from typing import Literal

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.config import PRESETS, MemoryConfig, RunConfig, TrainConfig
from konkanivani.base.errors import ResourceError, UsageError

MIN_SECONDS, MAX_SECONDS = 1.0, 7200.0


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    seconds: tuple[float, ...] = (60.0, 600.0)
    """Durations of the utterance."""
    tokens_per_second: float = 4.0
    """Tokens of its transcript per second; at most 15, the rate of read speech in characters."""
    preset: Literal["original", "optimized", "minimal"] = "original"
    """Model shape."""
    gradient_checkpointing: Literal["always", "never"] = "always"
    """Recompute every block's activations in the backward pass."""
    json: bool = False
    """Print one line of JSON instead of sentences."""


def measure_lengths(flags: Flags) -> str:
    """Return the report."""
    if not flags.seconds or not all(MIN_SECONDS <= seconds <= MAX_SECONDS for seconds in flags.seconds):
        raise UsageError(f"--seconds must be one or more lengths from {MIN_SECONDS:g} to {MAX_SECONDS:g}.")
    if not 0 < flags.tokens_per_second <= 15:
        raise UsageError("--tokens_per_second must be above 0 and at most 15.")
    # VmHWM never decreases, so each duration needs its own process.
    steps = [measure_in_child(flags, seconds) for seconds in flags.seconds] if len(flags.seconds) > 1 else [own(flags)]
    ratio = round(steps[-1]["peak_above_state_mib"] / steps[0]["peak_above_state_mib"], 2)
    if flags.json:
        return json.dumps({"preset": flags.preset, "steps": steps, "ratio": ratio})
    lines = [
        f"{step['seconds']:g} s, {step['tokens']} tokens: live peak {step['peak_above_state_mib']} MiB above the "
        f"state, resident +{step['rss_growth_mib']} MiB"
        for step in steps
    ]
    return "\n".join([*lines, f"last over first: {ratio}"])


def own(flags: Flags) -> dict[str, float]:
    """Measure the only duration of these flags in this process."""
    from benchmarks.measuring.long_step import measure

    config = dataclasses.replace(
        TrainConfig(),
        run=RunConfig(preset=flags.preset, device="cpu"),
        model=PRESETS[flags.preset],
        memory=MemoryConfig(gradient_checkpointing=flags.gradient_checkpointing),
    )
    return dataclasses.asdict(measure(config, flags.seconds[0], flags.tokens_per_second))


def measure_in_child(flags: Flags, seconds: float) -> dict[str, float]:
    """Measure this duration with this script in another process; raise ResourceError if it fails."""
    one = ("--seconds", str(seconds), "--tokens_per_second", str(flags.tokens_per_second), "--preset", flags.preset)
    command = [sys.executable, __file__, *one, "--gradient_checkpointing", flags.gradient_checkpointing, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ResourceError(f"The step on {seconds:g} s ended with exit code {done.returncode}. Give fewer --seconds.")
    return json.loads(done.stdout.splitlines()[-1])["steps"][0]


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure_lengths(flags)))
