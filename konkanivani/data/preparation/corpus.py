"""Row-by-row check of a corpus: text and path first, then the header of every audio file."""

import math
import os
import re
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from konkanivani.base.errors import DataError
from konkanivani.data.audio.channels import channel_error
from konkanivani.data.audio.files import SPAN_ROUNDING, AudioHeader, AudioSource, read_header
from konkanivani.data.audio.unicode_paths import existing_path
from konkanivani.data.format_characters import drop_unwritten, find_unwritten
from konkanivani.data.formats.found import FoundUtterance, RefusedRow
from konkanivani.data.text import forbidden_character, forbidden_in_transcript, normalize_text
from konkanivani.data.utterance import Utterance

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


def read_corpus(rows: Iterable[FoundUtterance | RefusedRow], roots: AudioRoots) -> Corpus:
    """Check the rows and return them in order.

    A row is also refused if an earlier one is the same span of the same audio. At most `ROWS_AT_ONCE` unchecked rows
    are in memory.
    """
    corpus = Corpus()
    first_rows: dict[str, str] = {}  # by identity, the place of the first row
    rows = iter(rows)
    with ThreadPoolExecutor(THREADS) as pool:
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            placed = [row if isinstance(row, RefusedRow) else _place(row, roots) for row in chunk]
            files = dict.fromkeys(_file_of(row) for row in placed if isinstance(row, FoundUtterance))
            headers = dict(zip(files, pool.map(_read_header, files), strict=True))  # once per file, not per segment
            for row in placed:
                checked = row if isinstance(row, RefusedRow) else _finish(row, headers[_file_of(row)], roots)
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


def _place(found: FoundUtterance, roots: AudioRoots) -> FoundUtterance | RefusedRow:
    """Return the row with its path resolved and its texts stripped, or refused if text or path are unusable."""
    found = replace(found, text=found.text.strip(), speaker=found.speaker.strip())
    for name, text in (("text", found.text), ("speaker", found.speaker), ("path", str(found.audio))):
        if NOT_UTF8.search(text):
            return found.refused("not UTF-8", f"its {name} is not UTF-8")
        find_forbidden = forbidden_in_transcript if name == "text" else forbidden_character
        unfit = find_forbidden(text) or next(iter(LINE_ENDS.findall(text)), None)
        if unfit:
            return found.refused("control character", f"its {name} contains the character U+{ord(unfit):04X}")
    removed = tuple(find_unwritten(found.text))
    if removed:
        found = replace(found, text=drop_unwritten(found.text).strip(), removed=removed)
    if len(found.text) > MAX_CHARACTERS:
        return found.refused(
            "long transcript", f"its transcript has {len(found.text)} characters: are several rows joined?"
        )
    # A text of punctuation only is empty for the model.
    if not normalize_text(found.text):
        return found.refused("empty transcript", "its transcript is empty")
    try:
        path = Path(existing_path(str(found.audio))).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        return found.refused("missing audio", f"its path cannot be followed: {error}")
    if not path.is_relative_to(roots.inside) and not path.is_relative_to(roots.staged):
        # Propose the smallest folder that contains both the corpus and the file; if it is too high, the file's folder.
        shared = Path(os.path.commonpath((roots.inside, path)))
        root = shlex.quote(str(shared if len(shared.parts) > SHALLOW else path.parent))
        reason = f"its audio is outside {roots.inside}: give --audio_root {root} to allow it"
        return found.refused("outside the corpus", reason)
    return replace(found, audio=path)


def _file_of(found: FoundUtterance) -> AudioSource:
    return AudioSource(str(found.audio), found.byte_offset, found.byte_count)


def _read_header(source: AudioSource) -> AudioHeader | str:
    try:
        return read_header(source)
    except DataError as error:
        return str(error)


def _finish(found: FoundUtterance, header: AudioHeader | str, roots: AudioRoots) -> CheckedUtterance | RefusedRow:
    if isinstance(header, str):
        kind = "unusable audio" if os.path.lexists(found.audio) else "missing audio"
        return found.refused(kind, header)
    # A span may still be within the audio that exists.
    if header.missing and found.seconds is None:
        return found.refused("cut short", f"its audio is {header.missing:.1f} s shorter than its header states")
    reason = _span_reason(found, header.seconds)
    if reason:
        return found.refused("span", reason)
    told = found.file_seconds
    # "not <=" instead of ">", so that NaN is refused.
    if told is not None and not abs(told - header.seconds) <= max(0.5, 0.1 * told):
        return found.refused(
            "other duration", f"its table states {told:.2f} s, its audio file lasts {header.seconds:.2f} s"
        )
    left = header.seconds - found.start
    # A span may exceed its file by SPAN_ROUNDING.
    seconds = left if found.seconds is None else min(found.seconds, left)
    if len(found.text) > SPARE_CHARACTERS + MAX_CHARACTER_RATE * seconds:
        reason = f"its transcript has {len(found.text)} characters, more than {seconds:.2f} s of speech have"
        return found.refused("long transcript", f"{reason}: does it belong to this audio?")
    # A label of a mono file, such as A in Kaldi's reco2file_and_channel, has no effect.
    channel = None if found.is_channel_label and header.channels == 1 else found.channel
    absent = channel_error(channel, header.channels)
    if absent:
        return found.refused("channel", absent)
    # The path in the manifest is relative to its folder, but absolute if they have only the root in common.
    is_staged = found.audio.is_relative_to(roots.staged)
    audio = roots.published / found.audio.relative_to(roots.staged) if is_staged else found.audio
    is_far = os.path.commonpath((audio, roots.output)) == os.path.sep
    is_span = found.start > 0 or found.seconds is not None
    utterance = Utterance(
        audio_filepath=str(audio) if is_far else os.path.relpath(audio, roots.output),
        audio_path=str(found.audio),
        duration=seconds,
        text=found.text,
        speaker=found.speaker,
        offset=found.start if is_span else None,
        byte_offset=found.byte_offset,
        byte_count=found.byte_count,
        channel=channel,
        row=found.row,
    )
    root = roots.staged if is_staged else roots.inside
    span = f"@{found.start:.3f}" + ("" if found.seconds is None else f"+{found.seconds:.3f}")
    span += "" if channel is None else f":ch{channel}"
    identity = f"{found.audio.relative_to(root)}#{found.byte_offset}{span}"
    return CheckedUtterance(utterance, found.file, identity, found.split, normalize_text(found.text), found.removed)


def _span_reason(found: FoundUtterance, file_seconds: float) -> str:
    """Return the defect of the row's span; "" if there is none."""
    seconds = found.seconds
    if not math.isfinite(found.start) or found.start < 0 or not (seconds is None or 0 < seconds < math.inf):
        length = "the end" if seconds is None else f"{seconds:g} s"
        return f"it has an invalid range: from {found.start:g} s, for {length}"
    end = found.start + (seconds or 0.0)
    if end > file_seconds + SPAN_ROUNDING or found.start >= file_seconds:
        return f"it ends at {end:.2f} s, its audio file at {file_seconds:.2f} s"
    return ""
