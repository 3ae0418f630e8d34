"""Test scores for a model card, as printed by konkanivani evaluate --json. Does not import torch."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from konkanivani.config import DecodingConfig
from konkanivani.errors import DataError, explained
from konkanivani.scoring.score import decoding_words

MAX_BYTES = 2**24  # the longest part are the rates by speaker, about 500 bytes each
ROUNDING = 1e-5  # rates in the file have six decimal places


@dataclass(frozen=True)
class Rate:
    """Error rate as a fraction, with the bounds of its 95 % interval; NaN if undefined."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return "undefined"
        interval = f" ({100 * self.low:.1f} to {100 * self.high:.1f})" if math.isfinite(self.low) else ""
        return f"{100 * self.value:.1f}{interval}"


@dataclass(frozen=True)
class CardScore:
    """Error rates of a checkpoint on one manifest; `left_out` rows were skipped, `unit` is the resampled unit."""

    manifest: str
    decoding: str
    normalize: str
    utterances: int
    left_out: int
    unit: str
    wer: Rate
    cer: Rate


class _Invalid(Exception):
    """Content that the evaluation does not write."""


def read_scores(path: Path, checkpoint: str, step: int) -> tuple[CardScore, ...]:
    """Return the scores in a file, one line of JSON each.

    Args:
        checkpoint: path of the exported checkpoint.
        step: its step.

    Raises a DataError if the file cannot be read, or has scores of another checkpoint.
    """
    advice = "Give a file with the output of konkanivani evaluate --checkpoint ... --manifest ... --json."
    with explained(DataError, f"--scores {path} cannot be read", advice):
        if not path.is_file() and path.exists() and not path.is_dir():
            raise OSError("it is not a file")  # reading a pipe would block
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DataError(f"--scores {path} has more than {MAX_BYTES} bytes. {advice}")
    scores = []
    lines = [line for line in data.split(b"\n") if line.strip()]
    for line in lines:
        try:
            record = _parse(line)
            _check_checkpoint(record, checkpoint, step)
            scores.append(_score(record))
        except _Invalid as error:
            raise DataError(f"--scores {path} cannot be used: {error}. {advice}") from None
    if not scores:
        raise DataError(f"--scores {path} is empty. {advice}")
    return tuple(scores)


def _parse(line: bytes) -> Mapping[str, object]:
    try:
        record = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _Invalid("a line is not JSON") from None
    if not isinstance(record, dict):
        raise _Invalid("a line is not a JSON object")
    return record


def _refuse_constant(name: str) -> float:
    raise _Invalid(f"it contains {name}")


def _check_checkpoint(record: Mapping[str, object], checkpoint: str, step: int) -> None:
    """Raise _Invalid if the score is not of this checkpoint: the card would state a rate of another model."""
    scored = record.get("checkpoint")
    if not isinstance(scored, str):
        raise _Invalid("it names no checkpoint, so it may be the score of another model")
    if os.path.basename(scored) != os.path.basename(checkpoint) or record.get("step") != step:
        raise _Invalid(
            f"it is the score of {scored[:200]} (step {record.get('step')!s:.20}), not of the exported {checkpoint} "
            f"(step {step})"
        )


def _score(record: Mapping[str, object]) -> CardScore:
    manifest = _text(record, "manifest")
    return CardScore(
        manifest=os.path.basename(manifest) or manifest,
        decoding=_decoding(record),
        normalize=_text(record, "normalize"),
        utterances=_number(record, "utterances"),
        left_out=_number(record, "left_out"),
        unit=_text(record, "interval_unit"),
        wer=_rate(record, "wer", _number(record, "word_errors"), _number(record, "words")),
        cer=_rate(record, "cer", _number(record, "character_errors"), _number(record, "characters")),
    )


def _text(record: Mapping[str, object], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise _Invalid(f"its {name} is missing or not a text")
    return value


def _number(record: Mapping[str, object], name: str) -> int:
    value = record.get(name)
    # type(): a bool is an int.
    if type(value) is not int or value < 0:
        raise _Invalid(f"its {name} is missing or not a number")
    return value


def _rate(record: Mapping[str, object], name: str, errors: int, length: int) -> Rate:
    """Return the rate from its counts, after checking that the stated rate is the same."""
    value = errors / length if length else math.nan
    stated = record.get(name)
    number = math.nan if stated is None else stated
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise _Invalid(f"its {name} is not a number")
    if math.isnan(number) != math.isnan(value) or abs(number - value) > ROUNDING:
        raise _Invalid(f"its {name} differs from its number of errors divided by the length")
    interval = record.get(f"{name}_interval")
    if not isinstance(interval, list) or len(interval) != 2:
        raise _Invalid(f"its {name}_interval is missing or not two numbers")
    if interval == [None, None]:  # undefined, for example with a single utterance
        return Rate(value, math.nan, math.nan)
    low, high = interval
    if not all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in interval) or not low <= high:
        raise _Invalid(f"its {name}_interval is not two numbers in ascending order")
    return Rate(value, float(low), float(high))


def _decoding(record: Mapping[str, object]) -> str:
    """Return the decoding method in words."""
    settings = record.get("decoding")
    if not isinstance(settings, dict):
        raise _Invalid("its decoding is missing")
    try:
        config = DecodingConfig(**settings)
        words = decoding_words(config)
    except (TypeError, ValueError):
        raise _Invalid("its decoding has unknown settings") from None
    # The language model is a local path.
    return (
        words
        if config.language_model is None
        else words.replace(config.language_model, os.path.basename(config.language_model))
    )
