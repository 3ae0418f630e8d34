#!/usr/bin/env python3
"""Says what fits a memory budget before anything is trained. No GPU is needed: the step is traced.

python3 training_scripts/plan_memory.py --memory_budget 4GiB --preset original
"""

import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
import sys
from dataclasses import dataclass, field

from konkanivani.command_line import read_flags, run_script
from konkanivani.config import PRESETS, TrainConfig
from konkanivani.flags import check_config

BUCKETS = (2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True)
class Flags:
    """The budget, and the trainer's flags."""

    memory_budget: str
    """Memory that training may take, weights included: 4GiB, 700MiB."""
    json: bool = False
    """Print one line of JSON instead of a table; bytes and seconds."""
    train: TrainConfig = field(default_factory=TrainConfig)


def read_plan_flags(arguments: list[str]) -> Flags:
    """The command line; a preset's shape stands where a single flag does not override it."""
    first = read_flags(Flags, arguments)
    train = dataclasses.replace(TrainConfig(), model=PRESETS[first.train.run.preset])
    return read_flags(Flags, arguments, Flags(first.memory_budget, train=train))


def plan(flags: Flags) -> str:
    """The plan with and without activation checkpointing, as it is to be printed."""
    check_config(flags.train)
    import torch

    from konkanivani.memory.activation_checkpointing import RecomputePolicy
    from konkanivani.memory.planner import StepTracer, parse_budget, plan_memory
    from konkanivani.recipe import build_front_end, build_step_parts

    budget, config, cpu = parse_budget(flags.memory_budget), flags.train, torch.device("cpu")
    tracer = StepTracer(
        lambda front_end: build_step_parts(config, config.text.vocab_size, cpu, 1, front_end),
        build_front_end(config, cpu),
    )
    plans = [plan_memory(tracer, budget, RecomputePolicy(mode), BUCKETS) for mode in ("never", "always")]
    if flags.json:
        return json.dumps({"budget": budget, "plans": [dataclasses.asdict(p) for p in plans]})
    lines = [f"Traced for a CPU in full precision, {config.text.vocab_size} tokens; budget {budget / 2**20:.0f} MiB."]
    for p in plans:
        state = f"weights, gradients and optimizer {p.state / 2**20:.0f} MiB"
        lines.append(f"\n--gradient_checkpointing {p.recompute}: {state}")
        for bucket in p.buckets:
            fits = f"up to {bucket.utterances} at once, peak {bucket.peak / 2**20:.0f} MiB"
            lines.append(f"  utterances of {bucket.seconds:2g} s: {fits if bucket.utterances else 'none fits'}")
        lines.append(f"  longest utterance that trains alone: {p.longest_seconds:g} s")
    return "\n".join(lines)


if __name__ == "__main__":
    flags = read_plan_flags(sys.argv[1:])
    sys.exit(run_script(lambda: plan(flags)))
