#!/usr/bin/env python3
"""How much sooner a model learns that begins with what another one has learnt, with a new tokenizer and head.

    python3 benchmarks/transfer.py --voices ../shared/data/digits_en --folder /tmp/transfer

A first model is trained on half of the people of the training part, or on --sentences that espeak-ng's Marathi voices
speak; then the other half is learnt twice, from nothing and with `--init_from FIRST --new_tokenizer`, validated and
tested on people whom no one has heard. All by the training script; a run that has ended is not trained again. With
--through_nemo the first model has a shape of NeMo's, is written as a .nemo file and imported, as others' are.
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
    """What is learnt, and from what."""

    voices: str
    """Folder of real voices: train.jsonl, valid.jsonl, test.jsonl with speakers."""
    folder: str
    """Where sets and runs go."""
    sentences: tuple[str, ...] = ()
    """Files of sentences, spoken for the first model in the place of half of the voices."""
    minutes: float = 10.0
    """Minutes of the second set's training speech."""
    first_minutes: float = 20.0
    """Minutes of the first one's."""
    epochs: int = 25
    """Of every run."""
    tuned_epochs: int | None = None
    """Of the run that begins with the first one's weights, where it is to end sooner, its rate at its least by then."""
    validated: int = 60
    """Utterances of the valid part that are validated on; twice as many of the test part are tested on."""
    shape: str = "--preset minimal --decoder_layers 0"
    """Shape of all models, as flags of the training script (--shape="--d_model 96")."""
    through_nemo: bool = False
    """Import the first model from a .nemo file; all models then have the parts that NeMo's have."""
    flags: str = ""
    """Other flags of the training script for the run that begins with the first one's weights."""
    seed: int = 1
    """Of every run."""


@dataclass(frozen=True)
class Learnt:
    """A run: steps and CER of each epoch's validation, the CER before the first step if it was measured, the test's."""

    steps: tuple[int, ...]
    valid_cer: tuple[float, ...]
    initial_cer: float | None
    test_cer: float


def measure(flags: Flags) -> str:
    """Makes the sets and trains what has not been trained; the table."""
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
    """The checkpoint that import_asr.py makes of these weights, written as a .nemo file in this folder."""
    from benchmarks.measuring.learning.sets import SCRIPTS
    from benchmarks.measuring.nemo.exported import write_nemo
    from konkanivani.training.checkpoint.checkpoint import read_checkpoint

    file, made = place / "first.nemo", place / "imported.pt"
    write_nemo(file, read_checkpoint(weights))
    run([sys.executable, str(SCRIPTS / "import_asr.py"), str(file), str(made), "--force"])
    return made


def make_sets(flags: Flags, folder: Path) -> tuple[Path, Path]:
    """The folders of the first set and of the second."""
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
    """The run of this folder, trained where it has not ended before."""
    from benchmarks.measuring.learning.sets import SCRIPTS, read_rows

    ended = place / "summary.json"
    if not ended.is_file():
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
    epochs = [record for record in found if record["epoch"]]
    return Learnt(
        steps=tuple(record["step"] for record in epochs),
        valid_cer=tuple(record["cer"] for record in epochs),
        initial_cer=found[0]["initial_cer"],
        test_cer=json.loads(ended.read_text(encoding="utf-8"))["test_cer"],
    )


def run(command: list[str]) -> str:
    """What the command prints, itself told first; a DataError where it fails."""
    print(shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1]
        raise DataError(f"It ended with exit code {done.returncode}: {said} Run the command above by itself.")
    return done.stdout


def table(runs: dict[str, Learnt]) -> str:
    """CER by epoch, the test's, and how many of its steps the second run took to where the first one came."""
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
