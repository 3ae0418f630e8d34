"""Health check of manifests, from loading them to the diagnosis and its JSON."""

import contextlib
import dataclasses
import io
import json

from konkanivani.base.auto_defaults import resolve, resolved
from konkanivani.base.config import TrainConfig
from konkanivani.base.errors import KonkaniVaniError
from konkanivani.data.health.findings import Diagnosis, find_all, reach_verdict
from konkanivani.data.health.health import CorpusPart, HealthRequest, measure_corpus
from konkanivani.data.manifest import Manifest, iterate_texts, measure_corpus_size, no_text, read_manifest
from konkanivani.data.text import Tokenizer, normalize_text, train_tokenizer


def diagnose(manifests: tuple[str, ...], config: TrainConfig, audio_utterances: int) -> Diagnosis:
    """Return the diagnosis of the manifests; the first is the training set, and unreadable ones are findings."""
    parts = []
    refusals = []
    tokenizer = None
    for number, path in enumerate(manifests):
        try:
            manifest = read_manifest(path, config.data.audio_roots)
            parts.append(CorpusPart(path, number == 0, manifest, len(manifest), manifest.broken))
            if number == 0 and len(manifest):  # if all rows are broken, that is the only finding
                config = resolve(config, measure_corpus_size(manifest))
                tokenizer = build_tokenizer(manifest, config)
        except KonkaniVaniError as error:
            refusals.append(str(error))
    # Without a usable training manifest, the automatic settings get the defaults for much speech.
    health = measure_corpus(parts, HealthRequest(resolve(config), tokenizer, audio_utterances))
    findings = find_all(health, tuple(refusals), config)
    verdict = reach_verdict(health, findings)
    size = tokenizer.size if tokenizer else 0
    return Diagnosis(health, findings, verdict, size, config.text.vocab_size, config.text.tokenizer_type)


def build_tokenizer(manifest: Manifest, config: TrainConfig) -> Tokenizer:
    """Return the tokenizer that the trainer would train on the manifest.

    Raises:
        DataError, UsageError: If no tokenizer can be trained.
    """
    texts = {normalize_text(text, config.text.digits) for text in iterate_texts(manifest)} - {""}
    if not texts:
        raise no_text(manifest)
    with contextlib.redirect_stdout(io.StringIO()):  # its message on a smaller vocabulary is in the report, too
        return train_tokenizer(texts, resolved(config.text.tokenizer_type), config.text.vocab_size)


def health_json(diagnosis: Diagnosis) -> str:
    """Return one line of JSON with all data of the report."""
    # allow_nan=False: NaN is not valid JSON, so raise an error instead of writing it.
    return json.dumps(dataclasses.asdict(diagnosis), ensure_ascii=False, allow_nan=False)
