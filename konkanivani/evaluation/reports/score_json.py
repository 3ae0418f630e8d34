"""Score report as one line of JSON."""

import json
from dataclasses import asdict, astuple
from pathlib import Path

from konkanivani.evaluation.hypotheses import TextPairs
from konkanivani.evaluation.metrics import ErrorRates
from konkanivani.evaluation.score import Comparison, ScoreReport, Slice


def score_json(pairs: TextPairs, report: ScoreReport, output: Path | None) -> str:
    """Return the origin and the numbers of the report as one line of JSON.

    Numbers are rounded to six decimal places; those that are not finite become null.
    """
    fields = asdict(pairs.source) | {"normalize": pairs.normalizer} | score_fields(report)
    fields |= {"hypotheses": str(output)} if output else {}
    # Round on parsing, which reaches nested values, too; parse_constant receives NaN and Infinity.
    exact = json.dumps(fields)
    rounded = json.loads(exact, parse_float=lambda number: round(float(number), 6), parse_constant=lambda _: None)
    return json.dumps(rounded, ensure_ascii=False, allow_nan=False)


def score_fields(report: ScoreReport) -> dict[str, object]:
    """Return the numbers of the report; rates are fractions."""
    edits = report.rates
    fields: dict[str, object] = {"wer": edits.wer, "cer": edits.cer, "utterances": report.utterances}
    fields |= count_fields(edits) | _kind_fields(edits)
    fields |= {"wer_interval": astuple(report.wer_interval), "cer_interval": astuple(report.cer_interval)}
    fields |= {"interval_unit": report.unit}
    for part in report.patterns:
        fields |= {f"wer_{part.name}_patterns": part.rates.wer, f"cer_{part.name}_patterns": part.rates.cer}
        fields |= {f"words_{part.name}_patterns": part.rates.words.length}
    fields |= {"speakers": [_slice_fields("speaker", part) for part in report.speakers]}
    fields |= {"durations": [_slice_fields("duration", part) for part in report.durations]}
    if report.comparison:
        fields |= {"comparison": _comparison_fields(report.comparison)}
    return fields


def count_fields(rates: ErrorRates) -> dict[str, int]:
    """Return the errors and lengths from which the two rates are computed."""
    words = rates.words
    characters = rates.characters
    counts = {"word_errors": words.errors, "words": words.length}
    return counts | {"character_errors": characters.errors, "characters": characters.length}


def _kind_fields(rates: ErrorRates) -> dict[str, int]:
    kinds = ("substitutions", "deletions", "insertions")
    sides = (("word", rates.words), ("character", rates.characters))
    return {f"{name}_{kind}": getattr(edits, kind) for name, edits in sides for kind in kinds}


def _slice_fields(name: str, part: Slice) -> dict[str, object]:
    fields = {name: part.name, "wer": part.rates.wer, "wer_interval": astuple(part.interval), "cer": part.rates.cer}
    fields |= {"utterances": part.utterances, "seconds": part.seconds}
    return fields | count_fields(part.rates) | _kind_fields(part.rates)


def _comparison_fields(compared: Comparison) -> dict[str, object]:
    return {
        "other": compared.name,
        "utterances": compared.utterances,
        "wer": compared.rates.wer,
        "other_wer": compared.other.wer,
        "difference": compared.difference,
        "difference_interval": astuple(compared.interval),
        "share_fewer_errors": compared.fewer,
        "share_more_errors": compared.more,
    }
