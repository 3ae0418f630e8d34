"""Report on the recognition accuracy of a set of utterances, computed from their references and hypotheses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from konkanivani.evaluation.bootstrap import (
    MIN_SPEAKERS,
    RESAMPLES,
    Interval,
    Unit,
    Wish,
    block_numbers,
    choose_unit,
    percentiles,
    ratios,
    resample_sums,
)
from konkanivani.evaluation.hypotheses import OtherSystem, TextPairs
from konkanivani.evaluation.metrics import Edit, ErrorRates, UtteranceEdits, align_words, count_edits
from konkanivani.evaluation.transcripts import ScoredText

# Lower bound of each duration bucket in seconds, and its name.
BUCKETS = {0.0: "under 2 s", 2.0: "2 to 5 s", 5.0: "5 to 10 s", 10.0: "10 to 20 s", 20.0: "20 s and more"}
MAX_CONFUSIONS = 12


@dataclass(frozen=True)
class Slice:
    """Utterances with a common property, and the interval of their WER; `seconds` is None if unknown."""

    name: str
    utterances: int
    seconds: float | None
    rates: ErrorRates
    interval: Interval


@dataclass(frozen=True)
class AlignedUtterance:
    """An utterance with its aligned words."""

    text: ScoredText
    rates: ErrorRates
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Comparison:
    """Two systems on the utterances that both have recognised; differences are this system's WER minus the other's.

    `fewer` and `more` are the shares of resamples in which this system makes fewer or more word errors than the other.
    """

    name: str
    utterances: int
    rates: ErrorRates
    other: ErrorRates
    interval: Interval
    fewer: float
    more: float

    @property
    def difference(self) -> float:
        """Return the difference in WER, negative if this system is better."""
        return self.rates.wer - self.other.wer


@dataclass(frozen=True)
class ScoreReport:
    """Error rates with intervals, in total and by speaker (highest WER first), duration and pattern, and confusions.

    `facts` are the origin of the score as (name, value), `notes` point out irregularities, confusions have their
    counts, and `worst` are the utterances with the most word errors.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    utterances: int
    seconds: float | None
    rates: ErrorRates
    wer_interval: Interval
    cer_interval: Interval
    unit: Unit
    speakers: tuple[Slice, ...]
    durations: tuple[Slice, ...]
    patterns: tuple[Slice, ...]
    substitutions: tuple[tuple[Edit, int], ...]
    deletions: tuple[tuple[Edit, int], ...]
    insertions: tuple[tuple[Edit, int], ...]
    worst: tuple[AlignedUtterance, ...]
    comparison: Comparison | None

    @property
    def interval_words(self) -> str:
        """Return a description of the intervals for the user."""
        said = f"{RESAMPLES:,} bootstrap resamples of {self.unit}"
        if self.unit == "speakers" or not self.speakers:
            return said
        named = sum(bool(speaker.name) for speaker in self.speakers)
        few = f", too few ({named}) to be resampled" if named < MIN_SPEAKERS else ""
        return f"{said}; valid for other speech of the same speakers{few}"


def build_report(
    pairs: TextPairs, edits: UtteranceEdits, wish: Wish, worst: int, other: OtherSystem | None
) -> ScoreReport:
    """Return the report on normalised texts with their edits.

    Args:
        wish: Unit to resample for the intervals.
        worst: Maximum number of worst utterances.
        other: Another system to compare with.
    """
    texts = pairs.texts
    speakers = [text.speaker for text in pairs.texts]
    unit = choose_unit(speakers, wish)
    resampled = resample_sums(edits.sums, block_numbers(speakers, unit))
    # With a single speaker, the slice would repeat the total.
    by_speaker = _slices(texts, edits, wish, speakers) if len(set(speakers)) > 1 else {}
    by_duration = _slices(texts, edits, wish, [_bucket(text.seconds) for text in texts])
    by_pattern = _slices(texts, edits, wish, [text.pattern or None for text in texts])
    return ScoreReport(
        title=pairs.source.title,
        facts=pairs.facts,
        notes=pairs.notes,
        utterances=len(texts),
        seconds=_seconds(texts),
        rates=edits.rates(),
        wer_interval=percentiles(ratios(resampled[:, 0], resampled[:, 1])),
        cer_interval=percentiles(ratios(resampled[:, 2], resampled[:, 3])),
        unit=unit,
        # NaN, the WER of a speaker without reference words, is sorted last.
        speakers=tuple(sorted(by_speaker.values(), key=lambda part: -np.nan_to_num(part.rates.wer, nan=-1.0))),
        durations=tuple(by_duration[name] for name in BUCKETS.values() if name in by_duration),
        patterns=tuple(by_pattern[name] for name in sorted(by_pattern)),
        substitutions=edits.confusions("substitution", MAX_CONFUSIONS),
        deletions=edits.confusions("deletion", MAX_CONFUSIONS),
        insertions=edits.confusions("insertion", MAX_CONFUSIONS),
        worst=_worst(texts, edits, worst),
        comparison=_compare(texts, edits, other, wish) if other else None,
    )


def _bucket(seconds: float | None) -> str | None:
    """Return the name of a duration's bucket; None if the duration is unknown."""
    if seconds is None:
        return None
    # The largest lower bound that does not exceed the duration.
    return BUCKETS[max(start for start in BUCKETS if start <= seconds)]


def _slices(
    texts: Sequence[ScoredText], edits: UtteranceEdits, wish: Wish, names: Sequence[str | None]
) -> dict[str, Slice]:
    """Return the utterances of each name as a slice; those without a name are left out."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name is not None:
            rows_of.setdefault(name, []).append(row)
    slices = {}
    for name, rows in rows_of.items():
        some = [texts[row] for row in rows]
        counted = edits.of(np.array(rows))
        speakers = [text.speaker for text in some]
        resampled = resample_sums(counted.sums[:, :2], block_numbers(speakers, choose_unit(speakers, wish)))
        # Each slice chooses its own unit: it may have too few speakers.
        interval = percentiles(ratios(*resampled.T))
        slices[name] = Slice(name, len(some), _seconds(some), counted.rates(), interval)
    return slices


def _seconds(texts: Sequence[ScoredText]) -> float | None:
    """Return the total duration; None if one is unknown."""
    known = [text.seconds for text in texts if text.seconds is not None]
    return float(sum(known)) if len(known) == len(texts) else None


def _worst(texts: Sequence[ScoredText], edits: UtteranceEdits, most: int) -> tuple[AlignedUtterance, ...]:
    """Return the utterances with the most word errors, ties by character errors; none without errors."""
    errors = edits.sums[:, [0, 2]]
    # lexsort() sorts by its last key first.
    order = np.lexsort((-errors[:, 1], -errors[:, 0]))
    rows = [row for row in order[:most] if errors[row].any()]
    alignments = align_words([texts[row].reference for row in rows], [texts[row].hypothesis for row in rows])
    return tuple(
        AlignedUtterance(texts[row], edits.of(np.array([row])).rates(), aligned)
        for row, aligned in zip(rows, alignments, strict=True)
    )


def _compare(texts: Sequence[ScoredText], edits: UtteranceEdits, other: OtherSystem, wish: Wish) -> Comparison:
    """Return both systems on the same resamples of their common utterances."""
    rows = np.array([row for row, hypothesis in enumerate(other.hypotheses) if hypothesis is not None])
    ours = edits.of(rows)
    speakers = [texts[row].speaker for row in rows]
    theirs = count_edits([texts[row].reference for row in rows], [other.hypotheses[row] or "" for row in rows])
    blocks = block_numbers(speakers, choose_unit(speakers, wish))
    # Paired resamples: the variation that both systems share cancels in the difference.
    errors, words, others = resample_sums(np.column_stack([ours.sums[:, :2], theirs.sums[:, 0]]), blocks).T
    return Comparison(
        name=other.name,
        utterances=len(rows),
        rates=ours.rates(),
        other=theirs.rates(),
        interval=percentiles(ratios(errors - others, words)),
        fewer=float(np.mean(errors < others)),
        more=float(np.mean(errors > others)),
    )
