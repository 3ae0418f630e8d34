"""Corpus in preparation: check of its rows, split of its utterances, and texts shared by two splits."""

import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Literal

from konkanivani.console import printable
from konkanivani.corpora.tables import SPLITS, RefusedRow, Shares, SourceUtterance, draw_splits
from konkanivani.data.audio.files import (
    SPAN_ROUNDING,
    AudioHeader,
    AudioSource,
    channel_error,
    content_digest,
    read_header,
)
from konkanivani.data.audio.paths import existing_path
from konkanivani.data.index import Utterance
from konkanivani.data.text import (
    drop_unwritten,
    find_unwritten,
    forbidden_character,
    forbidden_in_transcript,
    normalize_text,
)
from konkanivani.errors import DataError, UsageError, explained

# --------------------
# Row-by-row check of a corpus: text and path first, then the header of every audio file.


ROWS_AT_ONCE = 512
THREADS = 8  # for disk access; the work is not CPU-bound
MAX_CHARACTERS = 20_000  # longer than any utterance; later steps take time per character
# Fast speech has about 40 code points per second; a text with far more belongs to another recording.
MAX_CHARACTER_RATE = 100
SPARE_CHARACTERS = 100
SHALLOW = 3  # parts of a path such as /home/anita: so high a folder is not proposed as --audio_root
LINE_ENDS = re.compile("[\t\n\r]")  # in a cell: a quotation mark has swallowed other cells
NOT_UTF8 = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class CheckedUtterance:
    """A usable utterance, the split that its corpus gives it, and the values by which it is compared.

    Attributes:
        id: Name within the corpus, independent of the corpus's location.
        sentence: Normalised text.
        removed: Format characters that were removed from the text of the corpus.
    """

    utterance: Utterance
    file: str
    id: str
    split: str
    sentence: str
    removed: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.file}, row {self.utterance.row}"

    @property
    def start(self) -> float:
        return self.utterance.offset or 0.0

    @property
    def end(self) -> float:
        return self.start + self.utterance.duration


@dataclass(frozen=True)
class AudioRoots:
    """Folders that may contain audio (`inside`, resolved) and that will contain the manifests (`output`).

    Audio in `staged` will have moved to `published` when the manifests are read.
    """

    inside: Path
    output: Path
    staged: Path
    published: Path


@dataclass
class Corpus:
    """Rows of a corpus, separated into usable utterances and refused rows."""

    utterances: list[CheckedUtterance] = field(default_factory=list)
    refused: list[RefusedRow] = field(default_factory=list)

    @property
    def damage(self) -> float:
        """Return the share of rows that are refused unexpectedly."""
        unexpected = sum(not row.is_expected for row in self.refused)
        return unexpected / max(1, unexpected + len(self.utterances))


def read_corpus(rows: Iterable[SourceUtterance | RefusedRow], roots: AudioRoots) -> Corpus:
    """Check the rows and return them in order.

    A row is also refused if an earlier one is the same span of the same audio. At most `ROWS_AT_ONCE` unchecked rows
    are in memory.
    """
    corpus = Corpus()
    first_rows: dict[str, str] = {}  # by identity, the place of the first row
    rows = iter(rows)
    with ThreadPoolExecutor(THREADS) as pool:
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            resolved_rows = [row if isinstance(row, RefusedRow) else _check_text_and_path(row, roots) for row in chunk]
            files = dict.fromkeys(_audio_source(row) for row in resolved_rows if isinstance(row, SourceUtterance))
            headers = dict(zip(files, pool.map(_read_header, files), strict=True))  # once per file, not per segment
            for row in resolved_rows:
                checked = row if isinstance(row, RefusedRow) else _check_audio(row, headers[_audio_source(row)], roots)
                if isinstance(checked, CheckedUtterance):
                    first = first_rows.setdefault(checked.id, checked.where)
                    if first == checked.where:
                        corpus.utterances.append(checked)
                        continue
                    number = checked.utterance.row
                    path = checked.utterance.audio_filepath
                    checked = RefusedRow(checked.file, number, "duplicate", f"it is the same audio as {first}", path)
                corpus.refused.append(checked)
    return corpus


def _check_text_and_path(row: SourceUtterance, roots: AudioRoots) -> SourceUtterance | RefusedRow:
    """Return the row with its path resolved and its texts stripped, or refused if text or path are unusable."""
    row = replace(row, text=row.text.strip(), speaker=row.speaker.strip())
    for name, text in (("text", row.text), ("speaker", row.speaker), ("path", str(row.audio))):
        if NOT_UTF8.search(text):
            return row.refused("not UTF-8", f"its {name} is not UTF-8")
        find_forbidden = forbidden_in_transcript if name == "text" else forbidden_character
        unfit = find_forbidden(text) or next(iter(LINE_ENDS.findall(text)), None)
        if unfit:
            return row.refused("control character", f"its {name} contains the character U+{ord(unfit):04X}")
    removed = tuple(find_unwritten(row.text))
    if removed:
        row = replace(row, text=drop_unwritten(row.text).strip(), removed=removed)
    if len(row.text) > MAX_CHARACTERS:
        return row.refused(
            "long transcript", f"its transcript has {len(row.text)} characters: are several rows joined?"
        )
    # A text of punctuation only is empty for the model.
    if not normalize_text(row.text):
        return row.refused("empty transcript", "its transcript is empty")
    try:
        path = Path(existing_path(str(row.audio))).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        return row.refused("missing audio", f"its path cannot be followed: {error}")
    if not path.is_relative_to(roots.inside) and not path.is_relative_to(roots.staged):
        # Propose the smallest folder that contains both the corpus and the file; if it is too high, the file's folder.
        shared = Path(os.path.commonpath((roots.inside, path)))
        root = shlex.quote(str(shared if len(shared.parts) > SHALLOW else path.parent))
        reason = f"its audio is outside {roots.inside}: give --audio_root {root} to allow it"
        return row.refused("outside the corpus", reason)
    return replace(row, audio=path)


def _audio_source(row: SourceUtterance) -> AudioSource:
    return AudioSource(str(row.audio), row.byte_offset, row.byte_count)


def _read_header(source: AudioSource) -> AudioHeader | str:
    try:
        return read_header(source)
    except DataError as error:
        return str(error)


def _check_audio(row: SourceUtterance, header: AudioHeader | str, roots: AudioRoots) -> CheckedUtterance | RefusedRow:
    if isinstance(header, str):
        kind = "unusable audio" if os.path.lexists(row.audio) else "missing audio"
        return row.refused(kind, header)
    # A span may still be within the audio that exists.
    if header.missing and row.seconds is None:
        return row.refused("cut short", f"its audio is {header.missing:.1f} s shorter than its header states")
    reason = _span_reason(row, header.seconds)
    if reason:
        return row.refused("span", reason)
    stated = row.file_seconds
    # "not <=" instead of ">", so that NaN is refused.
    if stated is not None and not abs(stated - header.seconds) <= max(0.5, 0.1 * stated):
        return row.refused(
            "other duration", f"its table states {stated:.2f} s, its audio file lasts {header.seconds:.2f} s"
        )
    remaining = header.seconds - row.start
    # A span may exceed its file by SPAN_ROUNDING.
    seconds = remaining if row.seconds is None else min(row.seconds, remaining)
    if len(row.text) > SPARE_CHARACTERS + MAX_CHARACTER_RATE * seconds:
        reason = f"its transcript has {len(row.text)} characters, more than {seconds:.2f} s of speech have"
        return row.refused("long transcript", f"{reason}: does it belong to this audio?")
    # A label of a mono file, such as A in Kaldi's reco2file_and_channel, has no effect.
    channel = None if row.is_channel_label and header.channels == 1 else row.channel
    channel_reason = channel_error(channel, header.channels)
    if channel_reason:
        return row.refused("channel", channel_reason)
    # The path in the manifest is relative to its folder, but absolute if they have only the root in common.
    is_staged = row.audio.is_relative_to(roots.staged)
    audio = roots.published / row.audio.relative_to(roots.staged) if is_staged else row.audio
    is_far = os.path.commonpath((audio, roots.output)) == os.path.sep
    is_span = row.start > 0 or row.seconds is not None
    utterance = Utterance(
        audio_filepath=str(audio) if is_far else os.path.relpath(audio, roots.output),
        audio_path=str(row.audio),
        duration=seconds,
        text=row.text,
        speaker=row.speaker,
        offset=row.start if is_span else None,
        byte_offset=row.byte_offset,
        byte_count=row.byte_count,
        channel=channel,
        row=row.row,
    )
    root = roots.staged if is_staged else roots.inside
    span = f"@{row.start:.3f}" + ("" if row.seconds is None else f"+{row.seconds:.3f}")
    span += "" if channel is None else f":ch{channel}"
    identity = f"{row.audio.relative_to(root)}#{row.byte_offset}{span}"
    return CheckedUtterance(utterance, row.file, identity, row.split, normalize_text(row.text), row.removed)


def _span_reason(row: SourceUtterance, file_seconds: float) -> str:
    """Return the defect of the row's span; "" if there is none."""
    seconds = row.seconds
    if not math.isfinite(row.start) or row.start < 0 or not (seconds is None or 0 < seconds < math.inf):
        length = "the end" if seconds is None else f"{seconds:g} s"
        return f"it has an invalid range: from {row.start:g} s, for {length}"
    end = row.start + (seconds or 0.0)
    if end > file_seconds + SPAN_ROUNDING or row.start >= file_seconds:
        return f"it ends at {end:.2f} s, its audio file at {file_seconds:.2f} s"
    return ""


# --------------------
# Assignment of utterances to splits: as the corpus defines them, drawn, or drawn from the corpus's training part.


SplitBy = Literal["default", "given", "speaker", "utterance"]


@dataclass(frozen=True)
class SplitAssignment:
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


def resolve_split_by(split_by: SplitBy, corpus: Corpus, name: str) -> SplitBy:
    """Return the requested criterion, or for `default` the first that the corpus supports.

    Args:
        name: Name of the corpus, for errors.

    Raises:
        UsageError: If the corpus has no splits or no speakers, as requested.
    """
    has_given = any(checked.split for checked in corpus.utterances)
    has_speakers = any(checked.utterance.speaker for checked in corpus.utterances)
    if split_by == "default":
        return "given" if has_given else "speaker" if has_speakers else "utterance"
    missing = {
        "given": "" if has_given else "defines no splits",
        "speaker": "" if has_speakers else "has no speaker labels",
    }
    # An empty corpus is reported later, as one without utterances.
    if corpus.utterances and (problem := missing.get(split_by)):
        raise UsageError(f"--split_by {split_by} is not possible: {name} {problem}. Use --split_by utterance.")
    return split_by


def refuse_without_split(corpus: Corpus) -> None:
    """Move the utterances to which the corpus gives no split to the refused rows."""
    for checked in corpus.utterances:
        if not checked.split:
            path = checked.utterance.audio_filepath
            reason = "its corpus defines splits, but none for it: --split_by makes new splits"
            corpus.refused.append(RefusedRow(checked.file, checked.utterance.row, "no split", reason, path))
    corpus.utterances = [checked for checked in corpus.utterances if checked.split]


def draw(corpus: Corpus, split_by: SplitBy, shares: Shares, seed: int, name: str) -> SplitAssignment:
    """Return the utterances in their splits.

    If the corpus defines train but not valid, valid is drawn from train, and test as well if it is missing.

    Raises:
        DataError: If all splits are to be drawn and there are too few speakers or utterances.
    """
    if split_by != "given":
        return SplitAssignment(_assign_splits(corpus.utterances, split_by, shares, seed, name))
    own_splits = {checked.split for checked in corpus.utterances}
    # A test split of the corpus's own is kept.
    missing_shares = Shares(shares.valid, 0.0 if "test" in own_splits else shares.test)
    training_utterances = [checked for checked in corpus.utterances if checked.split == "train"]
    # Too few training utterances for the missing splits are no error: the corpus's own splits suffice.
    if "valid" in own_splits or not 1 < missing_shares.splits <= len(training_utterances):
        return SplitAssignment(corpus.utterances)
    # By speaker if there are enough, so that no speaker is in two drawn splits.
    has_speakers = len({checked.utterance.speaker for checked in training_utterances} - {""}) >= missing_shares.splits
    unit: SplitBy = "speaker" if has_speakers else "utterance"
    drawn_utterances = _assign_splits(training_utterances, unit, missing_shares, seed, f"The training part of {name}")
    unchanged_utterances = [checked for checked in corpus.utterances if checked.split != "train"]
    parts = tuple(part for part in SPLITS if part in {checked.split for checked in drawn_utterances} - {"train"})
    return SplitAssignment(drawn_utterances + unchanged_utterances, parts, unit)


def _assign_splits(
    utterances: list[CheckedUtterance], unit: SplitBy, shares: Shares, seed: int, name: str
) -> list[CheckedUtterance]:
    """Return the utterances in drawn splits; by speaker, utterances without a speaker label go to training."""
    milliseconds: Counter[str] = Counter()
    for checked in utterances:
        if unit_name := _unit_name(checked, unit):
            # Integers: a sum of floats would depend on the order of rows.
            milliseconds[unit_name] += round(1000 * checked.utterance.duration)
    if len(milliseconds) < shares.splits:
        raise DataError(
            f"{name} has {len(milliseconds)} {unit}s, too few for {shares.splits} splits. Use "
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
        in_split = [checked.utterance for checked in utterances if checked.split == name]
        hours = round(sum(utterance.duration for utterance in in_split) / 3600, 4)
        if in_split:
            yield SplitSummary(name, len(in_split), hours, len({u.speaker for u in in_split if u.speaker}))


# --------------------
# Leaks between splits, which make a score better than it is: common audio, speakers and sentences.


MAX_EXAMPLES = 5
DIGEST = re.compile("[0-9a-f]{32,}")  # a speaker in Common Voice; eight digits identify it in a message


@dataclass(frozen=True)
class Leak:
    """Number of audio files (or spans of one), speakers or sentences in two or more splits; up to five examples."""

    what: str  # a key of the JSON report
    count: int
    examples: tuple[str, ...]


def find_leaks(utterances: list[CheckedUtterance]) -> tuple[Leak, ...]:
    """Return the leaks of audio, speakers and sentences between the splits.

    Raises:
        DataError: If audio can no longer be read.
    """
    with explained(DataError, "Audio that was readable before can no longer be read", "Start again."):
        audio = _make_leak("audio", _find_shared_audio(utterances))
    speakers = _find_shared_names((u.utterance.speaker, u) for u in utterances if u.utterance.speaker)
    return (
        audio,
        _make_leak("speaker", speakers),
        _make_leak("sentence", _find_shared_names((u.sentence, u) for u in utterances)),
    )


def _make_leak(kind: str, descriptions: Iterable[str]) -> Leak:
    listed = list(descriptions)
    return Leak(kind, len(listed), tuple(printable(example) for example in listed[:MAX_EXAMPLES]))


def _find_shared_names(named: Iterable[tuple[str, CheckedUtterance]]) -> Iterator[str]:
    """Yield a description of each name that occurs in two splits, with the first utterance in each."""
    firsts: dict[str, dict[str, CheckedUtterance]] = {}
    for name, utterance in named:
        firsts.setdefault(name, {}).setdefault(utterance.split, utterance)
    for name, by_split in firsts.items():
        if len(by_split) > 1:
            short = f"{name[:8]}…" if DIGEST.fullmatch(name) else name
            yield f"{short}: " + "; ".join(f"{split} ({first.where})" for split, first in sorted(by_split.items()))


def _find_shared_audio(utterances: list[CheckedUtterance]) -> Iterator[str]:
    """Yield a description of each utterance that shares audio with an earlier one in another split."""
    by_recording: dict[AudioSource, list[CheckedUtterance]] = {}
    for checked in utterances:
        utterance = checked.utterance
        recording = AudioSource(utterance.audio_path, utterance.byte_offset, utterance.byte_count)
        by_recording.setdefault(recording, []).append(checked)
    for recordings in _group_by_content(by_recording):
        same_audio = [checked for recording in recordings for checked in by_recording[recording]]
        if len({checked.split for checked in same_audio}) > 1:
            yield from _find_overlaps(same_audio)


def _group_by_content(by_recording: dict[AudioSource, list[CheckedUtterance]]) -> Iterator[list[AudioSource]]:
    """Yield groups of recordings with identical bytes.

    Only recordings of equal size are read, and only if they are in two splits.
    """
    for _, sized in groupby(sorted(by_recording, key=_byte_size), key=_byte_size):
        same_size = list(sized)
        splits = {checked.split for recording in same_size for checked in by_recording[recording]}
        if len(same_size) == 1 or len(splits) == 1:
            yield from ([recording] for recording in same_size)
        else:
            # Equal size in different splits: only now compare the content.
            by_digest: dict[str, list[AudioSource]] = {}
            for recording in same_size:
                by_digest.setdefault(content_digest(recording), []).append(recording)
            yield from by_digest.values()


def _byte_size(recording: AudioSource) -> int:
    return recording.byte_count or os.path.getsize(recording.path)


def _find_overlaps(utterances: list[CheckedUtterance]) -> Iterator[str]:
    # Sweep in order of start: by split and channel, the latest end of all utterances that started before.
    latest_ends: dict[tuple[str, int | None], CheckedUtterance] = {}
    for checked in sorted(utterances, key=lambda utterance: utterance.start):
        channel = checked.utterance.channel
        for (split, other_channel), earlier in latest_ends.items():
            is_shared = channel == other_channel or None in (channel, other_channel)  # None: the mean of all channels
            # Adjacent spans may overlap by a rounding error.
            if split != checked.split and is_shared and earlier.end - checked.start > 0.01:
                yield f"{earlier.where} ({split}) and {checked.where} ({checked.split})"
                break
        latest = latest_ends.get((checked.split, channel))
        if latest is None or latest.end < checked.end:
            latest_ends[checked.split, channel] = checked
