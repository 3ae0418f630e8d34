#!/usr/bin/env python3
"""What reading, logging, validating and saving cost: the whole training script beside its bare steps, in turn.

    python3 benchmarks/pipeline.py --train_manifest data/builtin/train.jsonl --valid_manifest data/builtin/valid.jsonl

Both train on the same windows: the script as anyone runs it, with its workers, log, TensorBoard and a save; the bare
steps on windows that were read beforehand. Each stands still in the other's turns, of a few steps. The first steps of
both are not counted, nor are turns in which the script validated or the host gave the cores to other machines. Then the
script alone, and where its time went, by phase.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import shlex
import statistics
import tempfile
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass

from benchmarks.measuring.taking_turns import Turn, TurnTaker, taking_turns
from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Flags:
    """What is run."""

    train_manifest: str
    """JSONL manifest to train on."""
    valid_manifest: str
    """JSONL manifest that is validated on once."""
    training: str = (
        "--device cpu --preset minimal --batch_size 4 --gradient_accumulation_steps 2 --concurrent_micro_batches 2 "
        "--tokenizer_type char"
    )
    """Further flags of the training script."""
    steps: int = 400
    """Steps that are counted."""
    skipped: int = 20
    """Steps before them that are not: kernels are made, the heap grows."""
    turn: int = 8
    """Steps of a turn."""


@dataclass(frozen=True)
class Pair:
    """The same steps taken by both, a turn each: `audio_seconds` of sound, and the seconds of wall time they took."""

    audio_seconds: float
    whole: float
    bare: float


def compare(flags: Flags) -> str:
    """Runs both in turn, then the script alone; what is to be printed."""
    if min(flags.steps, flags.skipped, flags.turn) < 1:
        raise UsageError("--steps, --skipped and --turn must be at least 1.")
    with tempfile.TemporaryDirectory() as folder:
        with start_whole(flags, Path(folder) / "whole") as whole, start_bare(flags, Path(folder) / "bare") as bare:
            pairs = take_turns(flags, whole, bare)
        return "\n".join([describe(pairs, flags), run_alone(flags, Path(folder) / "alone")])


def take_turns(flags: Flags, whole: TurnTaker, bare: TurnTaker) -> list[Pair]:
    """A pair for each two turns, of which those count that are said above; who comes first changes."""
    pairs = []
    whole.advance(flags.skipped)
    bare.advance(flags.skipped)
    for number in range(flags.steps // flags.turn):
        order = (whole, bare) if number % 2 == 0 else (bare, whole)
        taken = {process: process.advance(flags.turn) for process in order}
        said = f"turn {number + 1}: {taken[bare].seconds / taken[whole].seconds:.0%}"
        validated = "it validated" if taken[whole].records("validation") else ""
        complaint = validated or taken[whole].complaint or taken[bare].complaint
        if complaint:
            said += f", left out: {complaint}"
        else:
            pairs.append(Pair(audio_seconds(taken[bare]), taken[whole].seconds, taken[bare].seconds))
        print(said, file=sys.stderr, flush=True)
    return pairs


def run_alone(flags: Flags, folder: Path) -> str:
    """Seconds until the script's first step, and its last table, which would count what it stood still."""
    with start_whole(flags, folder) as whole:
        to_first_step = whole.advance(1).seconds
        output = whole.end()
    table = output[output.index("Memory in MiB") : output.index("Look at the run")]
    return f"From its start to the end of its first step: {to_first_step:.1f} s.\n{table.rstrip()}"


def audio_seconds(turn: Turn) -> float:
    """What the bare steps of a turn have heard, in seconds."""
    return sum(record["audio_seconds"] for record in turn.records("step"))


def describe(pairs: list[Pair], flags: Flags) -> str:
    """Both speeds over all pairs, and how the pairs differ."""
    if len(pairs) < 2:
        return "Too few turns could be counted. Give it more --steps, or a quieter machine."
    audio, whole, bare = (sum(values) for values in zip(*map(astuple, pairs), strict=True))
    low, middle, high = statistics.quantiles([pair.bare / pair.whole for pair in pairs], n=4)
    return (
        f"The training script: {audio / whole:.1f} audio s/s; its bare steps: {audio / bare:.1f}; {bare / whole:.0%}, "
        f"over {len(pairs)} of {flags.steps // flags.turn} turns of {flags.turn} steps each, half of them between "
        f"{low:.0%} and {high:.0%}, middle {middle:.0%}."
    )


def trainer_flags(flags: Flags, folder: Path) -> list[str]:
    """The run's flags, whichever way its steps are taken; one save on the way."""
    folders = ("--checkpoint_dir", str(folder / "checkpoints"), "--log_dir", str(folder / "runs"))
    # Two steps more than are looked at: the last save belongs to no turn.
    counted = ("--max_steps", str(flags.skipped + flags.steps + 2))
    saves = ("--save_steps", str(flags.skipped + flags.steps // 2))
    manifests = ("--train_manifest", flags.train_manifest, "--valid_manifest", flags.valid_manifest)
    return [*shlex.split(flags.training), *manifests, *folders, *counted, *saves]


def start_whole(flags: Flags, folder: Path) -> AbstractContextManager[TurnTaker]:
    """The training script."""
    script, log = ROOT / "training_scripts" / "train_konkanivani_asr.py", folder / "runs" / "default" / "log.jsonl"
    return taking_turns([str(script), *trainer_flags(flags, folder)], folder, log)


def start_bare(flags: Flags, folder: Path) -> AbstractContextManager[TurnTaker]:
    """The steps alone, with one more than is looked at."""
    log, steps = folder / "steps.jsonl", flags.skipped + flags.steps + 1
    arguments = ["-m", "benchmarks.measuring.bare_steps", str(log), str(steps), *trainer_flags(flags, folder)]
    return taking_turns(arguments, folder, log)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
