#!/usr/bin/env python3
"""What reading, logging, validating and saving cost: the whole training script beside its bare steps, in turn.

    python3 benchmarks/pipeline.py --train_manifest data/builtin/train.jsonl --valid_manifest data/builtin/valid.jsonl

Both train on the same windows: the script as anyone runs it, with its workers, log, TensorBoard and a save; the bare
steps on windows that were read beforehand. The first steps of both are not counted, nor is validation, which its own
line has. Then where the script's time went, by phase.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import shlex
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass

from konkanivani.command_line import read_flags, run_script
from konkanivani.errors import DataError, UsageError

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Flags:
    """What is run."""

    train_manifest: str
    """JSONL manifest to train on."""
    valid_manifest: str
    """JSONL manifest that is validated on once."""
    training: str = (
        "--device cpu --preset minimal --batch_size 4 --gradient_accumulation_steps 2 --micro_batches_at_once 2 "
        "--tokenizer_type char"
    )
    """Further flags of the training script."""
    steps: int = 150
    """Steps that are counted in each run."""
    skipped: int = 20
    """Steps before them that are not: kernels are made, the heap grows."""
    rounds: int = 3
    """Runs of each, in turn; medians count."""


@dataclass(frozen=True)
class Whole:
    """A run of the script: audio seconds a second of its steps, its last table, seconds until its first step."""

    rate: float
    table: str
    seconds_to_first_step: float


def compare(flags: Flags) -> str:
    """Runs both in turn; what is to be printed."""
    if min(flags.steps, flags.rounds) < 1 or flags.skipped < 1:
        raise UsageError("--steps, --skipped and --rounds must be at least 1.")
    wholes, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(flags.rounds):
            wholes.append(run_whole(flags, Path(folder) / f"whole_{number}"))
            bare.append(run_bare(flags, Path(folder) / f"bare_{number}"))
            print(f"round {number + 1}: {wholes[-1].rate:.1f} of {bare[-1]:.1f} audio s/s", file=sys.stderr, flush=True)
    rate, bare_rate = statistics.median(whole.rate for whole in wholes), statistics.median(bare)
    by_round = ", ".join(f"{whole.rate / own:.0%}" for whole, own in zip(wholes, bare, strict=True))
    first = statistics.median(whole.seconds_to_first_step for whole in wholes)
    return (
        f"The training script: {rate:.1f} audio s/s over steps {flags.skipped + 1} to {flags.skipped + flags.steps}; "
        f"its bare steps: {bare_rate:.1f}; {rate / bare_rate:.0%}, by round {by_round}.\n"
        f"From its start to the end of its first step: {first:.1f} s.\n{wholes[-1].table}"
    )


def trainer_flags(flags: Flags, folder: Path) -> list[str]:
    """The run's flags, whichever way its steps are taken; one save on the way."""
    folders = ("--checkpoint_dir", str(folder / "checkpoints"), "--log_dir", str(folder / "runs"))
    counted = ("--max_steps", str(flags.skipped + flags.steps), "--save_steps", str(flags.skipped + flags.steps // 2))
    manifests = ("--train_manifest", flags.train_manifest, "--valid_manifest", flags.valid_manifest)
    return [*shlex.split(flags.training), *manifests, *folders, *counted]


def run_whole(flags: Flags, folder: Path) -> Whole:
    """The script, run to its end."""
    script, log = ROOT / "training_scripts" / "train_konkanivani_asr.py", folder / "runs" / "default" / "log.jsonl"
    began = time.monotonic()
    process = start([str(script), *trainer_flags(flags, folder)])
    while process.poll() is None and not (log.exists() and '"kind": "step"' in log.read_text(encoding="utf-8")):
        time.sleep(0.02)
    to_first_step = time.monotonic() - began
    output = end(process, script.name)
    records = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    counted = [record for record in records if record["kind"] == "step"][flags.skipped :]
    seconds = sum(record["seconds"] for record in counted)
    audio = sum(record["audio_seconds_per_second"] * record["seconds"] for record in counted)
    table = output[output.index("Memory in MiB") : output.index("Look at the run")]
    return Whole(audio / seconds, table.rstrip(), to_first_step)


def run_bare(flags: Flags, folder: Path) -> float:
    """Audio seconds a second of the steps alone."""
    counts = (str(flags.skipped), str(flags.steps))
    process = start(["-m", "benchmarks.measuring.bare_steps", *counts, *trainer_flags(flags, folder)])
    output = end(process, "bare_steps")
    measured = json.loads(output.splitlines()[-1])
    return measured["audio_seconds"] / measured["seconds"]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """A Python process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, text=True, **pipes)


def end(process: subprocess.Popen[str], name: str) -> str:
    """What it has printed when it is done; a DataError with its last words where it failed."""
    output, errors = process.communicate()
    if process.returncode:
        last = errors.strip().splitlines()[-1]
        raise DataError(f"The script {name} ended with {process.returncode}: {last} Mend that and start again.")
    return output


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
