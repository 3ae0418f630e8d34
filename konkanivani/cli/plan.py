"""Compute the batch sizes that fit a memory budget. No GPU is needed: the training step is traced.

    konkanivani plan --memory_budget 4GiB
    konkanivani plan --gpu T4 --world 8 --shard always
    konkanivani plan \\
        --gpu "GTX 980" --checkpoint model.pt --train_layers 8

Also accepts the trainer's flags, such as --memory_budget and --preset (konkanivani train --help lists them).
--checkpoint is the same as --init_from.
"""

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from konkanivani.child_process import run_command
from konkanivani.command_line import read_flags
from konkanivani.config import TrainConfig
from konkanivani.errors import UsageError
from konkanivani.flags import (
    CommandLine,
    check_idle_flags,
    command_words,
    defaults_beside,
    explicit_flags,
    settle_effective_batch,
)
from konkanivani.memory.devices import PlanTarget, find_target
from konkanivani.rules import check_config

if TYPE_CHECKING:
    from konkanivani.planning.report import PlanReport

HOW_LONG = "10 to 20 s the first time, 3 s when repeated, since traces are cached"


@dataclass(frozen=True)
class OwnFlags:
    """GPU and output."""

    gpu: str | None = None
    """Name of the GPU to plan for, such as "GTX 980" or "A100 80GB"."""
    world: int = 1
    """Number of ranks, each with a GPU of this memory; --shard selects FSDP2 sharding."""
    presets: bool = False
    """Print a table for all presets in 2, 4, 8, 14.7 and 24 GiB."""
    table: bool = False
    """Print the memory of each published Whisper model, fully or partly trained, with and without offloading."""
    json: bool = False
    """Print one line of JSON instead of a table, in bytes and seconds."""


@dataclass(frozen=True)
class Flags(OwnFlags):
    """Own flags and the trainer's."""

    train: TrainConfig = field(default_factory=TrainConfig)


def read_plan_flags(arguments: list[str]) -> Flags:
    """Parse the command line; the model has the shape of the preset unless single flags override it."""
    # Parsed twice: the first pass finds --preset and --pretrained, which set the defaults of the second.
    first = read_flags(Flags, arguments, Flags(), shown=OwnFlags, description=__doc__)
    return read_flags(Flags, arguments, Flags(train=defaults_beside(first.train)), description=__doc__)


def plan(config: TrainConfig, gpu: str | None = None, memory_budget: str | None = None, world: int = 1) -> "PlanReport":
    """Return the memory plan of a training run, as `konkanivani plan` does; no GPU is needed.

    Args:
        config: settings of the run; those that equal their default count as not given (see `konkanivani.train`).
        gpu: name of the GPU to plan for, such as "GTX 980".
        memory_budget: maximum memory, such as "4GiB" (None: `config.memory.memory_budget`, or the memory of the GPU).
        world: number of ranks.

    Raises a UsageError for settings that contradict each other, and a ResourceError if the model does not fit.
    """
    if memory_budget is not None:
        config = replace(config, memory=replace(config.memory, memory_budget=memory_budget))
    device = [] if gpu is None else ["--gpu", gpu]
    # In a child process: the plan forks, which is not possible after this process has used CUDA.
    ended = run_command(
        "plan", [*command_words(config), *device, "--world", str(world), "--json"], is_result_shown=False
    )
    if ended.is_interrupted:
        raise KeyboardInterrupt
    from konkanivani.planning.report import read_report

    return read_report(ended.output[-1])


def plan_text(flags: Flags, explicit: frozenset[str]) -> str:
    """Return the memory plan, or a table of models, as text."""
    train, target = settle(flags, explicit)
    from konkanivani.planning.report import plan_presets, plan_target, plan_whisper

    if not (flags.table or flags.presets):
        report = plan_target(train, target, flags.world, explicit)
        return report.as_json() if flags.json else report.as_table()
    if flags.table:
        return plan_whisper(train, target.costs, target.budget)
    if flags.world > 1:
        raise UsageError("--presets supports one process: use --world with one --preset.")
    return plan_presets(train, target.costs)


def settle(flags: Flags, explicit: frozenset[str]) -> tuple[TrainConfig, PlanTarget]:
    """Return the checked settings, with the shape of a checkpoint, and the device to plan for."""
    check_idle_flags(flags.train, explicit)
    flags = replace(flags, train=with_global_batch(flags.train, explicit))
    check_config(flags.train)
    if flags.world < 1:
        raise UsageError("--world must be at least 1.")
    target = find_target(flags.train, flags.gpu, needs_budget=not flags.presets)
    if flags.train.run.init_from is not None:
        flags = replace(flags, train=with_shape_of_checkpoint(flags.train, Path(flags.train.run.init_from), explicit))
    if flags.train.pretrained.pretrained is not None:
        check_pretrained(flags)
    # On stderr, so that --json leaves one line on stdout.
    print(f"Tracing training steps ({HOW_LONG}).", file=sys.stderr, flush=True)
    return flags.train, target


def with_global_batch(train: TrainConfig, explicit: frozenset[str]) -> TrainConfig:
    """Return the settings with the given utterances per step; the micro-batches are chosen by the plan."""
    if "batch_size" not in explicit and "gradient_accumulation_steps" not in explicit:
        train = replace(train, data=replace(train.data, batch_size="auto"))
    return settle_effective_batch(train, explicit)


def with_shape_of_checkpoint(train: TrainConfig, path: Path, explicit: frozenset[str]) -> TrainConfig:
    """Return the settings with the shape and vocabulary size of the --init_from checkpoint at `path`."""
    from konkanivani.recipe.startup import start_from_checkpoint

    command_line, initial = start_from_checkpoint(CommandLine(train, train, explicit), path)
    # The vocabulary size sets the size of the output head and of the logits.
    size = train.text.vocab_size if train.tuning.new_tokenizer else initial.vocab_size
    return replace(command_line.config, text=replace(command_line.config.text, vocab_size=size))


def check_pretrained(flags: Flags) -> None:
    """Raise the errors of planning with this --pretrained folder before any tracing."""
    if flags.presets or flags.table:
        raise UsageError("--presets and --table do not apply to --pretrained: omit them or --pretrained.")
    from konkanivani.planning.sizes import planned_architecture

    # On the meta device, without allocating weights.
    planned_architecture(flags.train).build_without_values()


def main(arguments: list[str]) -> str:
    """Plan according to the command line; return the plan as text."""
    words = [re.sub(r"^--checkpoint(?==|$)", "--init_from", word) for word in arguments]
    return plan_text(read_plan_flags(words), explicit_flags(words))
