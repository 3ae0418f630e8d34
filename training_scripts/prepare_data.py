#!/usr/bin/env python3
"""Turns a downloaded corpus into train.jsonl, valid.jsonl and test.jsonl; the audio stays where it is.

python3 training_scripts/prepare_data.py --format common_voice --source cv-corpus/kok --output data/mine
"""

import bootstrap

bootstrap.rerun_under_venv()

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from konkanivani.command_line import parse_share, read_flags, run_script
from konkanivani.data.found import SpeechFolder
from konkanivani.data.preparation import (
    REJECTED,
    FormatName,
    Preparation,
    Report,
    SplitBy,
    prepare_corpus,
)
from konkanivani.data.splits import Shares
from konkanivani.errors import UsageError


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
    """The corpus's own splits, whole speakers, or utterances; default: the first of these that there is."""
    valid_share: str = "5%"
    """Part of the hours for valid.jsonl where splits are drawn, as 5% or 0.05."""
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
    lines = [f"{report.source} as {report.format}, split by {report.split_by}:"]
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
    missing = [name for name in ("train", "valid") if name not in names]
    if missing:
        return [f"There is no {' and no '.join(missing)} part: --split_by speaker or utterance draws the parts anew."]
    flags = " ".join(
        f"--{s.name}_manifest {shlex.quote(os.path.abspath(output / s.name))}.jsonl" for s in report.splits
    )
    if report.audio_root:  # the audio stays where it is, outside of the manifests' folder
        flags += f" --audio_roots {shlex.quote(report.audio_root)}"
    return [
        "Train on it:",
        f"./run_training_memory_optimized.sh {flags} --checkpoint_dir checkpoints/mine --run_name mine",
    ]


def prepare(flags: Flags) -> str:
    """Prepares the corpus; returns the summary."""
    task = read_task(flags)
    return describe(prepare_corpus(task), task.output)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: prepare(flags)))
