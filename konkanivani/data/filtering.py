"""Checks and selection of utterances before training: limits and token counts."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from konkanivani.config import FeatureConfig, TrainConfig
from konkanivani.console import count, progress_bar, say, short_name
from konkanivani.data.index import Utterance
from konkanivani.data.manifest import Manifest, Rejection
from konkanivani.data.text import Digits, TextLimits, Vocabulary, reads_text
from konkanivani.errors import DataError
from konkanivani.files import atomic_replace, exclusive_lock
from konkanivani.flags import resolved
from konkanivani.lengths import TOKENS, FrameLengths, Framing, ctc_frames_needed, speed_perturbed_samples
from konkanivani.worker_processes import worker_pool

# --------------------
# Number of tokens and of frames needed by CTC for each row of a manifest, cached per tokenizer.


FEW_ROWS = 20_000  # up to this size, counted without worker processes
BLOCK_ROWS = 100_000
MAX_COUNT = 2**16 - 1
NORMALISATION_VERSION = b"2"  # increment when normalize_text changes, to invalidate stored counts


@dataclass(frozen=True)
class TokenCounts:
    """Counts per row (rows,) uint16, saturated at 65,535: tokens of the normalised transcript, frames needed by CTC.

    If the input is text, `frames_needed` counts its tokens, before texts are cut.
    """

    tokens: np.ndarray
    frames_needed: np.ndarray


def count_tokens(manifest: Manifest, tokenizer: Vocabulary, digits: Digits) -> TokenCounts:
    """Return the counts of all rows, stored in the folder of the manifest's index if it has one."""
    folder = manifest.index.folder
    key = hashlib.sha256(tokenizer.model + digits.encode() + NORMALISATION_VERSION).hexdigest()[:16]
    # With the tokenizer and the normalisation in the name, only a changed manifest can make the file stale; its index
    # folder is then rebuilt without it.
    path = folder and folder / f"tokens-{key}"
    counts: np.ndarray | None
    if path is None:
        counts = _count_in_parallel(manifest, tokenizer, digits)
    elif (counts := _read_counts(path, len(manifest))) is None:
        try:
            # Ranks, or two commands, may need the counts of a new manifest at once.
            with exclusive_lock(Path(manifest.path), is_required=False):
                if (counts := _read_counts(path, len(manifest))) is None:
                    say(f"Tokenizing the transcripts of {manifest.path}, once for this tokenizer.")
                    counts = _count_in_parallel(manifest, tokenizer, digits)
                    with atomic_replace(path) as partial:
                        counts.tofile(partial)
        except OSError as error:
            if counts is None:
                raise
            say(
                f"The token counts cannot be stored in {path} ({error.strerror or error}) and are recomputed at "
                "each start."
            )
    return TokenCounts(counts[0], counts[1])


def _read_counts(path: Path, rows: int) -> np.ndarray | None:
    """Return the stored counts (2, rows); None if there are none, or if their file was cut by a power failure."""
    if not path.exists() or path.stat().st_size != 2 * rows * np.dtype(np.uint16).itemsize:
        return None
    return np.memmap(path, np.uint16, mode="r").reshape(2, rows)


def _count_in_parallel(manifest: Manifest, tokenizer: Vocabulary, digits: Digits) -> np.ndarray:
    if len(manifest) <= FEW_ROWS:
        return _count(manifest, 0, len(manifest), tokenizer, digits)
    firsts = range(0, len(manifest), BLOCK_ROWS)
    ends = [min(first + BLOCK_ROWS, len(manifest)) for first in firsts]
    tasks = [(_count, manifest, first, end, tokenizer, digits) for first, end in zip(firsts, ends, strict=True)]
    with worker_pool(os.cpu_count() or 1) as pool:
        blocks = list(progress_bar(pool.run(tasks), len(ends), f"tokenizing {short_name(str(manifest.path))}", "block"))
    return np.concatenate(blocks, axis=1)


def _count(manifest: Manifest, first: int, end: int, tokenizer: Vocabulary, digits: Digits) -> np.ndarray:
    """Return tokens and frames needed of rows `first` to `end - 1`, (2, end - first) uint16."""
    counts = np.empty((2, end - first), np.uint16)
    for place, utterance in enumerate(manifest.between(first, end)):
        text = tokenizer.normalize(utterance.text, digits)
        tokens = tokenizer.encode(text) if text else []
        if utterance.input_text is not None and reads_text(tokenizer):
            needed = tokenizer.count_input(tokenizer.normalize(utterance.input_text, digits))
        else:
            needed = ctc_frames_needed(tokens)
        counts[:, place] = min(MAX_COUNT, len(tokens)), min(MAX_COUNT, needed)
    return counts


# --------------------
# Subset of a manifest that a run uses, with normalised transcripts.


@dataclass(frozen=True)
class Selection:
    """Lazily read utterances of a manifest at the indices `places` (N,), with normalised text.

    `counts` covers the whole manifest. `is_whole` means all utterances in the manifest's order. `text_limits` is set if
    the inputs are texts, whose durations are their tokens.
    """

    manifest: Manifest
    places: np.ndarray
    counts: TokenCounts
    normalize: Callable[[str], str]
    is_whole: bool = False
    text_limits: TextLimits | None = None

    @property
    def durations(self) -> np.ndarray:
        """Return the durations (N,) in seconds, float64; of texts, the tokens of the inputs."""
        if self.text_limits is not None:
            return input_lengths(self.counts.frames_needed[self.places], self.text_limits)
        # The manifest's durations may be memory-mapped; indexing would copy them.
        return self.manifest.durations if self.is_whole else self.manifest.durations[self.places]

    @property
    def tokens(self) -> np.ndarray:
        """Return the number of tokens of each transcript (N,)."""
        tokens = self.counts.tokens[self.places]
        return tokens if self.text_limits is None else target_lengths(tokens, self.text_limits)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> Utterance:
        utterance = self.manifest[int(self.places[number])]
        normalized = dataclasses.replace(utterance, text=self.normalize(utterance.text))
        if utterance.input_text is None:
            return normalized
        length = float(self.counts.frames_needed[self.places[number]])
        return dataclasses.replace(normalized, input_text=self.normalize(utterance.input_text), duration=length)

    def __iter__(self) -> Iterator[Utterance]:
        return (self[number] for number in range(len(self)))

    def part(self, numbers: np.ndarray) -> "Selection":
        """Return the selection of the utterances with these indices."""
        return dataclasses.replace(self, places=self.places[numbers], is_whole=False)


def input_lengths(tokens: np.ndarray, limits: TextLimits) -> np.ndarray:
    """Return the numbers of tokens (N,) of inputs, float64, after they are cut."""
    return np.minimum(tokens, limits.input_tokens if limits.cuts else MAX_COUNT).astype(np.float64)


def target_lengths(tokens: np.ndarray, limits: TextLimits) -> np.ndarray:
    """Return the numbers of tokens (N,) of targets after they are cut; the end token is not counted."""
    return np.minimum(tokens, limits.target_tokens - 1 if limits.cuts else MAX_COUNT)


def count_cut(selection: Selection) -> int:
    """Return the number of utterances whose input or target text is cut."""
    limits = selection.text_limits
    if limits is None or not limits.cuts:
        return 0
    counts = selection.counts
    is_cut = counts.frames_needed[selection.places] > limits.input_tokens
    return int((is_cut | (counts.tokens[selection.places] >= limits.target_tokens)).sum())


# --------------------
# Selection of the utterances that can be used for training, with the reason for each rejected one.


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
        if self.is_aligned or self.framing.unit == TOKENS:
            return np.full(durations.shape, np.inf)
        return SPARE_TOKENS + MAX_TOKEN_RATE * durations

    def encoder_frames(self, durations: np.ndarray) -> np.ndarray:
        """Return the number of encoder frames of these durations (N,) in seconds, at the fastest speed."""
        samples = np.rint(np.asarray(durations) * self.framing.unit.rate).astype(np.int64)
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


def limits_of_text(limits: TextLimits, framing: FrameLengths) -> Limits:
    """Return the limits of texts, which a run that cuts longer texts never exceeds."""
    most = (MAX_COUNT, MAX_COUNT) if limits.cuts else (limits.input_tokens, limits.target_tokens - 1)
    return Limits(1, *most, 1.0, "--max_input_tokens", "--max_target_tokens", framing, is_aligned=False)


def reason_to_reject(utterance: Utterance, tokens: list[int], limits: Limits) -> str | None:
    """Return why an utterance with normalised text and these tokens cannot be used; None if it can."""
    if not utterance.text:
        return "the transcript is empty after normalisation"
    if utterance.duration < limits.min_duration:
        return f"{utterance.duration:.2f} s is shorter than --min_duration {limits.min_duration:g} s"
    if utterance.duration > limits.max_duration:
        if utterance.input_text is not None:
            return f"{utterance.duration:g} tokens are more than {limits.duration_flag} {limits.max_duration:g}"
        return f"{utterance.duration:.2f} s is longer than {limits.duration_flag} {limits.max_duration:g} s"
    if len(tokens) > limits.max_tokens:
        if utterance.input_text is not None:  # here the limit includes the end token
            return f"{len(tokens) + 1} tokens are more than {limits.tokens_limit} {limits.max_tokens + 1}"
        return f"{len(tokens)} tokens are more than {limits.tokens_limit} {limits.max_tokens}"
    durations = np.array([utterance.duration])
    if len(tokens) > limits.most_spoken_tokens(durations)[0]:
        rate = f"{utterance.duration:.2f} s, {MAX_TOKEN_RATE:g} tokens a second at most"
        return f"{len(tokens)} tokens are more than speech of its length has: {rate}"
    return reason_of_missing_frames(utterance.duration, tokens, limits)


def reason_of_missing_frames(duration: float, tokens: list[int], limits: Limits) -> str | None:
    """Return why audio of this duration in seconds has too few encoder frames for its tokens; None if it has enough."""
    durations = np.array([duration])
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
    usable = _usable(manifest, counts, limits, is_text=reads_text(tokenizer))
    rejections = []
    text_limits = tokenizer.limits if reads_text(tokenizer) else None
    places = np.arange(len(manifest), dtype=np.int32)
    everything = Selection(manifest, places, counts, normalize, is_whole=True, text_limits=text_limits)
    # Only rejected rows are read and tokenized again, for their reasons; the check itself needs the counts alone.
    for place in np.flatnonzero(~usable):
        utterance = everything[int(place)]
        tokens = tokenizer.encode(utterance.text)
        reason = reason_to_reject(utterance, tokens, limits)
        assert reason is not None  # it applies the limits of _usable
        rejections.append(Rejection(manifest.path, utterance.row, utterance.id, reason, not utterance.text))
    return everything if usable.all() else everything.part(np.flatnonzero(usable).astype(np.int32)), rejections


def _usable(manifest: Manifest, counts: TokenCounts, limits: Limits, is_text: bool) -> np.ndarray:
    """Return which rows are usable: bool (rows,)."""
    usable = np.empty(len(manifest), bool)
    # In blocks: the intermediate arrays take ten times the memory of the result.
    for first in range(0, len(manifest), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        durations = counts.frames_needed[rows].astype(np.float64) if is_text else manifest.durations[rows]
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
