#!/usr/bin/env python3
"""Draw the README's pictures as SVG: the data flow, a step compared with other toolkits and, with a model, subtitles.

    python3 benchmarks/drawings.py
    python3 benchmarks/drawings.py --checkpoint checkpoints/checkpoint_best.pt --manifest data/builtin/test.jsonl

The bars show the last table of contestants in docs/performance.md. The subtitles are transcribe.py's for some
utterances of one voice, joined with pauses; recognition errors are underlined. Devanagari text is drawn as outlines
(measuring/drawing/outlines.py).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

from dataclasses import dataclass

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import DataError

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    output: str = "docs"
    """Folder for the SVG files."""
    checkpoint: str | None = None
    """Also draw subtitles with this checkpoint_*.pt file."""
    manifest: str = "data/builtin/test.jsonl"
    """Manifest with the utterances for the subtitles."""
    speaker: str = "mr+linda"
    """Speaker of these utterances."""
    sentences: int = 4
    """Number of utterances."""


def draw(flags: Flags) -> str:
    """Write the pictures and return a sentence about them."""
    from benchmarks.measuring.drawing.bars import steps_beside_others
    from benchmarks.measuring.drawing.data_flow import way_of_the_data
    from benchmarks.measuring.drawing.subtitles import joined_utterances, player

    folder = Path(flags.output)
    folder.mkdir(parents=True, exist_ok=True)
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    pictures = {"flow.svg": way_of_the_data(), "step_comparison.svg": steps_beside_others(performance)}
    if flags.checkpoint:
        said = joined_utterances(Path(flags.manifest), flags.speaker, flags.sentences)
        if not said.texts:
            raise DataError(f"{flags.manifest} has no utterance of {flags.speaker}. Give --speaker.")
        pictures["subtitles.svg"] = player(said, Path(flags.checkpoint))
    for name, picture in pictures.items():
        (folder / name).write_text(picture, encoding="utf-8")
    return f"Drawn into {folder}: {', '.join(pictures)}."


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: draw(flags)))
