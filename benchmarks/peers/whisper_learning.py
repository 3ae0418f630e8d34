#!/usr/bin/env python3
"""Compare the training of a small random Whisper model by this trainer and by a plain loop around transformers.

    python3 benchmarks/peers/whisper_learning.py --voices ../shared/data/digits_en --folder /tmp/whisper_learning

Both start from one folder of random weights and take the same number of steps with the same batch size, learning rates
and schedule, without SpecAugment. No checkpoint is selected: the final weights are scored on other speakers, with
greedy decoding. This trainer runs a second time with --audio_context speech. Then it continues from the folder that it
exported, once with a frozen encoder and once with low-rank products (LoRA), at the trainer's default learning rates,
for a third of the epochs. Seconds are the steps' only; the runs are sequential. An existing run is not repeated.

The other loop is plain and correct: features are computed once; the loss of a step is the mean over all labels of its
batch, as in the paper; AdamW with a linear warm-up and half a cosine, gradients clipped to a norm of 1, activation
checkpointing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv("test")

import dataclasses
import importlib.util
import json
import math
import os
import random
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import soundfile
import torch

from benchmarks.peers.learning import Sources, read_rows
from konkanivani.command_line import read_flags, run_script
from konkanivani.errors import DataError, UsageError
from tests.whisper.small_model import write_model

if TYPE_CHECKING:
    import transformers


SCRIPTS = Path(__file__).resolve().parents[2] / "training_scripts"
LOOP = "loop"  # first argument of the process of the other loop
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
    said = json.loads(_output_of([sys.executable, __file__, LOOP, json.dumps(asked)])[-1])
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


@dataclass(frozen=True)
class LoopSettings:
    """Settings of a run; `batch` is the number of utterances per step."""

    base: str
    train: str
    test: str
    epochs: int
    seed: int
    rate: float
    batch: int
    language: str


@dataclass(frozen=True)
class Utterance:
    """Features (F, T) of Whisper's window, labels after the start token, and transcript."""

    features: torch.Tensor
    labels: list[int]
    text: str


def read_part(
    manifest: str, extractor: "transformers.WhisperFeatureExtractor", tokenizer: "transformers.WhisperTokenizer"
) -> list[Utterance]:
    """Return the utterances of a manifest, resampled to 16 kHz."""
    import torchaudio

    utterances = []
    for row in map(json.loads, Path(manifest).read_text(encoding="utf-8").splitlines()):
        samples, rate = soundfile.read(Path(manifest).parent / row["audio_filepath"], dtype="float32")
        samples = torchaudio.functional.resample(torch.from_numpy(samples), rate, 16_000).numpy()
        features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features[0]
        labels = tokenizer(row["text"]).input_ids[1:]  # without the start token, which the model adds itself
        utterances.append(Utterance(features, labels, row["text"]))
    return utterances


def rate_at(step: int, total: int, peak: float) -> float:
    """Return the learning rate: linear warm-up over 10 % of the run, at most 500 steps, then half a cosine to 1 %."""
    warmup = max(1, min(500, total // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train_model(
    model: "transformers.WhisperForConditionalGeneration", part: list[Utterance], asked: LoopSettings
) -> float:
    """Train the model in place and return the seconds of all steps."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    matrices = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(matrices, lr=asked.rate, weight_decay=0.0, fused=True)
    total, step, started = asked.epochs * math.ceil(len(part) / asked.batch), 0, time.perf_counter()
    for _ in range(asked.epochs):
        order = random.sample(part, len(part))
        for first in range(0, len(order), asked.batch):
            batch = order[first : first + asked.batch]
            longest = max(len(utterance.labels) for utterance in batch)
            # -100 is ignored by the loss; the mean is over the labels, not over the padding.
            labels = torch.tensor([u.labels + [-100] * (longest - len(u.labels)) for u in batch])
            loss = model(input_features=torch.stack([u.features for u in batch]), labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(matrices, 1.0)
            # The rate is set after the backward pass, but before the update that it applies to.
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, total, asked.rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 100 == 0:
                print(f"step {step} of {total}, loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return time.perf_counter() - started


@torch.no_grad()
def score(
    model: "transformers.WhisperForConditionalGeneration",
    tokenizer: "transformers.WhisperTokenizer",
    part: list[Utterance],
    language: str,
) -> tuple[float, float]:
    """Return WER and CER of greedy decoding."""
    import jiwer

    model.eval()
    model.gradient_checkpointing_disable()
    heard = []
    for first in range(0, len(part), 32):
        features = torch.stack([utterance.features for utterance in part[first : first + 32]])
        tokens = model.generate(features, language=language, task="transcribe", return_timestamps=False)
        heard += [text.strip() or " " for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    said = [utterance.text for utterance in part]
    return jiwer.wer(said, heard), jiwer.cer(said, heard)


def run_loop(asked: LoopSettings) -> None:
    """Train, score the test part and print one line of JSON."""
    import transformers

    random.seed(asked.seed)
    torch.manual_seed(asked.seed)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(asked.base)
    tokenizer = transformers.WhisperTokenizer.from_pretrained(asked.base, language=asked.language, task="transcribe")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(asked.base, dtype=torch.float32)
    seconds = train_model(model, read_part(asked.train, extractor, tokenizer), asked)
    wer, cer = score(model, tokenizer, read_part(asked.test, extractor, tokenizer), asked.language)
    print(json.dumps({"wer": wer, "cer": cer, "seconds": seconds}))


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    voices: str
    """Folder of recorded voices saying digits: train.jsonl, test.jsonl."""
    folder: str
    """Folder for the random weights and the runs."""
    epochs: int = 30
    """Epochs of the runs from random weights."""
    width: int = 64
    """Width of the model; it has two blocks and one."""
    seconds: int = 6
    """Input length of the model in seconds. No utterance may be longer, since neither side drops longer ones."""
    rate: float = 1e-3
    """Peak learning rate of the runs from random weights."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the order of the utterances; one pair of runs per seed."""
    json: bool = False
    """Print one line of JSON instead of a table."""


def measure(flags: Flags) -> str:
    """Train the missing runs; return the report."""
    if min(flags.epochs, flags.width, flags.seconds, flags.rate, len(flags.seeds)) <= 0 or flags.width % 2:
        raise UsageError("--epochs, --width, --seconds and --rate must be above 0, --width even, --seeds not empty.")
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("The other loop needs transformers, which is not here. Install it: pip install -e .[test].")

    folder = Path(flags.folder).resolve()
    task = Task(Path(flags.voices).resolve(), folder, flags.epochs, flags.rate, flags.width, flags.seconds)
    found = [run for seed in flags.seeds for run in learn(task, seed)]
    return json.dumps([dataclasses.asdict(run) for run in found]) if flags.json else table_of(found)


if __name__ == "__main__":
    if sys.argv[1:2] == [LOOP]:
        run_loop(LoopSettings(**json.loads(sys.argv[2])))
    else:
        flags = read_flags(Flags, sys.argv[1:])
        sys.exit(run_script(lambda: measure(flags)))
