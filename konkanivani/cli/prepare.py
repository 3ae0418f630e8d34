"""Convert a downloaded corpus to train.jsonl, valid.jsonl and test.jsonl; the audio is not copied.

    konkanivani prepare \\
        --format common_voice --source cv-corpus/kok --output data/mine
"""

import os
import re
import shlex
import unicodedata
from pathlib import Path

from konkanivani.command_line import read_flags
from konkanivani.corpora.prepare import REJECTED, Preparation, PreparationReport, prepare_corpus

Flags = Preparation
# Folder names that are too common to name a run.
COMMON_NAMES = ("corpus", "data", "manifest", "manifests", "out", "output", "prepared", "splits")
MAX_NAME = 30  # characters of up to 4 bytes: name and parent's name must fit in a file name of 255 bytes


def describe(report: PreparationReport, output: Path) -> str:
    """Return a summary of the prepared corpus, ending with the command that trains on it."""
    drawn = f"; {' and '.join(report.drawn)} drawn from its training part, by {report.drawn_by}" if report.drawn else ""
    lines = [f"{report.source} as {report.format}, split by {report.split_by}{drawn}:"]
    for split in report.splits:
        length = f"{split.hours:.2f} h" if split.hours >= 1 else f"{60 * split.hours:.1f} minutes"
        speakers = f"speakers: {split.speakers or 'unknown'}"
        lines.append(f"  {split.name}.jsonl  utterances: {split.utterances}, {length}, {speakers}")
    for count in report.refused:
        lines.append(f"  skipped: {count.rows} ({count.kind})")
    if report.refused:
        lines.append(f"  listed with row and reason in {output / REJECTED}")
    if report.removed_characters:
        lines.append(f"  {report.removed_characters}")
    for leak in report.leaks:
        if leak.count:
            lines.append(f"  in two splits: {leak.count} × the same {leak.what}, such as")
            lines.extend(f"    {example}" for example in leak.examples)
    return "\n".join([*lines, *_next_step(report, output)])


def _next_step(report: PreparationReport, output: Path) -> list[str]:
    names = {split.name for split in report.splits}
    if "train" not in names:
        return [
            (
                "The corpus has no training part. Run again with --split_by speaker or utterance and --force to make "
                "new splits."
            )
        ]
    if "valid" not in names:
        return [
            (
                "There is no validation part. Run again with --valid_share 5% --force to draw one (needs at least "
                "three utterances)."
            )
        ]
    name = _run_name(output)
    flags = " ".join(
        f"--{s.name}_manifest {shlex.quote(os.path.abspath(output / s.name))}.jsonl" for s in report.splits
    )
    if report.audio_root:  # the audio is not copied, so it is outside of the manifests' folder
        flags += f" --audio_roots {shlex.quote(report.audio_root)}"
    return [
        "Train on it:",
        f"./run_training_memory_optimized.sh {flags} --checkpoint_dir {shlex.quote(f'checkpoints/{name}')} "
        f"--run_name {shlex.quote(name)}",
    ]


def _run_name(output: Path) -> str:
    """Return a run name from the output folder; a common folder name is prefixed with its parent's name."""
    *_, parent, name = ("", "", *(_file_name_of(part) for part in Path(os.path.abspath(output)).parts))
    if name.lower() in COMMON_NAMES:
        name = "-".join(filter(None, (parent, name)))
    return name or parent or "mine"


def _file_name_of(part: str) -> str:
    """Return the name with only letters, digits, marks, `.`, `_` and `-`; a vowel sign belongs to its letter."""
    # L letters, M combining marks such as vowel signs, N digits.
    letters = (c if c in "._" or unicodedata.category(c)[0] in "LMN" else "-" for c in part)
    return re.sub("-+", "-", "".join(letters)).strip("-.")[:MAX_NAME].rstrip("-.")


def main(arguments: list[str]) -> str:
    """Prepare the corpus that the command line names; return a summary."""
    task = read_flags(Preparation, arguments, description=__doc__)
    return describe(prepare_corpus(task), task.output)
