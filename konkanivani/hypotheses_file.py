"""The file of hypotheses: one JSON line an utterance with both its texts, as they were scored, and its errors."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from konkanivani.base.errors import ResourceError
from konkanivani.base.files import write_json_lines
from konkanivani.metrics import UtteranceEdits
from konkanivani.transcripts import ScoredText

COUNTS = ("word_errors", "words", "character_errors", "characters")


def check_output(path: Path) -> None:
    """Raises a ResourceError where the hypotheses could not be written, before the work and not after it."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ResourceError(f"The hypotheses cannot be written to {path}. Give another --output in a folder of yours.")


def write_hypotheses(path: Path, texts: Sequence[ScoredText], edits: UtteranceEdits) -> None:
    """Writes the utterances in their order beside `path` and renames it into place."""
    try:
        write_json_lines(path, _rows(texts, edits))
    except OSError as error:
        raise ResourceError(
            f"The hypotheses could not be written to {path}: {error.strerror or error}. Give another --output."
        ) from None


def _rows(texts: Sequence[ScoredText], edits: UtteranceEdits) -> Iterator[dict[str, object]]:
    for text, counts in zip(texts, edits.sums.tolist(), strict=True):
        known = {"duration": text.seconds, "speaker": text.speaker, "pattern": text.pattern}
        row = {"audio_filepath": text.id} | {name: value for name, value in known.items() if value not in (None, "")}
        row |= {"reference": text.reference, "hypothesis": text.hypothesis}
        yield row | dict(zip(COUNTS, counts, strict=True))
