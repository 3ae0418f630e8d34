#!/usr/bin/env python3
"""Says what fits a memory budget before anything is trained. No GPU is needed: the step is traced.

    python3 training_scripts/plan_memory.py --memory_budget 4GiB --preset original
    python3 training_scripts/plan_memory.py --gpu T4 --preset original --world 8 --shard always
    python3 training_scripts/plan_memory.py --gpu "GTX 980" --checkpoint model.pt --train_layers 8

takes the trainer's flags too, such as --memory_budget and --preset (train_konkanivani_asr.py --help lists them), of
which --init_from is called --checkpoint here too, as other scripts call it.
"""

import bootstrap

bootstrap.rerun_under_venv()

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.config import TrainConfig
from konkanivani.base.errors import UsageError
from konkanivani.base.flags import CommandLine, check_idle_flags, defaults_beside, explicit_flags
from konkanivani.base.rules import check_config
from konkanivani.base.units import parse_budget
from konkanivani.memory.devices import cpu_costs, cuda_costs
from konkanivani.memory.known_gpus import Gpu, find_gpu

HOW_LONG = "10 to 20 seconds for one question, and 3 for the same again, since what is traced is kept"


@dataclass(frozen=True)
class OwnFlags:
    """The card, and the way to print."""

    gpu: str | None = None
    """A card by its name, such as "GTX 980" or "A100 80GB", in whose memory to plan (--device cuda: a nameless one)."""
    world: int = 1
    """Ranks that train together, each with a card of that memory; --shard says whether they share the state."""
    presets: bool = False
    """Print what fits for every preset in 2, 4, 8, 14.7 and 24 GiB."""
    table: bool = False
    """Print what each published Whisper takes, trained whole or in part, its weights on the card or off it."""
    json: bool = False
    """Print one line of JSON instead of a table; bytes and seconds."""


@dataclass(frozen=True)
class Flags(OwnFlags):
    """These, and the trainer's flags, of which --memory_budget is one."""

    train: TrainConfig = field(default_factory=TrainConfig)


def read_plan_flags(arguments: list[str]) -> Flags:
    """The command line; a preset's shape stands where a single flag does not override it."""
    first = read_flags(Flags, arguments, Flags(), shown=OwnFlags)
    return read_flags(Flags, arguments, Flags(train=defaults_beside(first.train)))


def plan(flags: Flags, given: frozenset[str]) -> str:
    """The plan, as it is to be printed; `given` are the names of the flags that a person has given."""
    check_idle_flags(flags.train, given)
    check_config(flags.train)
    if flags.world < 1:
        raise UsageError("--world must be at least 1.")
    gpu, budget = find_gpu(flags.gpu) if flags.gpu else None, flags.train.memory.memory_budget
    if not (gpu or budget or flags.presets):
        raise UsageError("Give --memory_budget, for example 4GiB, or --gpu with the name of a card.")
    if gpu and flags.train.run.device == "cpu":
        raise UsageError(f"--device cpu contradicts --gpu {flags.gpu}: give one of them.")
    size = parse_budget(budget) if budget else gpu.memory if gpu else 0
    if flags.train.run.init_from is not None:
        flags = replace(flags, train=beginning_with_weights(flags.train, given))
    if flags.train.pretrained.pretrained is not None:
        check_pretrained(flags)
    print(f"Tracing steps of training without data: {HOW_LONG}.", file=sys.stderr, flush=True)
    from konkanivani.recipe.planning.ranks import choose_ranks
    from konkanivani.recipe.planning.report import plan_budget, plan_presets
    from konkanivani.recipe.planning.table import plan_whisper

    costs = cpu_costs()
    if gpu or flags.train.run.device == "cuda":
        gpu = gpu or Gpu("a CUDA card", size, (7, 5))
        costs = cuda_costs(gpu.name, gpu.capability)
    if flags.table:
        return plan_whisper(flags.train, costs, size)
    if flags.presets:
        if flags.world > 1:
            raise UsageError("--presets is for one process: give --world with one --preset.")
        return plan_presets(flags.train, costs)
    report = plan_budget(flags.train, costs, size, choose_ranks(flags.train, costs, size, flags.world), given)
    return report.as_json() if flags.json else report.as_table()


def beginning_with_weights(train: TrainConfig, given: frozenset[str]) -> TrainConfig:
    """The settings with the shape of the checkpoint that --init_from names, and as many tokens."""
    from konkanivani.recipe.start import begin_with

    asked, initial = begin_with(CommandLine(train, train, given), Path(train.run.init_from))
    size = train.text.vocab_size if train.tuning.new_tokenizer else initial.vocab_size
    return replace(asked.config, text=replace(asked.config.text, vocab_size=size))


def check_pretrained(flags: Flags) -> None:
    """Raises the errors that a plan of this folder would end with, before anything is traced."""
    if flags.presets or flags.table:
        raise UsageError("--presets and --table ask about other models: leave --pretrained out, or ask about it alone.")
    from konkanivani.recipe.origin import planned_architecture

    planned_architecture(flags.train).build_without_values()


if __name__ == "__main__":
    arguments = [re.sub(r"^--checkpoint(?==|$)", "--init_from", word) for word in sys.argv[1:]]
    flags = read_plan_flags(arguments)
    sys.exit(run_script(lambda: plan(flags, explicit_flags(arguments))))
