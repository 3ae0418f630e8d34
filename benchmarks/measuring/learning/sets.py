"""Data sets for the learning curves: recorded voices with several splits, and synthesised sentences.

A data set is a folder with train.jsonl, valid.jsonl and test.jsonl, which have no speaker in common.
"""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path

from konkanivani.base.errors import DataError, UsageError

PARTS = ("train", "valid", "test")
SCRIPTS = Path(__file__).resolve().parents[3] / "training_scripts"
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
