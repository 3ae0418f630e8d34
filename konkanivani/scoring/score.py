"""Scores of hypotheses against references."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from konkanivani.config import DecodingConfig
from konkanivani.console import count, short_name
from konkanivani.data.text import normalize_text
from konkanivani.errors import ResourceError, explained
from konkanivani.files import write_json_lines
from konkanivani.scoring.metrics import (
    MIN_SPEAKERS,
    RESAMPLES,
    Edit,
    ErrorRates,
    Interval,
    Unit,
    UtteranceEdits,
    Wish,
    align_words,
    block_numbers,
    choose_unit,
    count_edits,
    percentiles,
    ratios,
    resample_sums,
)
from konkanivani.scoring.transcripts import (
    ScoredText,
    TextFormat,
    TranscriptFile,
    are_probably_ids,
    match_hypotheses,
    pair_transcripts,
    read_transcripts,
)

# --------------------
# References and hypotheses, their origin, and the file of hypotheses that an evaluation of a manifest writes.


NormalizerName = Literal["konkanivani", "spell", "none"]
# Normalisation of references and hypotheses before they are compared, and its description in reports.
# Even with `none`, the amount and kind of whitespace between words makes no difference.
NORMALIZERS: dict[NormalizerName, tuple[Callable[[str], str], str]] = {
    "konkanivani": (normalize_text, "konkanivani: NFC, no punctuation, lower case"),
    "spell": (partial(normalize_text, digits="spell"), "spell: NFC, no punctuation, lower case, digits spelt"),
    "none": (lambda text: " ".join(text.split()), "none: texts unchanged"),
}


@dataclass(frozen=True)
class CheckpointRun:
    """Evaluation of a checkpoint on a manifest: losses in nats per token, time in seconds, number of skipped rows."""

    checkpoint: str
    step: int
    manifest: str
    left_out: int
    loss: float
    ctc_loss: float | None
    attention_loss: float | None
    seconds: float
    decoding: DecodingConfig

    @property
    def title(self) -> str:
        return f"{short_name(self.checkpoint)} on {short_name(self.manifest)}"

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        left_out = f" ({count(self.left_out, 'row')} skipped)" if self.left_out else ""
        terms = [("CTC", self.ctc_loss), ("attention", self.attention_loss)]
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in terms if loss is not None)
        return (
            ("checkpoint", f"{self.checkpoint}, step {self.step:,}"),
            ("manifest", self.manifest + left_out),
            ("decoding", f"{decoding_words(self.decoding)}, {self.seconds:.1f} s including loading"),
            ("loss", f"{self.loss:.3f} ({losses}) nats per token"),
        )


@dataclass(frozen=True)
class TextFiles:
    """Two files of transcripts; one file may contain both."""

    references: str
    hypotheses: str

    @property
    def title(self) -> str:
        if self.references == self.hypotheses:
            return short_name(self.hypotheses)
        return f"{short_name(self.hypotheses)} against {short_name(self.references)}"

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        return ("references", self.references), ("hypotheses", self.hypotheses)


@dataclass(frozen=True)
class OtherSystem:
    """Normalised hypotheses of another system for the same utterances, in their order; None for a missing one."""

    name: str
    hypotheses: tuple[str | None, ...]


@dataclass(frozen=True)
class TextPairs:
    """Utterances with reference and hypothesis, their origin, and the normalisation that is or will be applied.

    `inputs` are the texts that a text-to-text model has read.
    """

    texts: tuple[ScoredText, ...]
    source: CheckpointRun | TextFiles
    normalizer: NormalizerName
    notes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the origin of the texts and their normalisation, as (name, value)."""
        return *self.source.facts, ("normalised", NORMALIZERS[self.normalizer][1])

    def normalized(self) -> "TextPairs":
        normalize, _ = NORMALIZERS[self.normalizer]
        texts = (replace(t, reference=normalize(t.reference), hypothesis=normalize(t.hypothesis)) for t in self.texts)
        return replace(self, texts=tuple(texts))


def read_pairs(references: str | None, hypotheses: str, text_format: TextFormat) -> TextPairs:
    """Load the transcripts of two files, or of one file with both, without normalising them.

    Raises:
        DataError: If they cannot be read or paired.
    """
    reference_file = read_transcripts(references or hypotheses, text_format, "reference")
    hypothesis_file = read_transcripts(hypotheses, text_format, "hypothesis" if references else "own hypothesis")
    texts = tuple(pair_transcripts(reference_file, hypothesis_file))
    notes: tuple[str, ...] = ()
    # Ids scored as words would lower the WER: they are always right.
    if not (reference_file.has_ids and hypothesis_file.has_ids) and are_probably_ids(texts):
        notes = ("Each line of both files starts with the same word; if these are ids, use --format ids.",)
    return TextPairs(texts, TextFiles(references or hypotheses, hypotheses), "konkanivani", notes)


def other_system(ours: TextPairs, other: TranscriptFile) -> OtherSystem:
    """Return another system's hypotheses for the utterances of `ours`, normalised the same way."""
    normalize, _ = NORMALIZERS[ours.normalizer]
    hypotheses = match_hypotheses(ours.texts, other)
    return OtherSystem(other.path, tuple(None if text is None else normalize(text) for text in hypotheses))


def inputs_as_system(ours: TextPairs) -> OtherSystem | None:
    """Return the inputs of a text-to-text model as another system's hypotheses; None for a model of speech."""
    normalize, _ = NORMALIZERS[ours.normalizer]
    return OtherSystem("the inputs", tuple(map(normalize, ours.inputs))) if ours.inputs else None


def decoding_words(config: DecodingConfig) -> str:
    """Return the decoding method with the settings that affect it."""
    if config.decode == "greedy":
        return "greedy"
    parts = [config.decode, f"beam {config.beam}"]
    if config.decode == "prefix":
        return ", ".join(parts)
    parts += [f"CTC weight {config.joint_ctc_weight:g}"] if config.decode == "joint" else []
    parts += [f"length bonus {config.length_bonus:g}"] if config.length_bonus else []
    parts += [f"{config.language_model} times {config.language_model_weight:g}"] if config.language_model else []
    return ", ".join(parts)


HYPOTHESES = '"hypothesis": '  # occurs in each row
COUNTS = ("word_errors", "words", "character_errors", "characters")


def write_hypotheses(path: Path, texts: Sequence[ScoredText], edits: UtteranceEdits) -> None:
    """Write one JSON line per utterance, in order, to a temporary file and rename it to `path`."""
    with explained(ResourceError, f"The hypotheses could not be written to {path}", "Choose another --output."):
        write_json_lines(path, _rows(texts, edits))


def _rows(texts: Sequence[ScoredText], edits: UtteranceEdits) -> Iterator[dict[str, object]]:
    # tolist() converts to Python integers, which JSON can represent.
    for text, counts in zip(texts, edits.sums.tolist(), strict=True):
        details = {"duration": text.seconds, "speaker": text.speaker, "pattern": text.pattern}
        row = {"audio_filepath": text.id} | {name: value for name, value in details.items() if value not in (None, "")}
        row |= {"reference": text.reference, "hypothesis": text.hypothesis}
        yield row | dict(zip(COUNTS, counts, strict=True))


# --------------------
# Report on the recognition accuracy of a set of utterances, computed from their references and hypotheses.


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
class ConditionTexts:
    """Transcripts of the same utterances under one simulated recording condition."""

    name: str
    description: str
    pairs: TextPairs


@dataclass(frozen=True)
class ConditionScore:
    """Score under a recording condition, which `part.name` describes; `ratio` is its WER over the unchanged one's.

    The ratio is NaN if there are no errors on unchanged recordings.
    """

    name: str
    part: Slice
    ratio: float


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
    conditions: tuple[ConditionScore, ...] = ()

    @property
    def interval_words(self) -> str:
        """Return a description of the intervals for the user."""
        method = f"{RESAMPLES:,} bootstrap resamples of {self.unit}"
        if self.unit == "speakers" or not self.speakers:
            return method
        named = sum(bool(speaker.name) for speaker in self.speakers)
        few = f", too few ({named}) to be resampled" if named < MIN_SPEAKERS else ""
        return f"{method}; valid for other speech of the same speakers{few}"


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


def score_conditions(
    conditions: Sequence[ConditionTexts], normalizer: NormalizerName, wish: Wish
) -> tuple[ConditionScore, ...]:
    """Return the scores of all conditions, in order; the first one is of unchanged recordings."""
    parts = []
    for condition in conditions:
        texts = replace(condition.pairs, normalizer=normalizer).normalized().texts
        edits = count_edits([text.reference for text in texts], [text.hypothesis for text in texts])
        slices = _slices(texts, edits, wish, [condition.description] * len(texts))
        parts.append(slices[condition.description])
    usual = parts[0].rates.wer
    return tuple(
        ConditionScore(condition.name, part, part.rates.wer / usual if usual > 0 else np.nan)
        for condition, part in zip(conditions, parts, strict=True)
    )


def _bucket(seconds: float | None) -> str | None:
    """Return the name of a duration's bucket; None if the duration is unknown."""
    if seconds is None:
        return None
    # The largest lower bound that does not exceed the duration.
    return BUCKETS[max(start for start in BUCKETS if start <= seconds)]


def _slices(
    texts: Sequence[ScoredText], edits: UtteranceEdits, requested_unit: Wish, names: Sequence[str | None]
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
        resampled = resample_sums(counted.sums[:, :2], block_numbers(speakers, choose_unit(speakers, requested_unit)))
        # Each slice chooses its own unit: it may have too few speakers.
        interval = percentiles(ratios(*resampled.T))
        slices[name] = Slice(name, len(some), _seconds(some), counted.rates(), interval)
    return slices


def _seconds(texts: Sequence[ScoredText]) -> float | None:
    """Return the total duration; None if one is unknown."""
    durations = [text.seconds for text in texts if text.seconds is not None]
    return float(sum(durations)) if len(durations) == len(texts) else None


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


def _compare(
    texts: Sequence[ScoredText], edits: UtteranceEdits, other: OtherSystem, requested_unit: Wish
) -> Comparison:
    """Return both systems on the same resamples of their common utterances."""
    rows = np.array([row for row, hypothesis in enumerate(other.hypotheses) if hypothesis is not None])
    own_edits = edits.of(rows)
    speakers = [texts[row].speaker for row in rows]
    other_edits = count_edits([texts[row].reference for row in rows], [other.hypotheses[row] or "" for row in rows])
    blocks = block_numbers(speakers, choose_unit(speakers, requested_unit))
    # Paired resamples: the variation that both systems share cancels in the difference.
    errors, words, other_errors = resample_sums(
        np.column_stack([own_edits.sums[:, :2], other_edits.sums[:, 0]]), blocks
    ).T
    return Comparison(
        name=other.name,
        utterances=len(rows),
        rates=own_edits.rates(),
        other=other_edits.rates(),
        interval=percentiles(ratios(errors - other_errors, words)),
        fewer=float(np.mean(errors < other_errors)),
        more=float(np.mean(errors > other_errors)),
    )
