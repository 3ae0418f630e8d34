"""Selection of the utterances that can be used for training, with the reason for each rejected one."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np

from konkanivani.base.auto_defaults import resolved
from konkanivani.base.config import FeatureConfig, TrainConfig
from konkanivani.base.console import count
from konkanivani.base.errors import DataError
from konkanivani.base.lengths import SAMPLE_RATE, FrameLengths, Framing, ctc_frames_needed, speed_perturbed_samples
from konkanivani.data.manifest import Manifest
from konkanivani.data.rejections import Rejection
from konkanivani.data.selection import Selection
from konkanivani.data.text import Digits
from konkanivani.data.token_counts import TokenCounts, count_tokens
from konkanivani.data.utterance import Utterance
from konkanivani.data.vocabulary import Vocabulary

ROWS_AT_ONCE = 500_000
# Fast speech has about 40 code points per second, of at most three tokens each. Without CTC, no other limit relates
# the length of the text to the audio.
MAX_TOKEN_RATE = 200.0  # tokens per second
SPARE_TOKENS = 100


@dataclass(frozen=True)
class Limits:
    """Limits of a usable utterance; durations are in seconds.

    `fastest_speed` is the largest factor of speed perturbation. `duration_flag` and `tokens_limit` name the origin of
    the limits in messages. With `is_aligned`, CTC must be able to align the tokens to the encoder frames.
    """

    min_duration: float
    max_duration: float
    max_tokens: int
    fastest_speed: float
    duration_flag: str = "--max_duration"
    tokens_limit: str = "--max_tokens"
    framing: FrameLengths = Framing(FeatureConfig())
    is_aligned: bool = True

    def within(self, window_seconds: float, most_tokens: float, slowest_speed: float = 1.0) -> "Limits":
        """Return the limits reduced to a model's longest input (after speed perturbation) and number of tokens."""
        # At speed s, an utterance of d seconds takes d / s seconds of the model's input.
        limits = self
        longest = window_seconds * slowest_speed
        if most_tokens < self.max_tokens:
            limits = dataclasses.replace(limits, max_tokens=int(most_tokens), tokens_limit="the decoder's")
        if longest < self.max_duration:
            speed = f" at speed {slowest_speed:g}" if slowest_speed != 1 else ""
            flag = f"the model's window{speed},"
            limits = dataclasses.replace(limits, max_duration=longest, duration_flag=flag)
        return limits

    def frames_missing(self, durations: np.ndarray, frames_needed: np.ndarray) -> np.ndarray:
        """Return whether utterances of these durations (N,) have no or too few encoder frames: bool (N,)."""
        needed = np.maximum(frames_needed if self.is_aligned else 0, 1)
        return self.encoder_frames(durations) < needed

    def most_spoken_tokens(self, durations: np.ndarray) -> np.ndarray:
        """Return the most tokens (N,) that utterances of these durations (N,) may have; CTC has a stricter bound."""
        durations = np.asarray(durations)
        if self.is_aligned:
            return np.full(durations.shape, np.inf)
        return SPARE_TOKENS + MAX_TOKEN_RATE * durations

    def encoder_frames(self, durations: np.ndarray) -> np.ndarray:
        """Return the number of encoder frames of these durations (N,) in seconds, at the fastest speed."""
        samples = np.rint(np.asarray(durations) * SAMPLE_RATE).astype(np.int64)
        return self.framing.encoded_length(speed_perturbed_samples(samples, self.fastest_speed))


def training_limits(config: TrainConfig, framing: FrameLengths | None = None) -> Limits:
    """Return the limits of training utterances; the settings' automatic values must have been resolved.

    `framing` replaces the settings' framing for a model with its own features.
    """
    data = config.data
    return Limits(
        data.min_duration,
        data.max_duration,
        data.max_tokens,
        max(resolved(config.augment.speed_perturbation)),
        framing=framing or Framing(config.features, config.model.subsampling),
        is_aligned=config.loss.ctc_weight != 0,
    )


def evaluation_limits(config: TrainConfig, framing: FrameLengths | None = None) -> Limits:
    """Return the limits of validation and test utterances, which have their own maximum duration."""
    # Not from the training limits: in an imported checkpoint the speeds may still be "auto".
    return Limits(
        config.data.min_duration,
        config.data.max_validation_duration,
        max_tokens=10**9,
        fastest_speed=1.0,
        duration_flag="--max_validation_duration",
        framing=framing or Framing(config.features, config.model.subsampling),
        is_aligned=config.loss.ctc_weight != 0,
    )


def reason_to_reject(utterance: Utterance, tokens: list[int], limits: Limits) -> str | None:
    """Return why an utterance with normalised text and these tokens cannot be used; None if it can."""
    if not utterance.text:
        return "the transcript is empty after normalisation"
    if utterance.duration < limits.min_duration:
        return f"{utterance.duration:.2f} s is shorter than --min_duration {limits.min_duration:g} s"
    if utterance.duration > limits.max_duration:
        return f"{utterance.duration:.2f} s is longer than {limits.duration_flag} {limits.max_duration:g} s"
    if len(tokens) > limits.max_tokens:
        return f"{len(tokens)} tokens are more than {limits.tokens_limit} {limits.max_tokens}"
    durations = np.array([utterance.duration])
    if len(tokens) > limits.most_spoken_tokens(durations)[0]:
        rate = f"{utterance.duration:.2f} s, {MAX_TOKEN_RATE:g} tokens a second at most"
        return f"{len(tokens)} tokens are more than speech of its length has: {rate}"
    needed = ctc_frames_needed(tokens)
    if not limits.frames_missing(durations, np.array([needed]))[0]:
        return None
    speed = f" at speed {limits.fastest_speed:g}" if limits.fastest_speed != 1 else ""
    if not limits.is_aligned:
        return f"the audio is shorter than one frame{speed}"
    frames = limits.encoder_frames(durations)[0]
    return f"CTC cannot align it: {needed} tokens and repeats need {needed} frames, the audio has {frames}{speed}"


def check_utterances(
    manifest: Manifest, tokenizer: Vocabulary, limits: Limits, digits: Digits
) -> tuple[Selection, list[Rejection]]:
    """Return the usable utterances and the rejected ones with reasons; an empty transcript counts as broken."""
    counts = count_tokens(manifest, tokenizer, digits)
    normalize = partial(tokenizer.normalize, digits=digits)
    usable = _usable(manifest, counts, limits)
    rejections = []
    everything = Selection(manifest, np.arange(len(manifest), dtype=np.int32), counts, normalize, is_whole=True)
    # Only rejected rows are read and tokenized again, for their reasons; the check itself needs the counts alone.
    for place in np.flatnonzero(~usable):
        utterance = everything[int(place)]
        tokens = tokenizer.encode(utterance.text)
        reason = reason_to_reject(utterance, tokens, limits)
        assert reason is not None  # it applies the limits of _usable
        rejections.append(Rejection(manifest.path, utterance.row, utterance.id, reason, not utterance.text))
    return everything if usable.all() else everything.part(np.flatnonzero(usable).astype(np.int32)), rejections


def _usable(manifest: Manifest, counts: TokenCounts, limits: Limits) -> np.ndarray:
    """Return which rows are usable: bool (rows,)."""
    usable = np.empty(len(manifest), bool)
    # In blocks: the intermediate arrays take ten times the memory of the result.
    for first in range(0, len(manifest), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        durations = manifest.durations[rows]
        tokens = counts.tokens[rows]
        fits = (tokens > 0) & (tokens <= limits.max_tokens)
        fits &= (durations >= limits.min_duration) & (durations <= limits.max_duration)
        fits &= tokens <= limits.most_spoken_tokens(durations)
        usable[rows] = fits & ~limits.frames_missing(durations, counts.frames_needed[rows])
    return usable


def check_any_usable(selection: Selection, rejections: list[Rejection]) -> None:
    """Raise a `DataError` if no utterance is usable."""
    if not len(selection):
        raise DataError(
            f"None of the {count(len(rejections), 'utterance')} of {selection.manifest.path} is usable; the "
            f"first: {rejections[0].reason}. Fix the manifest, or change the limits (--min_duration, "
            "--max_duration, --max_tokens; --max_validation_duration for validation and test sets)."
        )
