"""Check a corpus before training and report problems; the first manifest is the training set.

    konkanivani inspect \\
        corpus/train.jsonl corpus/valid.jsonl corpus/test.jsonl \\
        --html report.html

Also accepts the trainer's flags (konkanivani train --help lists them), which decide the utterances that training
skips.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from konkanivani.command_line import read_flags
from konkanivani.config import TrainConfig
from konkanivani.console import say
from konkanivani.errors import DataError, UsageError
from konkanivani.files import check_own_file
from konkanivani.rules import check_config
from konkanivani.scoring.html import PAGE_START, write_page


@dataclass(frozen=True)
class OwnFlags:
    """Input and output."""

    manifests: Annotated[tuple[str, ...], Positional, arg(metavar="[MANIFEST ...]")] = ()
    """JSONL manifests: training, then validation and test (none: those of the trainer's flags)."""
    html: str | None = None
    """Also write the report to this HTML file."""
    json: bool = False
    """Print one line of JSON instead of text."""
    audio_utterances: int = 500
    """Number of recordings to decode per manifest, evenly spaced (0: none)."""


@dataclass(frozen=True)
class Flags(OwnFlags):
    """Own flags and the trainer's."""

    train: TrainConfig = field(default_factory=TrainConfig)


def inspect(flags: Flags) -> str:
    """Return the report as text; if the corpus cannot be trained on, print it and exit with the code of DataError."""
    check_config(flags.train)
    manifests = chosen_manifests(flags)
    if flags.audio_utterances < 0:
        raise UsageError(f"--audio_utterances {flags.audio_utterances} must be at least 0.")
    from konkanivani.corpora.findings import diagnose
    from konkanivani.corpora.health_report import draw_page, health_json, health_lines

    if flags.html is not None:
        # Before the work, so that its result can be written.
        check_own_file(Path(flags.html), "--html", "page", PAGE_START)
    diagnosis = diagnose(manifests, flags.train, flags.audio_utterances)
    if flags.html is not None:
        write_page(flags.html, draw_page(diagnosis))
    text = health_json(diagnosis) if flags.json else health_lines(diagnosis)
    if not diagnosis.verdict.can_be_trained:
        say(text)
        # The report itself is the error message.
        sys.exit(DataError.exit_code)
    return text


def chosen_manifests(flags: Flags) -> tuple[str, ...]:
    """Return the manifests from the positional arguments or the trainer's flags; raise UsageError for both or none."""
    data = flags.train.data
    paths = tuple(path for path in (data.train_manifest, data.valid_manifest, data.test_manifest) if path is not None)
    if bool(paths) == bool(flags.manifests) or (paths and data.train_manifest is None):
        raise UsageError(
            "Give manifests, the training manifest first, or --train_manifest with the trainer's other flags."
        )
    return flags.manifests or paths


def main(arguments: list[str]) -> str:
    """Inspect the corpus that the command line names; return the report."""
    return inspect(read_flags(Flags, arguments, Flags(), shown=OwnFlags, description=__doc__))
