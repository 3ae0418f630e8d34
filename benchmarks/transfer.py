#!/usr/bin/env python3
"""Measure how much faster a model learns if it is initialized from another model, with a new tokenizer and head.

    python3 benchmarks/transfer.py --voices ../shared/data/digits_en --folder /tmp/transfer

A first model is trained on half of the speakers of the training part, or on --sentences spoken by espeak-ng's Marathi
voices. Then the other half is trained twice, from random weights and with `--init_from FIRST --new_tokenizer`,
validated and tested on speakers that no training part contains. All runs use the training script; a finished run is not
repeated. With --through_nemo the first model has a shape of NeMo's, is written as a .nemo file, and is imported from
it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from itertools import zip_longest

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import DataError, UsageError

SCRATCH, TUNED = "from nothing", "with what the first has learnt"


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    voices: str
    """Folder of recorded voices: train.jsonl, valid.jsonl, test.jsonl with speakers."""
    folder: str
    """Folder for data sets and runs."""
    sentences: tuple[str, ...] = ()
    """Files of sentences, spoken as training data of the first model instead of half of the voices."""
    minutes: float = 10.0
    """Minutes of the second set's training speech."""
    first_minutes: float = 20.0
    """Minutes of the first set's training speech."""
    epochs: int = 25
    """Epochs of every run."""
    tuned_epochs: int | None = None
    """Epochs of the run that is initialized from the first model; its schedule ends there too (None: --epochs)."""
    validated: int = 60
    """Utterances of the valid part for validation; twice that number of the test part for the test."""
    shape: str = "--preset minimal --decoder_layers 0"
    """Shape of all models, as flags of the training script (--shape="--d_model 96")."""
    through_nemo: bool = False
    """Import the first model from a .nemo file; all models then have the same parts as NeMo's."""
    flags: str = ""
    """Other flags of the training script for the run that is initialized from the first model."""
    seed: int = 1
    """Seed of every run."""


@dataclass(frozen=True)
class Learnt:
    """Result of a run: steps and CER per validation, the CER before the first step if measured, and the test CER."""

    steps: tuple[int, ...]
    valid_cer: tuple[float, ...]
    initial_cer: float | None
    test_cer: float


def measure(flags: Flags) -> str:
    """Create the data sets, train the missing runs, and return the table."""
    if min(flags.minutes, flags.first_minutes, flags.epochs, flags.tuned_epochs or 1, flags.validated) <= 0:
        raise UsageError("--minutes, --first_minutes, --epochs, --tuned_epochs and --validated must be above 0.")
    folder = Path(flags.folder).resolve()
    first, second = make_sets(flags, folder / "sets")
    place, shape = folder / f"seed_{flags.seed}{'_nemo' * flags.through_nemo}", flags.shape
    if flags.through_nemo:
        from benchmarks.measuring.nemo.exported import SHAPE

        shape = f"{shape} {SHAPE}"
    learn(flags, first, place / "first", shape, flags.epochs)
    weights = place / "first" / "checkpoints" / "checkpoint_best.pt"
    if flags.through_nemo:
        weights = imported(weights, place)
    tuned_epochs = flags.tuned_epochs or flags.epochs
    tuned = f"--init_from {shlex.quote(str(weights))} --new_tokenizer {flags.flags}"
    return table(
        {
            SCRATCH: learn(flags, second, place / "scratch", shape, flags.epochs),
            TUNED: learn(flags, second, place / f"tuned_{tuned_epochs}", tuned, tuned_epochs),
        }
    )


def imported(weights: Path, place: Path) -> Path:
    """Write the weights as a .nemo file in this folder; return the checkpoint that import_asr.py creates from it."""
    from benchmarks.measuring.learning.sets import SCRIPTS
    from benchmarks.measuring.nemo.exported import write_nemo
    from konkanivani.training.checkpoint.checkpoint import read_checkpoint

    file, made = place / "first.nemo", place / "imported.pt"
    write_nemo(file, read_checkpoint(weights))
    run([sys.executable, str(SCRIPTS / "import_asr.py"), str(file), str(made), "--force"])
    return made


def make_sets(flags: Flags, folder: Path) -> tuple[Path, Path]:
    """Return the folders of the first and the second data set."""
    from benchmarks.measuring.learning.sets import Sources, cut_training, read_rows, speakers_of, write_rows

    voices, made = Path(flags.voices), []
    rows = read_rows(voices / "train.jsonl")
    people = speakers_of(rows)
    for name, heard in (("first", people[::2]), ("second", people[1::2])):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        write_rows(place / "train.jsonl", [row for row in rows if row.speaker in heard])
        write_rows(place / "valid.jsonl", read_rows(voices / "valid.jsonl")[: flags.validated])
        write_rows(place / "test.jsonl", read_rows(voices / "test.jsonl")[: 2 * flags.validated])
        made.append(place)
    if flags.sentences:
        files = tuple(str(Path(file).resolve()) for file in flags.sentences)
        made[0] = Sources(voices, files).make("sentences", folder)
    return cut_training(made[0], flags.first_minutes), cut_training(made[1], flags.minutes)


def learn(flags: Flags, made: Path, place: Path, begun: str, epochs: int) -> Learnt:
    """Return the result of the run in this folder; train it unless it has finished before."""
    from benchmarks.measuring.learning.sets import SCRIPTS, read_rows

    ended = place / "summary.json"
    if not ended.is_file():
        # The summary is written last, so a folder without it belongs to an interrupted run.
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        parts = ("train", "valid", "test")
        roots = {str(Path(row.audio).parent) for part in parts for row in read_rows(made / f"{part}.jsonl")}
        command = [
            *(sys.executable, str(SCRIPTS / "train_konkanivani_asr.py"), "--device", "cpu", *shlex.split(begun)),
            *(f"--{part}_manifest={made}/{part}.jsonl" for part in parts),
            *("--audio_roots", *sorted(roots), "--epochs", str(epochs), "--seed", str(flags.seed)),
            *("--checkpoint_dir", str(place / "checkpoints"), "--log_dir", str(place / "runs")),
        ]
        ended.write_text(run(command).splitlines()[-1], encoding="utf-8")
    log = (place / "runs" / "default" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    found = [record for record in map(json.loads, log) if record["kind"] == "validation"]
    # The validation before the first step has epoch 0.
    epochs = [record for record in found if record["epoch"]]
    return Learnt(
        steps=tuple(record["step"] for record in epochs),
        valid_cer=tuple(record["cer"] for record in epochs),
        initial_cer=found[0]["initial_cer"],
        test_cer=json.loads(ended.read_text(encoding="utf-8"))["test_cer"],
    )


def run(command: list[str]) -> str:
    """Print the command to stderr, run it and return its output; raise DataError if it fails."""
    print(shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1]
        raise DataError(f"It ended with exit code {done.returncode}: {said} Run the command above by itself.")
    return done.stdout


def table(runs: dict[str, Learnt]) -> str:
    """Return CER by epoch, test CER, and the fraction of steps that the second run needs to reach the first one."""
    scratch, tuned = runs[SCRATCH], runs[TUNED]
    lines = [f"| valid CER after steps | {' | '.join(runs)} |", "|---|---|---|"]
    if tuned.initial_cer is not None:
        lines.append(f"| 0 | | {tuned.initial_cer:.1%} |")
    for step, *rates in zip_longest(scratch.steps, scratch.valid_cer, tuned.valid_cer, fillvalue=None):
        lines.append(f"| {step} | {' | '.join('' if rate is None else f'{rate:.1%}' for rate in rates)} |")
    lines.append(f"| test CER of the best | {scratch.test_cer:.1%} | {tuned.test_cer:.1%} |")
    best = min(scratch.valid_cer)
    reached = [step for step, cer in zip(tuned.steps, tuned.valid_cer, strict=True) if cer <= best]
    when = scratch.steps[scratch.valid_cer.index(best)]
    after = f"after {reached[0]}, {reached[0] / when:.2f} of them" if reached else "never"
    return "\n".join([*lines, "", f"The best from nothing, {best:.1%} after {when} steps, is reached {after}."])


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
