"""From manifests to the health report that a person reads, or to one line of JSON."""

import contextlib
import dataclasses
import io
import json

from konkanivani.base.auto_defaults import resolve
from konkanivani.base.config import TrainConfig
from konkanivani.base.errors import KonkaniVaniError
from konkanivani.data.health.findings import Diagnosis, find_all, reach_verdict
from konkanivani.data.health.health import CorpusPart, HealthRequest, measure_corpus
from konkanivani.data.manifest import Manifest, iterate_texts, measure_corpus_size, no_text, read_manifest
from konkanivani.data.text import Tokenizer, normalize_text, train_tokenizer


def diagnose(manifests: tuple[str, ...], config: TrainConfig, audio_utterances: int) -> Diagnosis:
    """All that is to be known of the manifests, the first of which is trained on; what cannot be read is a finding."""
    parts, refusals, tokenizer = [], [], None
    for number, path in enumerate(manifests):
        try:
            manifest = read_manifest(path, config.data.audio_roots)
            parts.append(CorpusPart(path, number == 0, manifest, len(manifest), manifest.broken))
            if number == 0 and len(manifest):  # where all rows are broken, that is what there is to say
                config = resolve(config, measure_corpus_size(manifest))
                tokenizer = build_tokenizer(manifest, config)
        except KonkaniVaniError as error:
            refusals.append(str(error))
    health = measure_corpus(parts, HealthRequest(config, tokenizer, audio_utterances))
    findings = find_all(health, tuple(refusals), config)
    verdict = reach_verdict(health, findings)
    size = tokenizer.size if tokenizer else 0
    return Diagnosis(health, findings, verdict, size, config.text.vocab_size, config.text.tokenizer_type)


def build_tokenizer(manifest: Manifest, config: TrainConfig) -> Tokenizer:
    """The tokenizer that the trainer would train on the manifest; a DataError or UsageError says why it cannot."""
    texts = {normalize_text(text, config.text.digits) for text in iterate_texts(manifest)} - {""}
    if not texts:
        raise no_text(manifest)
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of a smaller vocabulary, which the report does as well
        return train_tokenizer(texts, config.text.tokenizer_type, config.text.vocab_size)


def health_json(diagnosis: Diagnosis) -> str:
    """One line of JSON with everything that the report is made from."""
    return json.dumps(dataclasses.asdict(diagnosis), ensure_ascii=False, allow_nan=False)
