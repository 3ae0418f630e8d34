"""Training runs of this trainer and of the SpeechBrain reference on one data set, and their error rates."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import soundfile

from benchmarks.measuring.learning.sets import SCRIPTS, read_rows
from konkanivani.base.errors import DataError

PEER = Path(__file__).with_name("peer.py")
OURS = "ours"


@dataclass(frozen=True)
class Rates:
    """Error rates as fractions."""

    wer: float
    cer: float


@dataclass(frozen=True)
class LearningRun:
    """Result of a run: validation rates by epoch, test rates of greedy decoding and, of this trainer, joint search."""

    learner: str
    set_name: str
    seed: int
    valid: tuple[Rates, ...]
    test: Rates
    joint: Rates | None
    seconds: float


@dataclass(frozen=True)
class Order:
    """Settings of a run; `flags` are additional flags of the training script, `threads` OpenMP's."""

    learner: str
    made: Path
    seed: int
    epochs: int
    folder: Path
    flags: str
    threads: int
    python: Path
    device: str

    @property
    def place(self) -> Path:
        """Folder of the run."""
        return self.folder / self.made.name / f"{self.learner}_{self.seed}"


def run_of(order: Order) -> LearningRun:
    """Return the stored result of a finished run, or else train it now."""
    kept = order.place / "learned.json"
    if not kept.is_file():
        order.place.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        valid, test, joint = (_train_ours if order.learner == OURS else _train_peer)(order)
        seconds = time.monotonic() - started
        run = LearningRun(order.learner, order.made.name, order.seed, valid, test, joint, seconds)
        kept.write_text(json.dumps(asdict(run)) + "\n", encoding="utf-8")
    return read_run(kept)


def read_run(path: Path) -> LearningRun:
    """Return the result of a finished run."""
    found = json.loads(path.read_text(encoding="utf-8"))
    joint = found["joint"] and Rates(**found["joint"])
    valid = tuple(Rates(**epoch) for epoch in found["valid"])
    return LearningRun(**found | {"valid": valid, "test": Rates(**found["test"]), "joint": joint})


def _train_ours(order: Order) -> tuple[tuple[Rates, ...], Rates, Rates | None]:
    """Train with the training script from the command line; an interrupted run is resumed."""
    manifests = [f"--{part}_manifest={order.made}/{part}.jsonl" for part in ("train", "valid", "test")]
    printed = _output_of(
        [
            *(sys.executable, str(SCRIPTS / "train_konkanivani_asr.py"), *manifests, *shlex.split(order.flags)),
            *("--device", order.device, "--preset", "minimal"),
            *("--epochs", str(order.epochs), "--seed", str(order.seed)),
            *("--checkpoint_dir", f"{order.place}/checkpoints", "--log_dir", f"{order.place}/runs", "--resume", "auto"),
            # The manifests refer to audio outside of their own folders.
            *("--audio_roots", *_folders_of(order.made)),
        ],
        order,
    )
    said = json.loads(printed[-1])
    log = Path(said["tensorboard"]) / "log.jsonl"
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    # Epoch 0 is the validation before training.
    valid = tuple(Rates(r["wer"], r["cer"]) for r in records if r["kind"] == "validation" and r["epoch"])
    is_joint = "test_wer_joint" in said  # unless --flags select another decoder
    joint = Rates(said["test_wer_joint"], said["test_cer_joint"]) if is_joint else None
    return valid, Rates(said["test_wer"], said["test_cer"]), joint


def _train_peer(order: Order) -> tuple[tuple[Rates, ...], Rates, None]:
    rate = soundfile.info(read_rows(order.made / "test.jsonl")[0].audio).samplerate
    run = {"epochs": order.epochs, "seed": order.seed, "batch": 40.0, "device": order.device}
    asked = {"folder": str(order.made), "rate": rate, **run}
    said = [json.loads(line) for line in _output_of([str(order.python), str(PEER), json.dumps(asked)], order)]
    return tuple(Rates(epoch["wer"], epoch["cer"]) for epoch in said[:-1]), Rates(**said[-1]["test"]), None


def _folders_of(made: Path) -> Iterator[str]:
    rows = [row for part in ("train", "valid", "test") for row in read_rows(made / f"{part}.jsonl")]
    yield from sorted({str(Path(row.audio).parent) for row in rows})


def _output_of(command: list[str], order: Order) -> list[str]:
    """Run a command and return the lines of its stdout; raise DataError if it fails."""
    print(shlex.join(command), file=sys.stderr, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(order.threads)}
    with open(order.place / "errors.txt", "w", encoding="utf-8") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    if done.returncode:
        raise DataError(
            f"It ended with exit code {done.returncode}; {errors.name} says why. Run the command above by itself."
        )
    return done.stdout.splitlines()
