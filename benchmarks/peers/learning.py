#!/usr/bin/env python3
"""Compare the learning curves of this trainer and of a plain SpeechBrain Conformer on several data sets.

    python3 benchmarks/peers/learning.py --voices ../shared/data/digits_en \\
        --sentences ../shared/data/konkani_text/*.txt --folder /tmp/learning --plot docs/learning.png

Data sets: the recorded voices with their own split; the same with each speaker left out in turn (for the test; another
one for validation); sentences spoken by espeak-ng's Marathi voices; the built-in corpus. `--minutes` shortens their
training speech. This trainer uses the training script's defaults and --preset minimal; the other model has the same
width and depth. A finished run is not repeated, so the command may be interrupted, or repeated with more sets or seeds.
A data set is a folder with train.jsonl, valid.jsonl and test.jsonl, which have no speaker in common.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import os
import random
import shlex
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, product, takewhile
from typing import Literal

import soundfile

from benchmarks.peers.processes import PACKAGES, check_plot, peer_python
from konkanivani.command_line import read_flags, run_script
from konkanivani.errors import DataError, UsageError

PARTS = ("train", "valid", "test")
SCRIPTS = Path(__file__).resolve().parents[2] / "training_scripts"
WITHOUT = "without_"  # prefix of the test speaker; the next speaker in the sorted list is for validation
SHUFFLED_BY = 5  # seed


@dataclass(frozen=True)
class Row:
    """Manifest row; `audio` is the absolute path."""

    audio: str
    duration: float
    text: str
    speaker: str

    def as_json(self) -> str:
        """Return the row as a line of a manifest."""
        fields = {"audio_filepath": self.audio, "duration": self.duration, "text": self.text, "speaker": self.speaker}
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True)
class Sources:
    """Sources of the data sets: a folder of recorded voices with three manifests, and files of sentences."""

    voices: Path
    sentences: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """Return the names of all data sets; those that leave out a speaker are last."""
        return ("voices", "sentences", "builtin", *(WITHOUT + speaker for speaker in speakers_of(self.read_voices())))

    def read_voices(self) -> list[Row]:
        """Return the rows of all recorded voices; raise DataError if a manifest cannot be read."""
        return [row for part in PARTS for row in read_rows(self.voices / f"{part}.jsonl")]

    def make(self, name: str, folder: Path) -> Path:
        """Return the folder of a data set under `folder`; create it unless it exists."""
        made = folder / name
        if not (made / "train.jsonl").is_file():
            made.mkdir(parents=True, exist_ok=True)
            if name in ("builtin", "sentences"):
                self._speak(name, made)
            elif name == "voices":
                for part in PARTS:
                    write_rows(made / f"{part}.jsonl", read_rows(self.voices / f"{part}.jsonl"))
            elif name.startswith(WITHOUT):
                self._leave_out(name.removeprefix(WITHOUT), made)
            else:
                raise UsageError(f"There is no set {name}. Give some of {', '.join(self.names())}.")
        return made

    def _speak(self, name: str, made: Path) -> None:
        more = ("--sentences", *self.sentences) if name == "sentences" else ()
        made.rmdir()  # the script creates its output folder itself
        command = [sys.executable, str(SCRIPTS / "prepare_builtin_corpus.py"), "--output", str(made), *more]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1]
            raise DataError(f"The set {name} cannot be spoken: {said} Run {' '.join(command)} by itself.")

    def _leave_out(self, speaker: str, made: Path) -> None:
        rows = self.read_voices()
        speakers = speakers_of(rows)
        validated = speakers[(speakers.index(speaker) + 1) % len(speakers)]
        random.Random(SHUFFLED_BY).shuffle(rows)
        write_rows(made / "test.jsonl", [row for row in rows if row.speaker == speaker])
        write_rows(made / "valid.jsonl", [row for row in rows if row.speaker == validated])
        write_rows(made / "train.jsonl", [row for row in rows if row.speaker not in (speaker, validated)])


def cut_training(made: Path, minutes: float) -> Path:
    """Return a data set next to `made` with a random sample of `minutes` minutes of its training speech."""
    cut = made.with_name(f"{made.name}_{minutes:g}_minutes")
    # test.jsonl is written last: if it exists, the set is complete.
    if not (cut / "test.jsonl").is_file():
        cut.mkdir(exist_ok=True)
        rows = read_rows(made / "train.jsonl")
        random.Random(SHUFFLED_BY).shuffle(rows)
        ends = accumulate(row.duration for row in rows)
        kept = len(list(takewhile(lambda end: end <= 60 * minutes, ends)))
        write_rows(cut / "train.jsonl", rows[:kept])
        for part in ("valid", "test"):
            write_rows(cut / f"{part}.jsonl", read_rows(made / f"{part}.jsonl"))
    return cut


def speakers_of(rows: Sequence[Row]) -> list[str]:
    """Return the sorted names of the speakers."""
    return sorted({row.speaker for row in rows})


def read_rows(manifest: Path) -> list[Row]:
    """Return the rows of a manifest, with audio paths relative to its folder; raise DataError if it cannot be read."""
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        folder = manifest.parent.resolve()
        return [Row(str(folder / r["audio_filepath"]), r["duration"], r["text"], r["speaker"]) for r in found]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{manifest} cannot be read: {error!r}. Give a folder of manifests with speakers.") from None


def write_rows(manifest: Path, rows: Sequence[Row]) -> None:
    """Write a manifest."""
    manifest.write_text("".join(row.as_json() + "\n" for row in rows), encoding="utf-8")


PEER_SCRIPT = Path(__file__).with_name("speechbrain_training.py")
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
    said = [json.loads(line) for line in _output_of([str(order.python), str(PEER_SCRIPT), json.dumps(asked)], order)]
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


@dataclass(frozen=True)
class Spread:
    """Mean, minimum and maximum over seeds."""

    mean: float
    least: float
    largest: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        """Return the spread of at least one figure."""
        return cls(statistics.mean(figures), min(figures), max(figures))

    def percent(self) -> str:
        """Return the spread in percent as a table cell."""
        return f"{100 * self.mean:.1f} ({100 * self.least:.1f}-{100 * self.largest:.1f})"


def rates_table(runs: Sequence[LearningRun]) -> str:
    """Return the test error rates in percent, mean (min-max) over seeds, and their ratios to the last learner's."""
    learners = list(dict.fromkeys(run.learner for run in runs))
    heads = [f"{learner} {rate}" for learner in learners for rate in ("WER", "CER")]
    relative = [learner for learner in learners if learner != learners[-1]] if len(learners) > 1 else []
    heads += [f"{learner} : {learners[-1]}, WER, CER, joint WER" for learner in relative]
    lines = ["| set, seeds | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name in dict.fromkeys(run.set_name for run in runs):
        of = {learner: [r for r in runs if (r.set_name, r.learner) == (name, learner)] for learner in learners}
        cells = [f"{name}, {max(map(len, of.values()))}"]
        for found in of.values():
            cells += [_cell([run.test.wer for run in found]), _cell([run.test.cer for run in found])]
        cells += [_relative(of[learner], of[learners[-1]]) for learner in relative]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def epochs_table(runs: Sequence[LearningRun], peer: str) -> str:
    """Return the number of epochs until this trainer reaches the reference's final validation CER, mean over seeds."""
    lines = ["| set | " + peer + "'s epochs, last CER | epochs of ours | share |", "|---|---|---|---|"]
    for name in dict.fromkeys(run.set_name for run in runs):
        theirs = [run for run in runs if (run.set_name, run.learner) == (name, peer)]
        ours = [run for run in runs if (run.set_name, run.learner) == (name, OURS)]
        if theirs and ours:
            # All runs of a learner have the same number of epochs.
            aim, epochs = statistics.mean(run.valid[-1].cer for run in theirs), len(theirs[0].valid)
            reached = [epochs_to(run, aim) for run in ours]
            # If one seed does not reach it, a mean over the others would be too low.
            mean = None if None in reached else statistics.mean(reached)
            share = "not reached" if mean is None else f"{mean:.1f} | {mean / epochs:.2f}"
            lines.append(f"| {name} | {epochs}, {100 * aim:.1f} % | {share} |")
    return "\n".join(lines)


def epochs_to(run: LearningRun, cer: float) -> int | None:
    """Return the first epoch with a validation CER of at most `cer`, or None."""
    return next((number for number, rates in enumerate(run.valid, start=1) if rates.cer <= cer), None)


def _cell(figures: Sequence[float]) -> str:
    return Spread.of(figures).percent() if figures else "-"


def _relative(ours: Sequence[LearningRun], theirs: Sequence[LearningRun]) -> str:
    if not ours or not theirs:
        return "-"
    wer, cer = (statistics.mean(getattr(run.test, rate) for run in theirs) for rate in ("wer", "cer"))
    figures = [
        statistics.mean(run.test.wer for run in ours) / wer,
        statistics.mean(run.test.cer for run in ours) / cer,
        *([statistics.mean(run.joint.wer for run in ours) / wer] if all(run.joint for run in ours) else []),
    ]
    return ", ".join(f"{figure:.2f}" for figure in figures)


PEER = "speechbrain"


def draw(runs: list[LearningRun], picture: str) -> None:
    """Draw the validation CER by epoch into a PNG file: a panel per set, a line per seed, a colour per learner."""
    import matplotlib.pyplot as plt

    sets = list(dict.fromkeys(run.set_name for run in runs))
    columns = min(4, len(sets))
    rows = -(-len(sets) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.0 * rows), squeeze=False)
    colours = {learner: f"C{number}" for number, learner in enumerate(dict.fromkeys(run.learner for run in runs))}
    for axes in panels.flat[len(sets) :]:
        axes.set_visible(False)
    for axes, name in zip(panels.flat, sets, strict=False):
        for run in runs:
            if run.set_name == name:
                rates = [100 * epoch.cer for epoch in run.valid]
                axes.plot(range(1, len(rates) + 1), rates, color=colours[run.learner], alpha=0.8, linewidth=1.2)
        axes.set(title=name, xlabel="epochs", ylabel="CER of validation, %", yscale="log", ylim=(1, 110))
        axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].legend(handles=[plt.Line2D([], [], color=c, label=learner) for learner, c in colours.items()])
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    voices: str
    """Folder of recorded voices: train.jsonl, valid.jsonl, test.jsonl with speakers."""
    sentences: tuple[str, ...]
    """Files of sentences for espeak-ng, one per line."""
    folder: str
    """Folder for data sets and runs."""
    sets: tuple[str, ...] = ()
    """voices, sentences, builtin, without_NAME (empty: all)."""
    learners: tuple[Literal["ours", "speechbrain"], ...] = ("ours", PEER)
    """Toolkits to train."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds; one run each."""
    epochs: int = 15
    """Epochs of every run."""
    minutes: tuple[float, ...] = ()
    """Minutes of training speech to draw from each set (empty: all of it)."""
    flags: str = ""
    """Additional flags of the training script; use another --folder for these runs."""
    side_by_side: int = 1
    """Concurrent runs, each with its share of the cores."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the training."""
    environment: str = "~/.cache/konkanivani/peers"
    """Folder for the environment of the other toolkit."""
    plot: str | None = None
    """Draw the curves into this PNG file (needs matplotlib)."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def measure(flags: Flags) -> str:
    """Train the missing runs; return the report."""
    if min(flags.epochs, flags.side_by_side, *flags.minutes, *map(bool, (flags.seeds, flags.learners))) <= 0:
        raise UsageError("--epochs, --side_by_side and --minutes must be above 0, --seeds and --learners not empty.")

    check_plot(flags.plot)
    folder, environment = Path(flags.folder).resolve(), Path(flags.environment).expanduser()
    sources = Sources(Path(flags.voices), tuple(str(Path(file).resolve()) for file in flags.sentences))
    sets = [sources.make(name, folder / "sets") for name in flags.sets or sources.names()]
    if flags.minutes:
        sets = [cut_training(made, minutes) for made, minutes in product(sets, flags.minutes)]
    python = peer_python(environment, PACKAGES) if PEER in flags.learners else Path(sys.executable)
    threads = max(1, (os.cpu_count() or 1) // flags.side_by_side)
    orders = [
        Order(learner, made, seed, flags.epochs, folder / "runs", flags.flags, threads, python, flags.device)
        for seed, made, learner in product(flags.seeds, sets, flags.learners)
    ]
    with ThreadPoolExecutor(flags.side_by_side) as workers:
        runs = list(workers.map(run_of, orders))
    if flags.plot:
        draw(runs, flags.plot)
    if flags.json:
        return json.dumps([asdict(run) for run in runs])
    return "\n\n".join([rates_table(runs), *([epochs_table(runs, PEER)] if len(flags.learners) > 1 else [])])


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
