"""From manifests to the health report that a person reads, or to one line of JSON."""

import contextlib
import dataclasses
import io
import json
import os
from pathlib import Path

from konkanivani.config import TrainConfig
from konkanivani.data.findings import Diagnosis, find_all, reach_verdict
from konkanivani.data.health import Part, Question, judge_corpus
from konkanivani.data.manifest import Manifest, read_manifest
from konkanivani.errors import DataError, KonkaniVaniError, ResourceError, UsageError
from konkanivani.health_page import PAGE_START, draw_page
from konkanivani.run_speech import texts_of
from konkanivani.text import Tokenizer, normalize_text, train_tokenizer


def diagnose(manifests: tuple[str, ...], config: TrainConfig, audio_utterances: int) -> Diagnosis:
    """All that is to be known of the manifests, the first of which is trained on; what cannot be read is a finding."""
    parts, refusals, tokenizer = [], [], None
    for number, path in enumerate(manifests):
        try:
            manifest = read_manifest(path)
            parts.append(Part(path, number == 0, manifest, len(manifest), manifest.broken))
            if number == 0 and len(manifest):  # where all rows are broken, that is what there is to say
                tokenizer = build_tokenizer(manifest, config)
        except KonkaniVaniError as error:
            refusals.append(str(error))
    health = judge_corpus(parts, Question(config, tokenizer, audio_utterances))
    findings = find_all(health, tuple(refusals), config)
    verdict = reach_verdict(health, findings)
    size = tokenizer.size if tokenizer else 0
    return Diagnosis(health, findings, verdict, size, config.text.vocab_size, config.text.tokenizer_type)


def build_tokenizer(manifest: Manifest, config: TrainConfig) -> Tokenizer:
    """The tokenizer that the trainer would train on the manifest; a DataError or UsageError says why it cannot."""
    texts = {normalize_text(text, config.text.digits) for text in texts_of(manifest)} - {""}
    if not texts:
        raise DataError(f"No transcript of {manifest.path} has any text after normalisation.")
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of a smaller vocabulary, which the report does as well
        return train_tokenizer(texts, config.text.tokenizer_type, config.text.vocab_size)


def check_page_path(path: str) -> None:
    """Raises a ResourceError where no page can be written, a UsageError where something else would be lost to it."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ResourceError(f"--html {path} cannot be written: give a file in a folder that is there and is writable.")
    if os.path.exists(path) and not _is_page(path):
        # "--html train.jsonl valid.jsonl" must not cost anybody a manifest.
        raise UsageError(f"--html {path} names a file that is no page, and it would be lost: give another path.")


def _is_page(path: str) -> bool:
    """Whether the file is a page, such as this report writes."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(PAGE_START)) == PAGE_START.encode()
    except OSError:
        return False


def write_page(path: str, diagnosis: Diagnosis) -> None:
    """Writes the page beside `path` and renames it into place."""
    partial = Path(path + ".partial")
    try:
        partial.write_text(draw_page(diagnosis), encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ResourceError(f"--html {path} cannot be written: {error.strerror or error}. Give another path.") from None


def as_json(diagnosis: Diagnosis) -> str:
    """One line of JSON with everything that the report is made from."""
    return json.dumps(dataclasses.asdict(diagnosis), allow_nan=False)
