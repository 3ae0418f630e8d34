"""Health of a corpus in numbers: statistics over the rows of its manifests, and over a sample of its recordings.

A manifest of any length is read row by row: about 60 bytes of numbers per row stay in memory, and a few whole rows.
Times are in seconds unless a name says hours; a rate is in code points of the normalised text without spaces.
"""

import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from konkanivani.config import TrainConfig
from konkanivani.console import show_text
from konkanivani.corpora.recordings import (
    EpochHealth,
    Pairing,
    SoundHealth,
    content_key,
    extent_key,
    file_size,
    measure_epoch,
    measure_sound,
    occur_again,
    repeats_across,
    repeats_within,
    text_key,
)
from konkanivani.corpora.statistics import (
    MAX_EXAMPLES,
    CharacterCount,
    CharacterHealth,
    ExampleRow,
    Listed,
    Tally,
    example,
    tallies,
)
from konkanivani.data.batching import EpochPlanner, choose_subset
from konkanivani.data.filtering import evaluation_limits, reason_to_reject, training_limits
from konkanivani.data.index import BrokenRow, Utterance
from konkanivani.data.manifest import kind_of
from konkanivani.data.text import Vocabulary, normalize_text
from konkanivani.randomness import derive_seed
from konkanivani.scoring.html import Histogram, build_histogram

OUTLIER = 3.5  # robust z-score; Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993)
MIN_BIN_WIDTH = 0.1  # of histograms, in seconds or units of a rate
MIN_RATES = 20  # fewer have no outliers
MIN_SPREAD = 0.02  # minimum MAD of log rates: with nearly equal rates, tiny deviations would be outliers


@dataclass(frozen=True)
class CorpusPart:
    """A manifest to examine; its `count` valid rows can be read repeatedly, in the same order."""

    path: str
    is_training: bool
    rows: Iterable[Utterance]
    count: int
    broken: tuple[BrokenRow, ...] = ()


@dataclass(frozen=True)
class SpeakerHealth:
    """Speakers of a manifest: hours of the median speaker, share of the largest, and utterances without a label."""

    count: int
    unnamed: int
    median_hours: float
    largest: str
    largest_share: float


@dataclass(frozen=True)
class RateHealth:
    """Characters per second, with outliers by the robust z-score of its logarithm.

    `unusual` lists the worst first: too fast usually means too much text or truncated audio, too slow the opposite.
    """

    characters: Histogram
    words: Histogram
    median: float
    unusual: Listed


@dataclass(frozen=True)
class PartHealth:
    """Health of a manifest.

    Attributes:
        usable, usable_hours: Utterances within the trainer's limits.
        sentences: Number of distinct sentences.
        broken: Rows that are not utterances.
        rejected: Utterances that are not usable: those with an `empty` transcript, which the trainer counts as broken,
            too, and those outside the limits.
        reasons: Number of utterances outside each limit.
    """

    path: str
    is_training: bool
    utterances: int
    hours: float
    usable: int
    usable_hours: float
    words: int
    sentences: int
    durations: Histogram
    hours_by_duration: Histogram
    rates: RateHealth
    speakers: SpeakerHealth
    formats: tuple[Tally, ...]
    broken: Listed
    empty: Listed
    rejected: Listed
    reasons: tuple[Tally, ...]
    repeated_sentences: Listed
    repeated_audio: Listed
    repeated_rows: Listed
    sound: SoundHealth | None
    epoch: EpochHealth | None


@dataclass(frozen=True)
class PartOverlap:
    """Overlap of two manifests, counted in the second one.

    `shared_speakers` and `unknown_characters` name at most twenty of `speakers` and `unknown_character_count`.
    """

    first: str
    second: str
    with_training: bool
    sentences: Listed
    audio: Listed
    speakers: int
    shared_speakers: tuple[str, ...]
    unknown_character_count: int
    unknown_characters: tuple[Tally, ...]


@dataclass(frozen=True)
class CorpusHealth:
    """Health of all readable manifests, the overlap of each with the previous ones, and the characters of them all."""

    parts: tuple[PartHealth, ...]
    crossings: tuple[PartOverlap, ...]
    characters: CharacterHealth


@dataclass(frozen=True)
class HealthRequest:
    """Settings of a health check: the trainer's configuration, its tokenizer (or None), recordings to decode."""

    config: TrainConfig
    tokenizer: Vocabulary | None
    audio_utterances: int


@dataclass
class RowNumbers:
    """Numbers kept of a manifest's rows: arrays with one number per row, and counts."""

    seconds: array = field(default_factory=lambda: array("d"))
    is_usable: array = field(default_factory=lambda: array("b"))
    characters: array = field(default_factory=lambda: array("q"))
    words: array = field(default_factory=lambda: array("q"))
    sentences: array = field(default_factory=lambda: array("Q"))
    places: array = field(default_factory=lambda: array("Q"))
    extents: array = field(default_factory=lambda: array("Q"))
    audio: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    speakers: Counter[str] = field(default_factory=Counter)
    speaker_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    formats: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)  # of the normalised text
    empty: list[ExampleRow] = field(default_factory=list)
    rejected: list[ExampleRow] = field(default_factory=list)
    chosen: list[tuple[Utterance, bool]] = field(default_factory=list)  # sampled, with a flag whether it is usable


def measure_corpus(parts: list[CorpusPart], request: HealthRequest) -> CorpusHealth:
    """Return the health of the parts.

    The rows are read once, and again only those to be compared by content or shown as examples.
    """
    text = CharacterCount()
    rows = [read_rows(part, request, text) for part in parts]
    # Only files with equal size and span can be identical; only these are read.
    same_extent = occur_again([np.array(numbers.extents) for numbers in rows]) if rows else []
    for part, numbers, again in zip(parts, rows, same_extent, strict=True):
        numbers.audio = content_keys(part.rows, again)
    measured = tuple(_measure_part(part, numbers, request) for part, numbers in zip(parts, rows, strict=True))
    crossings = tuple(
        _measure_crossing((parts[first], rows[first]), (parts[second], rows[second]))
        for second in range(len(parts))
        for first in range(second)
    )
    return CorpusHealth(measured, crossings, text.health())


def content_keys(rows: Iterable[Utterance], selected: np.ndarray) -> np.ndarray:
    """Return uint64 content keys (N,) of the recordings selected by the mask `selected`; 0 for the others."""
    keys = np.zeros(len(selected), dtype=np.uint64)
    if selected.any():
        for number, utterance in enumerate(rows):
            if selected[number]:
                keys[number] = content_key(utterance.source)
    return keys


def read_rows(part: CorpusPart, request: HealthRequest, text: CharacterCount) -> RowNumbers:
    """Return the numbers of a part's rows in one pass, and count their characters; `audio` stays empty."""
    rows = RowNumbers()
    config = request.config
    # Training and evaluation skip different utterances.
    limits = training_limits(config) if part.is_training else evaluation_limits(config)
    chosen = set(pick_evenly(part.count, request.audio_utterances, config.run.seed))
    for number, utterance in enumerate(part.rows):
        normal = replace(utterance, text=normalize_text(utterance.text, config.text.digits))
        tokens = request.tokenizer.encode(normal.text) if request.tokenizer else []
        reason = reason_to_reject(normal, tokens, limits)
        _take_row(rows, utterance, normal.text, reason)
        kind = os.path.splitext(utterance.audio_path)[1].lower()
        rows.formats[show_text(kind, 12) + (" shard" if utterance.byte_count else "") or "no extension"] += 1
        size = file_size(utterance.source)
        rows.extents.append(0 if size is None else extent_key(utterance.source, size))
        text.add(utterance.text, normal.text, utterance.row)
        if number in chosen:
            rows.chosen.append((utterance, reason is None))
    return rows


def pick_evenly(count: int, wanted: int, seed: int) -> list[int]:
    """Return at most `wanted` evenly spaced indices below `count`, with an offset that depends on the seed."""
    if wanted >= count:
        return list(range(count))
    shift = np.random.default_rng(derive_seed(seed, "audio")).random()
    return [int((number + shift) * count / wanted) for number in range(wanted)]


def _take_row(rows: RowNumbers, utterance: Utterance, normal: str, reason: str | None) -> None:
    rows.seconds.append(utterance.duration)
    rows.is_usable.append(reason is None)
    rows.characters.append(len(normal) - normal.count(" "))
    rows.words.append(len(normal.split()))
    rows.sentences.append(text_key(normal))
    # Equal path and id: the same row twice, not two spans of a file.
    rows.places.append(text_key(f"{os.path.abspath(utterance.audio_path)}\0{utterance.id}"))
    rows.speakers[utterance.speaker] += 1
    rows.speaker_seconds[utterance.speaker] += utterance.duration
    rows.letters.update(normal)
    if reason is None:
        return
    if normal:
        rows.reasons[kind_of(reason)] += 1
    # An empty transcript is counted apart from the limits.
    for listed in (rows.rejected,) if normal else (rows.rejected, rows.empty):
        if len(listed) < MAX_EXAMPLES:
            listed.append(example(utterance, reason))


def _measure_part(part: CorpusPart, rows: RowNumbers, request: HealthRequest) -> PartHealth:
    seconds = np.array(rows.seconds)
    usable = np.array(rows.is_usable, dtype=bool)
    sentences = np.array(rows.sentences)
    return PartHealth(
        path=part.path,
        is_training=part.is_training,
        utterances=len(seconds),
        hours=float(seconds.sum() / 3600),
        usable=int(usable.sum()),
        usable_hours=float(seconds[usable].sum() / 3600),
        words=sum(rows.words),
        sentences=len(np.unique(sentences[sentences != 0])),
        durations=build_histogram(seconds, finest=MIN_BIN_WIDTH),
        hours_by_duration=build_histogram(seconds, seconds / 3600, MIN_BIN_WIDTH),
        rates=_measure_rates(part, rows),
        speakers=_measure_speakers(rows),
        formats=tallies(rows.formats),
        broken=Listed(len(part.broken), tuple(_broken_example(row) for row in part.broken[:MAX_EXAMPLES])),
        empty=Listed(rows.characters.count(0), tuple(rows.empty)),
        rejected=Listed(int((~usable).sum()), tuple(rows.rejected)),
        reasons=tallies(rows.reasons),
        repeated_sentences=_list_repeats(part, part, repeats_within(sentences, MAX_EXAMPLES)),
        repeated_audio=_list_repeats(part, part, repeats_within(rows.audio, MAX_EXAMPLES)),
        repeated_rows=_list_repeats(part, part, repeats_within(np.array(rows.places), MAX_EXAMPLES)),
        sound=measure_sound(rows.chosen) if request.audio_utterances else None,
        epoch=_measure_epoch(seconds[usable], request.config) if part.is_training and usable.any() else None,
    )


def _broken_example(row: BrokenRow) -> ExampleRow:
    return ExampleRow(row.row, show_text(row.audio_filepath), "", show_text(row.reason, 300))


def robust_scores(rates: np.ndarray) -> np.ndarray:
    """Return the robust z-score of the logarithm of each rate: 0.6745 (x - median) / MAD.

    It is 0 for a value that is not a positive number, and for all if there are fewer than twenty rates.
    """
    scores = np.zeros(len(rates))
    is_rate = np.isfinite(rates) & (rates > 0)
    if is_rate.sum() >= MIN_RATES:
        # On a log scale, half and twice the median are equally far from it.
        logs = np.log(rates[is_rate])
        away = logs - np.median(logs)
        # 0.6745 is the MAD of the standard normal distribution.
        scores[is_rate] = 0.6745 * away / max(float(np.median(np.abs(away))), MIN_SPREAD)
    return scores


def _measure_rates(part: CorpusPart, rows: RowNumbers) -> RateHealth:
    seconds = np.array(rows.seconds)
    characters = np.array(rows.characters)
    words = np.array(rows.words)
    has_speech = (seconds > 0) & (characters > 0)
    rates = np.divide(characters, seconds, out=np.zeros(len(seconds)), where=has_speech)
    scores = robust_scores(rates)
    unusual = np.flatnonzero(np.abs(scores) > OUTLIER)
    worst = unusual[np.argsort(-np.abs(scores[unusual]), kind="stable")][:MAX_EXAMPLES].tolist()
    # Only numbers are in memory; the examples are read again.
    worst_rows = fetch(part.rows, worst)
    details = {n: f"{rates[n]:.1f} characters/s in {seconds[n]:.2f} s (z {scores[n]:+.1f})" for n in worst}
    return RateHealth(
        characters=build_histogram(rates[has_speech], finest=MIN_BIN_WIDTH),
        words=build_histogram(words[has_speech] / seconds[has_speech], finest=MIN_BIN_WIDTH),
        median=float(np.median(rates[has_speech])) if has_speech.any() else 0.0,
        unusual=Listed(len(unusual), tuple(example(worst_rows[number], details[number]) for number in worst)),
    )


def fetch(rows: Iterable[Utterance], wanted: Iterable[int]) -> dict[int, Utterance]:
    """Return the rows with these indices, in one more pass that stops at the last of them."""
    wanted = set(wanted)
    end = max(wanted, default=-1) + 1
    return {number: utterance for number, utterance in enumerate(islice(rows, end)) if number in wanted}


def _measure_speakers(rows: RowNumbers) -> SpeakerHealth:
    seconds_by_name = {name: seconds for name, seconds in rows.speaker_seconds.items() if name}
    total = sum(seconds_by_name.values())
    largest = max(seconds_by_name, key=lambda name: seconds_by_name[name], default="")
    return SpeakerHealth(
        count=len(seconds_by_name),
        unnamed=rows.speakers[""],
        median_hours=float(np.median([*seconds_by_name.values()]) / 3600) if seconds_by_name else 0.0,
        largest=show_text(largest, 40),
        largest_share=seconds_by_name[largest] / total if total else 0.0,
    )


def _list_repeats(first: CorpusPart, second: CorpusPart, pairing: Pairing) -> Listed:
    """Return the repeated rows of `second`, each with the row of `first` that it repeats."""
    left = fetch(first.rows, (a for a, _ in pairing.pairs))
    right = fetch(second.rows, (b for _, b in pairing.pairs))
    where = "" if first is second else f" of {os.path.basename(first.path)}"
    examples = (example(right[b], f"as row {left[a].row}{where}, {left[a].id}") for a, b in pairing.pairs)
    return Listed(pairing.count, tuple(examples))


def _measure_crossing(first: tuple[CorpusPart, RowNumbers], second: tuple[CorpusPart, RowNumbers]) -> PartOverlap:
    """Return the overlap of the second part with the first."""
    (first_part, first_rows), (second_part, second_rows) = first, second
    sentences = repeats_across(np.array(first_rows.sentences), np.array(second_rows.sentences), MAX_EXAMPLES)
    audio = repeats_across(first_rows.audio, second_rows.audio, MAX_EXAMPLES)
    shared = sorted((first_rows.speakers.keys() & second_rows.speakers.keys()) - {""})
    # Characters without a token in a vocabulary of the first part.
    unknown = Counter({c: n for c, n in second_rows.letters.items() if c not in first_rows.letters})
    return PartOverlap(
        first=first_part.path,
        second=second_part.path,
        with_training=first_part.is_training or second_part.is_training,
        sentences=_list_repeats(first_part, second_part, sentences),
        audio=_list_repeats(first_part, second_part, audio),
        speakers=len(shared),
        shared_speakers=tuple(show_text(name, 40) for name in shared[:MAX_EXAMPLES]),
        unknown_character_count=len(unknown),
        unknown_characters=tallies(unknown),
    )


def _measure_epoch(durations: np.ndarray, config: TrainConfig) -> EpochHealth:
    """Return the first epoch that the trainer would plan from the usable durations."""
    data = config.data
    seed = config.run.seed
    if data.train_subset < 100:
        durations = durations[choose_subset(len(durations), data.train_subset, seed)]
    # `auto` is resolved by a memory plan on the GPU; assume the whole global batch here.
    micro_batch = config.global_batch_size if data.batch_size == "auto" else data.batch_size
    return measure_epoch(EpochPlanner(durations, config.global_batch_size, seed), micro_batch)
