"""Assignment of utterances to splits: as the corpus defines them, drawn, or drawn from the corpus's training part."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from konkanivani.base.errors import DataError, UsageError
from konkanivani.data.formats.found import RefusedRow
from konkanivani.data.formats.splits import SPLITS, Shares, draw_splits
from konkanivani.data.preparation.corpus import CheckedUtterance, Corpus

SplitBy = Literal["default", "given", "speaker", "utterance"]


@dataclass(frozen=True)
class Drawn:
    """Utterances with their splits; `parts` are the splits drawn by `unit` from the corpus's training part."""

    utterances: list[CheckedUtterance]
    parts: tuple[str, ...] = ()
    unit: str = ""


@dataclass(frozen=True)
class SplitSummary:
    """Size of a manifest; `speakers` counts the labelled ones."""

    name: str
    utterances: int
    hours: float
    speakers: int


def resolve_split_by(asked: SplitBy, corpus: Corpus, name: str) -> SplitBy:
    """Return the requested criterion, or for `default` the first that the corpus supports.

    Args:
        name: Name of the corpus, for errors.

    Raises:
        UsageError: If the corpus has no splits or no speakers, as requested.
    """
    has_given = any(checked.split for checked in corpus.utterances)
    has_speakers = any(checked.utterance.speaker for checked in corpus.utterances)
    if asked == "default":
        return "given" if has_given else "speaker" if has_speakers else "utterance"
    missing = {
        "given": "" if has_given else "defines no splits",
        "speaker": "" if has_speakers else "has no speaker labels",
    }
    # An empty corpus is reported later, as one without utterances.
    if corpus.utterances and (what := missing.get(asked)):
        raise UsageError(f"--split_by {asked} is not possible: {name} {what}. Use --split_by utterance.")
    return asked


def refuse_without_split(corpus: Corpus) -> None:
    """Move the utterances to which the corpus gives no split to the refused rows."""
    for checked in corpus.utterances:
        if not checked.split:
            path = checked.utterance.audio_filepath
            reason = "its corpus defines splits, but none for it: --split_by makes new splits"
            corpus.refused.append(RefusedRow(checked.file, checked.utterance.row, "no split", reason, path))
    corpus.utterances = [checked for checked in corpus.utterances if checked.split]


def draw(corpus: Corpus, split_by: SplitBy, shares: Shares, seed: int, name: str) -> Drawn:
    """Return the utterances in their splits.

    If the corpus defines train but not valid, valid is drawn from train, and test as well if it is missing.

    Raises:
        DataError: If all splits are to be drawn and there are too few speakers or utterances.
    """
    if split_by != "given":
        return Drawn(_drawn(corpus.utterances, split_by, shares, seed, name))
    there = {checked.split for checked in corpus.utterances}
    # A test split of the corpus's own is kept.
    lacking = Shares(shares.valid, 0.0 if "test" in there else shares.test)
    spoken = [checked for checked in corpus.utterances if checked.split == "train"]
    # Too few training utterances for the missing splits are no error: the corpus's own splits suffice.
    if "valid" in there or not 1 < lacking.asked <= len(spoken):
        return Drawn(corpus.utterances)
    # By speaker if there are enough, so that no speaker is in two drawn splits.
    has_speakers = len({checked.utterance.speaker for checked in spoken} - {""}) >= lacking.asked
    unit: SplitBy = "speaker" if has_speakers else "utterance"
    drawn = _drawn(spoken, unit, lacking, seed, f"The training part of {name}")
    kept = [checked for checked in corpus.utterances if checked.split != "train"]
    parts = tuple(part for part in SPLITS if part in {checked.split for checked in drawn} - {"train"})
    return Drawn(drawn + kept, parts, unit)


def _drawn(
    utterances: list[CheckedUtterance], unit: SplitBy, shares: Shares, seed: int, name: str
) -> list[CheckedUtterance]:
    """Return the utterances in drawn splits; by speaker, utterances without a speaker label go to training."""
    milliseconds: Counter[str] = Counter()
    for checked in utterances:
        if unit_name := _unit_name(checked, unit):
            # Integers: a sum of floats would depend on the order of rows.
            milliseconds[unit_name] += round(1000 * checked.utterance.duration)
    if len(milliseconds) < shares.asked:
        raise DataError(
            f"{name} has {len(milliseconds)} {unit}s, too few for {shares.asked} splits. Use "
            f"{'--split_by utterance, or ' if unit == 'speaker' else ''}--test_share 0 or --valid_share 0."
        )
    valid, test = draw_splits(milliseconds, shares, seed)
    split_of = dict.fromkeys(valid, "valid") | dict.fromkeys(test, "test")
    return [replace(checked, split=split_of.get(_unit_name(checked, unit), "train")) for checked in utterances]


def _unit_name(checked: CheckedUtterance, unit: SplitBy) -> str:
    return checked.utterance.speaker if unit == "speaker" else checked.id


def summaries(utterances: list[CheckedUtterance]) -> Iterator[SplitSummary]:
    """Yield the size of each split that is not empty."""
    for name in SPLITS:
        spoken = [checked.utterance for checked in utterances if checked.split == name]
        hours = round(sum(utterance.duration for utterance in spoken) / 3600, 4)
        if spoken:
            yield SplitSummary(name, len(spoken), hours, len({u.speaker for u in spoken if u.speaker}))
