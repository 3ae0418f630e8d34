"""Which utterances can be trained on, and why the others cannot."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from konkanivani.config import DataConfig
from konkanivani.data.manifest import Utterance
from konkanivani.errors import DataError
from konkanivani.json_lines import write_json_lines
from konkanivani.lengths import (
    SAMPLE_RATE,
    ctc_frames_needed,
    feature_length,
    speed_perturbed_samples,
    subsampled_length,
)
from konkanivani.text import Tokenizer


@dataclass(frozen=True)
class Rejection:
    """An utterance left out of training, with its manifest, its row (from 1) and the reason."""

    manifest: str
    row: int
    audio_filepath: str
    reason: str


@dataclass(frozen=True)
class Limits:
    """What an utterance must keep to; durations in seconds, `fastest_speed` as played in training."""

    min_duration: float
    max_duration: float
    max_tokens: int
    fastest_speed: float


def training_limits(config: DataConfig, speeds: tuple[float, ...]) -> Limits:
    """The limits of training utterances."""
    return Limits(config.min_duration, config.max_duration, config.max_tokens, max(speeds))


def evaluation_limits(config: DataConfig) -> Limits:
    """The limits of validation and test utterances, which have a length cap of their own."""
    return Limits(config.min_duration, config.max_validation_duration, 10**9, 1.0)


def encoder_frames(duration: float, speed: float) -> int:
    """Encoder frames of `duration` seconds of audio played at `speed`."""
    return subsampled_length(feature_length(speed_perturbed_samples(round(duration * SAMPLE_RATE), speed)))


def reason_to_reject(utterance: Utterance, tokens: list[int], limits: Limits) -> str | None:
    """Why this utterance, of normalised text and these tokens, cannot be used; None where it can."""
    if not utterance.text:
        return "the transcript is empty after normalisation"
    if utterance.duration < limits.min_duration:
        return f"{utterance.duration:.2f} s is shorter than --min_duration {limits.min_duration:g}"
    if utterance.duration > limits.max_duration:
        return f"{utterance.duration:.2f} s is longer than {limits.max_duration:g} s"
    if len(tokens) > limits.max_tokens:
        return f"{len(tokens)} tokens are more than --max_tokens {limits.max_tokens}"
    frames, needed = encoder_frames(utterance.duration, limits.fastest_speed), ctc_frames_needed(tokens)
    if frames < max(needed, 1):
        speed = f" at speed {limits.fastest_speed:g}" if limits.fastest_speed != 1 else ""
        return f"CTC cannot align it: {needed} tokens and repeats need as many frames, the audio gives {frames}{speed}"
    return None


def check_utterances(
    utterances: tuple[Utterance, ...], manifest: str, tokenizer: Tokenizer, limits: Limits
) -> tuple[list[Utterance], list[Rejection]]:
    """The utterances that can be used, texts already normalised, and the others with their reasons."""
    missing = [u for u in utterances if not os.path.isfile(u.audio_path)]
    if missing:
        raise DataError(
            f"{manifest} names {len(missing)} audio files that do not exist, the first {missing[0].audio_path}. "
            "Paths are relative to the manifest's folder; mend them or take the rows out."
        )
    kept, rejected = [], []
    for utterance in utterances:
        reason = reason_to_reject(utterance, tokenizer.encode(utterance.text), limits)
        if reason is None:
            kept.append(utterance)
        else:
            rejected.append(Rejection(manifest, utterance.row, utterance.id, reason))
    if not kept:
        raise DataError(
            f"None of the {len(utterances)} utterances of {manifest} can be used; the first: {rejected[0].reason}."
        )
    return kept, rejected


def write_rejections(path: Path, rejections: list[Rejection]) -> None:
    """Writes one JSON line a rejection."""
    write_json_lines(path, map(asdict, rejections))
