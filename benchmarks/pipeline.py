#!/usr/bin/env python3
"""Measure the cost of reading, logging, validating and saving: the training script against its bare steps, in turn.

    python3 benchmarks/pipeline.py --train_manifest data/builtin/train.jsonl --valid_manifest data/builtin/valid.jsonl

Both train on the same global batches: the complete script, with workers, log, TensorBoard and one save; and the bare
steps on global batches that were read in advance. They alternate in turns of a few steps; each is stopped during the
other's turns. Not counted are the first steps of both, turns in which the script validated, and turns in which the host
gave the cores to other machines. Afterwards the script runs alone and reports its time by phase.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import os
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import astuple, dataclass
from itertools import islice

from benchmarks.measuring.common import Steal
from konkanivani.command_line import read_flags, run_script
from konkanivani.errors import DataError, UsageError
from konkanivani.flags import parse_args
from konkanivani.recipe.build import build_run
from konkanivani.recipe.startup import resolve_start
from konkanivani.training.loop import freeze_gc
from konkanivani.training.step import train_step

ROOT = Path(__file__).resolve().parent.parent
BARE = "bare"  # first argument of the process of bare steps
POLL_SECONDS = 0.005  # about a thousandth of a turn


@dataclass(frozen=True)
class Turn:
    """Wall time in seconds from the process's continuation to its last record, and the records that it logged.

    `complaint` is a message if the host took too much CPU time during the turn, otherwise empty.
    """

    seconds: float
    complaint: str
    logged: tuple[dict, ...]

    def records(self, kind: str) -> list[dict]:
        """Return the logged records of one kind."""
        return [record for record in self.logged if record["kind"] == kind]


class TurnTaker:
    """Python process, with its child processes, that runs only during its turns and appends records to `log`."""

    def __init__(self, arguments: Sequence[str], folder: Path, log: Path) -> None:
        self._name, self._log, self._read = Path(arguments[0]).name, log, 0
        self._printed = folder / "printed.txt"
        folder.mkdir(parents=True)
        with self._printed.open("w", encoding="utf-8") as printed:
            both = {"stdout": printed, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, start_new_session=True, **both)

    def advance(self, steps: int) -> Turn:
        """Let the process log `steps` more steps, then stop it; raise DataError if it ends early."""
        logged, left = [], steps
        started, steal = time.perf_counter(), Steal()
        while left > 0:
            if self._process.poll() is not None:
                raise self._ended()
            # Sent again in each round: a worker that is forked during the stop can miss the first one.
            self._signal(signal.SIGCONT)
            time.sleep(POLL_SECONDS)
            news = self._news()
            left -= sum(record["kind"] == "step" for record in news)
            logged += news
        seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)
        return Turn(seconds, steal.complaint(), tuple(logged))

    def end(self) -> str:
        """Let the process run to its end and return its output; raise DataError if it fails."""
        while self._process.poll() is None:
            self._signal(signal.SIGCONT)  # repeated, as in `advance`
            time.sleep(POLL_SECONDS)
        if self._process.returncode:
            raise self._ended()
        return self._printed.read_text(encoding="utf-8")

    def kill(self) -> None:
        """Kill the process and its children unless it has ended."""
        # SIGKILL also ends a stopped process.
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _ended(self) -> DataError:
        # The end of the output, which has the error message.
        words = self._printed.read_text(encoding="utf-8").strip()[-500:]
        return DataError(f"{self._name} ended with {self._process.returncode}: {words} Fix that and start again.")

    def _signal(self, number: signal.Signals) -> None:
        # The process leads its own group (start_new_session), which includes its data-loading workers.
        os.killpg(self._process.pid, number)

    def _news(self) -> list[dict]:
        """Return the records that were completely written since the last call."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as log:
            log.seek(self._read)
            news = log.read()
        # The last line may be incomplete; it is read next time.
        news = news[: news.rfind(b"\n") + 1]
        self._read += len(news)
        return [json.loads(line) for line in news.splitlines()]


@contextmanager
def taking_turns(arguments: Sequence[str], folder: Path, log: Path) -> Iterator[TurnTaker]:
    """Start the process, and kill it on exit from the context."""
    process = TurnTaker(arguments, folder, log)
    try:
        yield process
    finally:
        process.kill()


def run_bare_steps(log: Path, steps: int, flags: list[str]) -> None:
    """Run `steps` optimizer steps of the run with these training flags."""
    run = build_run(resolve_start(parse_args(flags)))
    with closing(run.data.global_batches.from_cursor(run.state.cursor)) as stream:
        global_batches = [global_batch for global_batch, _ in islice(stream, steps) if global_batch is not None]
    with freeze_gc():  # as in the training loop, which keeps garbage collection out of the steps
        for step, global_batch in enumerate(global_batches):
            train_step(run.step, global_batch, step)
            # The records that TurnTaker counts.
            with log.open("a", encoding="utf-8") as lines:
                print(json.dumps({"kind": "step", "audio_seconds": global_batch.audio_seconds}), file=lines)


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    train_manifest: str
    """JSONL manifest to train on."""
    valid_manifest: str
    """JSONL manifest for the only validation."""
    training: str = (
        "--device cpu --preset minimal --batch_size 4 --gradient_accumulation_steps 2 --concurrent_micro_batches 2 "
        "--tokenizer_type char"
    )
    """Further flags of the training script."""
    steps: int = 400
    """Counted steps."""
    skipped: int = 20
    """Uncounted steps at the start, while kernels are built and the heap grows."""
    turn: int = 8
    """Steps per turn."""


@dataclass(frozen=True)
class Pair:
    """One turn of each side over the same steps: `audio_seconds` of audio, and the wall time of both in seconds."""

    audio_seconds: float
    whole: float
    bare: float


def compare(flags: Flags) -> str:
    """Run both in turn, then the script alone; return the report."""
    if min(flags.steps, flags.skipped, flags.turn) < 1:
        raise UsageError("--steps, --skipped and --turn must be at least 1.")
    with tempfile.TemporaryDirectory() as folder:
        with start_whole(flags, Path(folder) / "whole") as whole, start_bare(flags, Path(folder) / "bare") as bare:
            pairs = take_turns(flags, whole, bare)
        return "\n".join([describe(pairs, flags), run_alone(flags, Path(folder) / "alone")])


def take_turns(flags: Flags, whole: TurnTaker, bare: TurnTaker) -> list[Pair]:
    """Return the pairs of turns that count; the order within a pair alternates."""
    pairs = []
    whole.advance(flags.skipped)
    bare.advance(flags.skipped)
    for number in range(flags.steps // flags.turn):
        # Alternating order cancels a drift of the machine's speed.
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
    """Return the seconds until the script's first step, and its final table."""
    # A run of its own, because the table of the alternating run includes the time in which it was stopped.
    with start_whole(flags, folder) as whole:
        to_first_step = whole.advance(1).seconds
        output = whole.end()
    table = output[output.index("Peak memory (MiB)") : output.index("View the run")]
    return f"From its start to the end of its first step: {to_first_step:.1f} s.\n{table.rstrip()}"


def audio_seconds(turn: Turn) -> float:
    """Return the seconds of audio in the bare steps of a turn."""
    return sum(record["audio_seconds"] for record in turn.records("step"))


def describe(pairs: list[Pair], flags: Flags) -> str:
    """Return both speeds over all pairs, and the quartiles of their ratio."""
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
    """Return the flags of both runs, with one save on the way."""
    folders = ("--checkpoint_dir", str(folder / "checkpoints"), "--log_dir", str(folder / "runs"))
    # Two more steps than are measured, so that the final save is in no turn.
    counted = ("--max_steps", str(flags.skipped + flags.steps + 2))
    saves = ("--save_steps", str(flags.skipped + flags.steps // 2))
    manifests = ("--train_manifest", flags.train_manifest, "--valid_manifest", flags.valid_manifest)
    return [*shlex.split(flags.training), *manifests, *folders, *counted, *saves]


def start_whole(flags: Flags, folder: Path) -> AbstractContextManager[TurnTaker]:
    """Start the training script."""
    script, log = ROOT / "training_scripts" / "train_konkanivani_asr.py", folder / "runs" / "default" / "log.jsonl"
    return taking_turns([str(script), *trainer_flags(flags, folder)], folder, log)


def start_bare(flags: Flags, folder: Path) -> AbstractContextManager[TurnTaker]:
    """Start the bare steps, with one more than is measured."""
    log, steps = folder / "steps.jsonl", flags.skipped + flags.steps + 1
    arguments = [__file__, BARE, str(log), str(steps), *trainer_flags(flags, folder)]
    return taking_turns(arguments, folder, log)


if __name__ == "__main__":
    if sys.argv[1:2] == [BARE]:
        run_bare_steps(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        flags = read_flags(Flags, sys.argv[1:])
        sys.exit(run_script(lambda: compare(flags)))
