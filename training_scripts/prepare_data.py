#!/usr/bin/env python3
"""Turns a downloaded corpus into train.jsonl, valid.jsonl and test.jsonl; the audio stays where it is.

python3 training_scripts/prepare_data.py --format common_voice --source cv-corpus/kok --output data/mine
"""

import bootstrap

bootstrap.rerun_under_venv()

import os
import re
import shlex
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError
from konkanivani.base.units import parse_share
from konkanivani.data.formats.found import SpeechFolder
from konkanivani.data.formats.splits import Shares
from konkanivani.data.preparation.drawing import SplitBy
from konkanivani.data.preparation.prepare import REJECTED, FormatName, Preparation, Report, prepare_corpus

COMMON_NAMES = ("corpus", "data", "manifest", "manifests", "out", "output", "prepared", "splits")  # of many a folder
LONGEST_NAME = 30  # characters of up to four bytes: with its parent's it must be a folder's name, 255 bytes


@dataclass(frozen=True)
class Flags:
    """What to read, where to write, and how to split. docs/data.md says what each format looks like."""

    format: FormatName
    """How the corpus is laid out."""
    source: str
    """Folder of the corpus."""
    output: str
    """Folder for the manifests, rejected.jsonl and report.json; it is made."""
    table: str = ""
    """The table to read (csv), or to read instead of the usual ones: a file in --source."""
    audio_column: str = ""
    """csv, huggingface: the column with the audio ("audio")."""
    text_column: str = ""
    """csv, huggingface: the column with the transcript; indicvoices: normalized or verbatim."""
    speaker_column: str = ""
    """csv, huggingface: the column with the speaker."""
    split_column: str = ""
    """csv: the column that says train, valid or test."""
    audio_root: str = ""
    """The folder outside which no audio is read; --source unless given."""
    split_by: SplitBy = "default"
    """The corpus's own splits (valid drawn if it lacks), whole speakers, or utterances; default: the first it has."""
    valid_share: str = "5%"
    """Part of the hours for valid.jsonl where it is drawn, as 5% or 0.05."""
    test_share: str = "5%"
    """Part of the hours for test.jsonl."""
    seed: int = 0
    """Another seed draws other splits; the order of rows never matters."""
    max_rejected: str = "1%"
    """Where more of the rows than this cannot be used, nothing is prepared."""
    force: bool = False
    """Replace the manifests that --output holds."""


def read_task(flags: Flags) -> Preparation:
    """The preparation that the flags ask for; a UsageError where they contradict each other."""
    shares = Shares(parse_share(flags.valid_share, "--valid_share"), parse_share(flags.test_share, "--test_share"))
    if shares.valid + shares.test >= 1:
        raise UsageError("--valid_share and --test_share leave nothing to train on. Give smaller ones.")
    source, output = Path(flags.source), Path(flags.output)
    folder = SpeechFolder(
        path=source,
        table=flags.table,
        audio_column=flags.audio_column,
        text_column=flags.text_column,
        speaker_column=flags.speaker_column,
        split_column=flags.split_column,
    )
    return Preparation(
        format=flags.format,
        source=folder,
        output=output,
        audio_root=Path(flags.audio_root or source),
        split_by=flags.split_by,
        shares=shares,
        seed=flags.seed,
        max_rejected=parse_share(flags.max_rejected, "--max_rejected"),
        force=flags.force,
    )


def describe(report: Report, output: Path) -> str:
    """What was prepared, for a person, ending with the command that trains on it."""
    drawn = f"; {' and '.join(report.drawn)} drawn from its train, by {report.drawn_by}" if report.drawn else ""
    lines = [f"{report.source} as {report.format}, split by {report.split_by}{drawn}:"]
    for split in report.splits:
        length = f"{split.hours:.2f} h" if split.hours >= 1 else f"{60 * split.hours:.1f} minutes"
        speakers = f"speakers: {split.speakers or 'not known'}"
        lines.append(f"  {split.name}.jsonl  utterances: {split.utterances}, {length}, {speakers}")
    for count in report.refused:
        lines.append(f"  left out: {count.rows} ({count.kind})")
    if report.refused:
        lines.append(f"  each with its row and reason in {output / REJECTED}")
    for leak in report.leaks:
        if leak.count:
            lines.append(f"  in two splits: {leak.count} × the same {leak.what}, such as")
            lines.extend(f"    {example}" for example in leak.examples)
    return "\n".join([*lines, *_next_step(report, output)])


def _next_step(report: Report, output: Path) -> list[str]:
    names = {split.name for split in report.splits}
    if "train" not in names:
        return ["There is no train part: --split_by speaker or utterance draws all parts anew, with --force."]
    if "valid" not in names:
        return [
            "There is no valid part. --valid_share 5% --force draws one from a train part of three utterances or more."
        ]
    name = _run_name(output)
    flags = " ".join(
        f"--{s.name}_manifest {shlex.quote(os.path.abspath(output / s.name))}.jsonl" for s in report.splits
    )
    if report.audio_root:  # the audio stays where it is, outside of the manifests' folder
        flags += f" --audio_roots {shlex.quote(report.audio_root)}"
    return [
        "Train on it:",
        f"./run_training_memory_optimized.sh {flags} --checkpoint_dir {shlex.quote(f'checkpoints/{name}')} "
        f"--run_name {shlex.quote(name)}",
    ]


def _run_name(output: Path) -> str:
    """What a run on the manifests in a folder is called: as the folder, with its parent where many are called so."""
    *_, parent, name = ("", "", *(_plain(part) for part in Path(os.path.abspath(output)).parts))
    if name.lower() in COMMON_NAMES:
        name = "-".join(filter(None, (parent, name)))
    return name or parent or "mine"


def _plain(part: str) -> str:
    """A name of letters, digits, `.`, `_` and `-` alone; a vowel sign belongs to its letter."""
    letters = (c if c in "._" or unicodedata.category(c)[0] in "LMN" else "-" for c in part)
    return re.sub("-+", "-", "".join(letters)).strip("-.")[:LONGEST_NAME].rstrip("-.")


def prepare(flags: Flags) -> str:
    """Prepares the corpus; returns the summary."""
    task = read_task(flags)
    return describe(prepare_corpus(task), task.output)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: prepare(flags)))
