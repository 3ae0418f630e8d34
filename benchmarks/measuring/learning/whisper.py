"""Small Whisper models trained by this trainer and by a loop around transformers, then fine-tuned by this trainer.

Each run is a separate process.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.learning.sets import Sources, read_rows
from konkanivani.base.errors import DataError
from tests.whisper.small_model import write_model

SCRIPTS = Path(__file__).resolve().parents[3] / "training_scripts"
LOOP = Path(__file__).with_name("whisper_loop.py")
BATCH, LANGUAGE = 16, "en"
# The vocabulary of the recordings, from which the random model gets its tokens.
DIGITS = "zero one two three four five six seven eight nine".split()
TUNED = {"frozen encoder": ("--freeze", "encoder"), "LoRA": ("--lora_rank", "8")}


@dataclass(frozen=True)
class Task:
    """Settings common to all runs: speech, output folder, model size and training length."""

    voices: Path
    folder: Path
    epochs: int
    rate: float
    width: int
    seconds: int


@dataclass(frozen=True)
class LearnedRun:
    """Result of a run: error rates as fractions, and the seconds of its steps."""

    learner: str
    seed: int
    wer: float
    cer: float
    seconds: float


def learn(task: Task, seed: int) -> Iterator[LearnedRun]:
    """Yield the runs of a seed.

    From random weights: the loop around transformers, this trainer, and this trainer with --audio_context speech. Then
    the fine-tuning runs, from the folder that this trainer exported.
    """
    made = Sources(task.voices, ()).make("voices", task.folder / "sets")
    base = task.folder / f"base_{seed}"
    if not (base / "model.safetensors").is_file():
        write_model(base, width=task.width, seed=seed, seconds=task.seconds, words=DIGITS)
    yield _kept(task, "transformers", seed, lambda place: _loop(task, made, base, seed))
    from_nothing = ("--learning_rate", str(task.rate), "--epochs", str(task.epochs))
    yield _kept(task, "ours", seed, lambda place: _ours(made, base, seed, place, from_nothing))
    hearing = (*from_nothing, "--audio_context", "speech")
    yield _kept(task, "ours, speech alone", seed, lambda place: _ours(made, base, seed, place, hearing))
    # Fine-tuning starts from the run on the whole window.
    tuned = task.folder / "runs" / f"ours_{seed}" / "exported"
    for way, flags in TUNED.items():
        more = (*flags, "--epochs", str(max(1, task.epochs // 3)))
        yield _kept(task, f"ours, {way}", seed, lambda place, more=more: _ours(made, tuned, seed, place, more))


def table_of(runs: list[LearnedRun]) -> str:
    """Return a table with a row per run."""
    lines = [f"{'learner':<22}{'seed':>5}{'WER %':>8}{'CER %':>8}{'seconds of steps':>18}"]
    for run in runs:
        rates = f"{100 * run.wer:>8.1f}{100 * run.cer:>8.1f}"
        lines.append(f"{run.learner:<22}{run.seed:>5}{rates}{run.seconds:>18.0f}")
    return "\n".join(lines)


def _kept(task: Task, learner: str, seed: int, train) -> LearnedRun:
    """Return the stored result of a finished run, or else train it now."""
    place = task.folder / "runs" / f"{learner.replace(', ', '_').replace(' ', '_')}_{seed}"
    kept = place / "learned.json"
    if not kept.is_file():
        place.mkdir(parents=True, exist_ok=True)
        run = LearnedRun(learner, seed, *train(place))
        kept.write_text(json.dumps(dataclasses.asdict(run)) + "\n", encoding="utf-8")
    return LearnedRun(**json.loads(kept.read_text(encoding="utf-8")))


def _loop(task: Task, made: Path, base: Path, seed: int) -> tuple[float, float, float]:
    asked = {
        **{"base": str(base), "train": str(made / "train.jsonl"), "test": str(made / "test.jsonl")},
        **{"epochs": task.epochs, "seed": seed, "rate": task.rate, "batch": BATCH, "language": LANGUAGE},
    }
    said = json.loads(_output_of([sys.executable, str(LOOP), json.dumps(asked)])[-1])
    return said["wer"], said["cer"], said["seconds"]


def _ours(made: Path, base: Path, seed: int, place: Path, flags: tuple[str, ...]) -> tuple[float, float, float]:
    """Train and export with the scripts, from the command line; return WER, CER and the seconds of the steps."""
    roots = sorted(
        {str(Path(row.audio).parent) for part in ("train", "test") for row in read_rows(made / f"{part}.jsonl")}
    )
    trainer = [sys.executable, str(SCRIPTS / "train_konkanivani_asr.py"), "--pretrained", str(base)]
    trainer += [f"--{part}_manifest={made}/{part}.jsonl" for part in ("train", "test")]
    trainer += ["--language", LANGUAGE, "--audio_roots", *roots, "--device", "cpu", "--seed", str(seed), *flags]
    trainer += ["--batch_size", str(BATCH), "--gradient_accumulation_steps", "1"]
    # No SpecAugment, as in the other loop.
    trainer += ["--frequency_masks", "0", "--time_masks", "0", "--resume", "auto"]
    said = json.loads(
        _output_of([*trainer, "--checkpoint_dir", f"{place}/checkpoints", "--log_dir", f"{place}/runs"])[-1]
    )
    log = Path(said["tensorboard"], "log.jsonl").read_text(encoding="utf-8").splitlines()
    # The time of the steps only, as in the other loop.
    seconds = sum(record["seconds"] for record in map(json.loads, log) if record["kind"] == "step")
    exporter = [sys.executable, str(SCRIPTS / "export_asr.py"), "--checkpoint", said["checkpoint"]]
    _output_of([*exporter, "--whisper", f"{place}/exported"])
    return said["test_wer"], said["test_cer"], seconds


def _output_of(command: list[str]) -> list[str]:
    """Run a command and return the lines of its stdout, with stderr passed through; raise DataError if it fails."""
    print(shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    if done.returncode:
        raise DataError(f"It ended with exit code {done.returncode}. Run the command above by itself.")
    return done.stdout.splitlines()
