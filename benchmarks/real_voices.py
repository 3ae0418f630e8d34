#!/usr/bin/env python3
"""Trains on a folder of real voices with several seeds and scores people who were never heard: WER with its interval.

    python3 benchmarks/real_voices.py --data ../shared/data/digits_en --folder /tmp/voices --recipe short --seeds 1 2 3

The folder of data holds train.jsonl, valid.jsonl and test.jsonl, as `prepare_data.py` writes them. Settings are chosen
on the valid part; `--split test` reads the test part, once. A run that is there already is gone on with, or only
scored. Every command is printed before it runs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import math
import shlex
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from konkanivani.command_line import read_flags, run_script
from konkanivani.errors import DataError, UsageError

SCRIPTS = Path(__file__).resolve().parent.parent / "training_scripts"
# The quantile 0.975 of Student's t with 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Recipe:
    """How one run is trained, how many of its last epochs are averaged, and how it is decoded."""

    training: str
    averaged: int
    decodes: tuple[str, ...]


RECIPES = {
    # What a Conformer of another toolkit was measured on: width 128, 6 encoder layers, 15 epochs, greedy CTC.
    "short": Recipe(
        "--preset minimal --tokenizer_type unigram --ctc_weight 0.7 --intermediate_ctc_weight 0.3 "
        "--batch_size 4 --gradient_accumulation_steps 4 --epochs 15 --warmup_steps 200",
        averaged=1,
        decodes=("greedy",),
    ),
    # All that helps, in half an hour on two cores.
    "long": Recipe(
        "--preset minimal --tokenizer_type unigram --ctc_weight 0.7 --intermediate_ctc_weight 0.3 "
        "--batch_size 4 --gradient_accumulation_steps 4 --epochs 50 --warmup_steps 300 "
        "--keep_checkpoints 10",
        averaged=10,
        decodes=("greedy", "prefix", "joint"),
    ),
}


@dataclass(frozen=True)
class Flags:
    """What is trained and scored."""

    data: str
    """Folder with train.jsonl, valid.jsonl and test.jsonl."""
    folder: str
    """Where the runs go, a folder each."""
    recipe: Literal["short", "long"] = "short"
    """The settings of a run: see RECIPES."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """A run each."""
    split: Literal["valid", "test"] = "valid"
    """Which part is scored."""
    ranks: int = 1
    """Processes that train together under torchrun, of one thread each where there are as many as cores."""
    num_workers: int = 1
    """Loader processes of the trainer."""
    json: bool = False
    """Print one line of JSON instead of a table."""


@dataclass(frozen=True)
class Score:
    """What one run's checkpoint hears in one way; shares, the interval at 95 % over utterances."""

    seed: int
    decode: str
    wer: float
    wer_interval: tuple[float | None, float | None]
    cer: float
    training_seconds: float


def measure(flags: Flags) -> str:
    """Trains what is not trained yet and scores it; returns what is to be printed."""
    if flags.ranks < 1:
        raise UsageError("--ranks must be at least 1.")
    if not flags.seeds or len(set(flags.seeds)) < len(flags.seeds):
        raise UsageError("--seeds must be one or more different numbers.")
    recipe, scores = RECIPES[flags.recipe], []
    for seed in flags.seeds:
        run = Path(flags.folder) / f"{flags.recipe}_{seed}"
        seconds = train(run, recipe, seed, flags)
        checkpoint = run / "checkpoints" / "checkpoint_last.pt"
        if recipe.averaged > 1:
            checkpoint = average(run, recipe.averaged)
        scores += [score(checkpoint, decode, seed, seconds, flags) for decode in recipe.decodes]
    return json.dumps([asdict(score) for score in scores]) if flags.json else table(scores, flags.split)


def train(run: Path, recipe: Recipe, seed: int, flags: Flags) -> float:
    """Trains one run to its end, going on with what is there; the seconds that it took since it was last started."""
    taken = run / "seconds.txt"
    if taken.is_file():
        return float(taken.read_text())
    run.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(flags.ranks))
    script(
        "train_konkanivani_asr.py",
        *shlex.split(recipe.training),
        *("--train_manifest", f"{flags.data}/train.jsonl", "--valid_manifest", f"{flags.data}/valid.jsonl"),
        *("--checkpoint_dir", f"{run}/checkpoints", "--log_dir", f"{run}/runs", "--resume", "auto"),
        *("--seed", str(seed), "--num_workers", str(flags.num_workers)),
        launcher=torchrun if flags.ranks > 1 else (),
    )
    seconds = time.monotonic() - started
    taken.write_text(f"{seconds:.0f}\n")
    return seconds


def average(run: Path, last: int) -> Path:
    """The checkpoint of the mean of the run's last epochs."""
    folder = run / "checkpoints"
    script("average_checkpoints.py", "--checkpoint_dir", str(folder), "--last", str(last))
    return folder / "checkpoint_averaged.pt"


def score(checkpoint: Path, decode: str, seed: int, seconds: float, flags: Flags) -> Score:
    """The checkpoint's error rates on the split."""
    manifest = f"{flags.data}/{flags.split}.jsonl"
    line = script(
        "evaluate_konkanivani_asr.py",
        *("--checkpoint", str(checkpoint), "--manifest", manifest, "--decode", decode, "--json"),
    )
    found = json.loads(line.splitlines()[-1])
    return Score(seed, decode, found["wer"], tuple(found["wer_interval"]), found["cer"], seconds)


def script(name: str, *arguments: str, launcher: Sequence[str] = ()) -> str:
    """What a script of the project prints; a DataError with its last words where it fails."""
    command = [sys.executable, *launcher, str(SCRIPTS / name), *arguments]
    print(shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1]
        raise DataError(f"{name} ended with exit code {done.returncode}: {said} Run the command above by itself.")
    return done.stdout


def table(scores: list[Score], split: str) -> str:
    """The scores in Markdown, with the mean over the seeds of each way of decoding and its 95 % interval."""
    lines = [f"| decode | seed | {split} WER | 95 % | CER | trained in |", "|---|---|---|---|---|---|"]
    for found in scores:
        low, high = found.wer_interval
        interval = "" if low is None or high is None else f"{low:.1%} to {high:.1%}"
        rates = f"{found.wer:.1%} | {interval} | {found.cer:.1%}"
        lines.append(f"| {found.decode} | {found.seed} | {rates} | {found.training_seconds / 60:.1f} min |")
    for decode in dict.fromkeys(score.decode for score in scores):
        rates = [score.wer for score in scores if score.decode == decode]
        if 1 < len(rates) <= len(STUDENT):
            half = STUDENT[len(rates) - 2] * statistics.stdev(rates) / math.sqrt(len(rates))
            mean = statistics.mean(rates)
            cer = statistics.mean(score.cer for score in scores if score.decode == decode)
            lines.append(f"| {decode} | mean | {mean:.1%} | {mean - half:.1%} to {mean + half:.1%} | {cer:.1%} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
