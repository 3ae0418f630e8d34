#!/usr/bin/env python3
"""Says how healthy a corpus is before it is trained on; the first manifest is the one to train on.

    python3 training_scripts/inspect_data.py corpus/train.jsonl corpus/valid.jsonl corpus/test.jsonl --html report.html

takes the trainer's flags too (train_konkanivani_asr.py --help lists them), which say what it would leave out.
"""

import bootstrap

bootstrap.rerun_under_venv()

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.config import TrainConfig
from konkanivani.base.console import say
from konkanivani.base.errors import DataError, UsageError
from konkanivani.base.files import check_own_file
from konkanivani.base.rules import check_config
from konkanivani.evaluation.reports.html import PAGE_START, write_page


@dataclass(frozen=True)
class OwnFlags:
    """The manifests, and what to write."""

    manifests: Annotated[tuple[str, ...], Positional, arg(metavar="[MANIFEST …]")] = ()
    """JSONL manifests: to train on, then to validate and test on (none: those of the trainer's flags)."""
    html: str | None = None
    """Write the report as a page too, to this file."""
    json: bool = False
    """Print one line of JSON instead of the text."""
    audio_utterances: int = 500
    """Recordings to decode from each manifest, evenly spaced (0: none)."""


@dataclass(frozen=True)
class Flags(OwnFlags):
    """These, and the trainer's flags, which say what it would leave out."""

    train: TrainConfig = field(default_factory=TrainConfig)


def inspect(flags: Flags) -> str:
    """The report, as it is to be printed; where the corpus cannot be trained on, it is printed and the process ends."""
    check_config(flags.train)
    manifests = chosen_manifests(flags)
    if flags.audio_utterances < 0:
        raise UsageError(f"--audio_utterances {flags.audio_utterances} must be at least 0.")
    from konkanivani.evaluation.reports.health_page import draw_page
    from konkanivani.evaluation.reports.health_report import diagnose, health_json
    from konkanivani.evaluation.reports.health_text import health_lines

    if flags.html is not None:
        check_own_file(Path(flags.html), "--html", "page", PAGE_START)
    diagnosis = diagnose(manifests, flags.train, flags.audio_utterances)
    if flags.html is not None:
        write_page(flags.html, draw_page(diagnosis))
    text = health_json(diagnosis) if flags.json else health_lines(diagnosis)
    if not diagnosis.verdict.can_be_trained:
        say(text)
        sys.exit(DataError.exit_code)
    return text


def chosen_manifests(flags: Flags) -> tuple[str, ...]:
    """The manifests named alone, or by the trainer's flags; a UsageError where both or none are."""
    data = flags.train.data
    named = tuple(path for path in (data.train_manifest, data.valid_manifest, data.test_manifest) if path is not None)
    if bool(named) == bool(flags.manifests) or (named and data.train_manifest is None):
        raise UsageError(
            "Give manifests, the one to train on first, or --train_manifest with the trainer's other flags."
        )
    return flags.manifests or named


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags(), shown=OwnFlags)
    sys.exit(run_script(lambda: inspect(flags)))
