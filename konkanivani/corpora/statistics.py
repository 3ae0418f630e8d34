"""Statistics of a corpus: characters of the transcripts, sound levels, and examples of utterances.

The script of a letter is the first word of its Unicode name (`DEVANAGARI LETTER KA`), so no table of scripts is needed.

Levels are in dBFS: 20 log10 of the root mean square, with 0 for a full-scale square wave (a full-scale sine is -3).
"""

import re
import sys
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from konkanivani.console import JOINERS, is_invisible, show_text
from konkanivani.data.audio.channels import choose_channel
from konkanivani.data.audio.files import read_header, read_samples
from konkanivani.data.audio.waveform import FRAME_SECONDS, silent_frames
from konkanivani.data.index import Utterance
from konkanivani.data.text import ZWJ, count_mapped_joiners, normalize_text
from konkanivani.lengths import SAMPLE_RATE

# --------------------
# Inventory of the characters in raw transcripts, with their counts, Unicode names and noteworthy properties.


RARE = 3  # a character with a lower count is rare
MAX_MIXED_WORDS = 10_000  # distinct words kept while counting; a corpus with more is broken throughout
MAX_LISTED = 1_000
# First words of the names of marks and modifiers that are used with letters of any script.
COMMON = {"COMBINING", "MODIFIER", "VEDIC", "VARIATION", "SUPERSCRIPT", "SUBSCRIPT", "FEMININE", "MASCULINE", "MICRO"}


@dataclass(frozen=True)
class Character:
    """A character of the raw transcripts; `marks` lists its noteworthy properties."""

    code: int
    name: str
    count: int
    script: str
    marks: tuple[str, ...]


@dataclass(frozen=True)
class Spelling:
    """One of several canonically equivalent code point sequences, and its count."""

    codes: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class SpellingVariants:
    """A character that the raw text encodes in several ways: its NFC form and all its encodings."""

    shape: str
    spellings: tuple[Spelling, ...]


@dataclass(frozen=True)
class MixedWord:
    """A word with letters of two or more scripts, and the row in which it was first seen."""

    word: str
    scripts: tuple[str, ...]
    count: int
    row: int


@dataclass(frozen=True)
class Changes:
    """Effect of `normalize_text` on the raw transcripts: the first two fields count texts, the others characters.

    A joiner is mapped if it is part of a sequence with an equivalent encoding (data/text.py), else removed.
    """

    texts: int
    not_composed: int
    joiners_removed: int
    joiners_mapped: int
    format_removed: int
    to_space: int
    lowered: int
    digits: int


@dataclass(frozen=True)
class CharacterHealth:
    """Character inventory, most frequent first; `different` and `letters` are totals, `inventory` has at most 1,000."""

    script: str
    different: int
    letters: int
    inventory: tuple[Character, ...]
    twins: tuple[SpellingVariants, ...]
    mixed_words: tuple[MixedWord, ...]
    mixed_word_count: int
    changes: Changes


@dataclass
class CharacterCount:
    """Running counts over transcripts; memory grows with the number of distinct characters, not of texts."""

    raw: Counter[str] = field(default_factory=Counter)
    normalized: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    first_row: dict[str, int] = field(default_factory=dict)
    texts: int = 0
    changed: int = 0
    not_composed: int = 0
    joiners_mapped: int = 0

    def add(self, raw: str, normalized: str, row: int) -> None:
        """Count a transcript, both as its manifest contains it and as it is trained on."""
        self.raw.update(raw)
        self.normalized.update(normalized)
        self.texts += 1
        self.changed += raw != normalized
        self.joiners_mapped += count_mapped_joiners(raw)
        self.not_composed += not unicodedata.is_normalized("NFC", raw)
        # Decomposed characters, such as a letter followed by a combining mark.
        self.pairs.update(_composition()[1].findall(raw))
        # Almost all texts have one script; only the others are examined word by word.
        if len({script_of(character) for character in set(raw)} - {""}) > 1:
            for word in raw.split():
                is_kept = word in self.mixed or len(self.mixed) < MAX_MIXED_WORDS
                if is_kept and len(scripts_of(word)) > 1:
                    self.mixed[word] += 1
                    self.first_row.setdefault(word, row)

    def health(self) -> CharacterHealth:
        """Return the inventory of all counted transcripts."""
        scripts: Counter[str] = Counter()
        for character, count in self.raw.items():
            scripts[script_of(character)] += count
        del scripts[""]
        majority = scripts.most_common(1)[0][0] if scripts else ""
        # Ties in code point order, so that the report is reproducible.
        listed = sorted(self.raw.items(), key=lambda pair: (-pair[1], pair[0]))
        words = self.mixed.most_common(20)
        return CharacterHealth(
            script=majority,
            different=len(listed),
            letters=len(set(self.normalized) - {" "}),
            inventory=tuple(
                _describe(character, count, self._count_mapped(character), majority)
                for character, count in listed[:MAX_LISTED]
            ),
            twins=self._spelling_variants(),
            mixed_words=tuple(
                MixedWord(show_text(w, 60), tuple(sorted(scripts_of(w))), n, self.first_row[w]) for w, n in words
            ),
            mixed_word_count=self.mixed.total(),
            changes=self._changes(),
        )

    def _count_mapped(self, character: str) -> int:
        """Return the number of occurrences of a character that are mapped; only a ZWJ can be."""
        return self.joiners_mapped if character == ZWJ else 0

    def _spelling_variants(self) -> tuple[SpellingVariants, ...]:
        """Return every character that the raw text encodes in more than one way, most frequent first."""
        variants: dict[str, list[Spelling]] = {}
        composable, _ = _composition()
        for form, count in [*self.raw.items(), *self.pairs.items()]:
            shape = unicodedata.normalize("NFC", form)
            if shape in composable:
                variants.setdefault(shape, []).append(Spelling(tuple(map(ord, form)), count))
        twins = [
            SpellingVariants(shape, tuple(sorted(spellings, key=lambda spelling: (-spelling.count, spelling.codes))))
            for shape, spellings in variants.items()
            if len(spellings) > 1
        ]
        return tuple(sorted(twins, key=lambda pair: -sum(spelling.count for spelling in pair.spellings)))

    def _changes(self) -> Changes:
        sums: Counter[str] = Counter()
        for character, count in self.raw.items():
            sums[_treatment(character)] += count
        return Changes(
            texts=self.changed,
            not_composed=self.not_composed,
            joiners_removed=sums["joiner"] - self.joiners_mapped,
            joiners_mapped=self.joiners_mapped,
            format_removed=sums["format"],
            to_space=sums["space"],
            lowered=sums["lowered"],
            digits=sum(n for c, n in self.raw.items() if unicodedata.category(c) == "Nd"),
        )


@cache
def script_of(character: str) -> str:
    """Return the script of a letter or mark, such as `DEVANAGARI`; "" for other characters and marks of any script."""
    if unicodedata.category(character)[0] not in "LM":
        return ""
    # A name may start with two scripts: KATAKANA-HIRAGANA PROLONGED SOUND MARK.
    name = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return "" if name in COMMON else name


def scripts_of(word: str) -> set[str]:
    return {script_of(character) for character in word} - {""}


def _describe(character: str, count: int, mapped: int, majority: str) -> Character:
    """Return the character with its marks; `mapped` of its `count` become part of an equivalent encoding."""
    script = script_of(character)
    fate = _treatment(character)
    category = unicodedata.category(character)
    kind = {"Cc": "CONTROL", "Co": "PRIVATE USE", "Cn": "UNASSIGNED"}.get(category, "UNNAMED")
    marks = {
        "foreign script": script not in ("", majority),
        "joiner": character in JOINERS,
        "invisible": is_invisible(character),
        "digit": category == "Nd",
        "mapped": mapped > 0,
        "removed": fate in ("joiner", "format") and count > mapped,
        "becomes a space": fate == "space",
        # Only characters that remain in the training text can be too rare to be learnt.
        "rare": count < RARE and fate in ("kept", "lowered") and character != " ",
    }
    noted = tuple(mark for mark, holds in marks.items() if holds)
    return Character(ord(character), unicodedata.name(character, kind), count, script, noted)


@cache
def _treatment(character: str) -> Literal["kept", "joiner", "format", "space", "lowered"]:
    if character in JOINERS:
        return "joiner"
    if character == " ":
        return "kept"
    # normalize_text strips a blank, so a space is handled before.
    normal = normalize_text(character)
    if not normal:
        return "format" if unicodedata.category(character) == "Cf" else "space"
    # Composition by NFC alone is not a change of case.
    return "lowered" if normal != unicodedata.normalize("NFC", character) else "kept"


@cache
def _composition() -> tuple[frozenset[str], re.Pattern[str]]:
    """Return the NFC forms with more than one encoding, and a pattern for the encodings of two characters in a text.

    The tables come from Python's own Unicode database, which takes a third of a second; therefore not at import.
    """
    shapes: set[str] = set()
    seconds: set[str] = set()
    for character in map(chr, range(sys.maxunicode + 1)):
        parts = unicodedata.decomposition(character).split(" ")
        # "<compat>" and the like are compatibility decompositions, which NFC leaves unchanged.
        if parts[0] and not parts[0].startswith("<"):
            shapes.add(unicodedata.normalize("NFC", character))
            seconds.update(chr(int(part, 16)) for part in parts[1:])
    return frozenset(shapes), re.compile(f".[{re.escape(''.join(sorted(seconds)))}]", re.DOTALL)


# --------------------
# Measurements of a recording's audio: level, clipping, silence, DC offset, and its duration.


FULL_SCALE = 32_767 / 32_768  # the largest positive value of 16 bits; float samples beyond 1 are at full scale, too
FLOOR = -120.0
MAX_SECONDS = 600.0  # decoded per file
SPECTRUM_SAMPLES = 1024
TELEPHONE_BAND = (300.0, 3400.0)  # Hz
BANDS = (4000.0, 5500.0)  # Hz, of sample rates of 8 and 11 kHz
NO_SOUND_SHARE = 1e-5  # of the power in the telephone band, per Hz


@dataclass(frozen=True)
class SoundLevels:
    """Measurements of an utterance's audio: seconds, dBFS, shares of the samples or of the time.

    `file_seconds` is from the file's header; None if the utterance is a span of the file. `band` is the frequency in Hz
    above which there is no sound, infinite without such a limit; `mixing` says why the channels are not averaged.
    """

    rate: int
    channels: int
    seconds: float
    file_seconds: float | None
    level: float
    full_scale_share: float
    clipped_runs: int
    leading_silence: float
    trailing_silence: float
    silence_share: float
    offset: float
    digital_silence_share: float
    band: float
    mixing: str


def measure_levels(utterance: Utterance) -> SoundLevels:
    """Return the measurements of an utterance, from at most its first ten minutes.

    Raises:
        DataError: If the audio cannot be read.
    """
    source = utterance.source
    file_seconds = None
    if source.start is None:
        # Decode the whole file, whatever duration its row states: the difference is a finding.
        source, file_seconds = replace(source, seconds=None), read_header(source).seconds
    samples, rate = read_samples(source, MAX_SECONDS)
    channel, mixing = choose_channel(samples)
    mono = samples.mean(axis=1, dtype=np.float64) if channel is None else samples[:, channel].astype(np.float64)
    silent = silent_frames(mono, rate)
    speech = np.flatnonzero(~silent)
    # An utterance without speech counts as leading silence.
    first, last = (speech[0], speech[-1] + 1) if len(speech) else (len(silent), len(silent))
    return SoundLevels(
        rate=rate,
        channels=samples.shape[1],
        seconds=len(samples) / rate,
        file_seconds=file_seconds,
        # The standard deviation is the root mean square without the DC offset.
        level=decibels(float(mono.std())),
        full_scale_share=float((np.abs(samples) >= FULL_SCALE).mean()),
        clipped_runs=sum(clipped_runs(channel) for channel in samples.T),
        leading_silence=float(first * FRAME_SECONDS),
        trailing_silence=float((len(silent) - last) * FRAME_SECONDS),
        silence_share=float(silent.mean()),
        offset=float(mono.mean()),
        digital_silence_share=digital_silence(mono, rate),
        band=band_limit(mono, rate),
        mixing=mixing,
    )


def digital_silence(mono: np.ndarray, rate: int) -> float:
    """Return the share of 10 ms frames of samples (S,) without any change, as noise gates and decoders write them."""
    size = max(2, round(rate * FRAME_SECONDS))
    frames = mono[: len(mono) // size * size].reshape(-1, size)
    return float((np.ptp(frames, axis=1) == 0).mean()) if len(frames) else 0.0


def band_limit(mono: np.ndarray, rate: int) -> float:
    """Return the lowest of BANDS above which samples (S,) have no sound; infinity if there is none.

    Sound above the limit is at least 50 dB weaker, per Hz, than in the telephone band.
    """
    count = len(mono) // SPECTRUM_SAMPLES
    frames = mono[: count * SPECTRUM_SAMPLES].reshape(count, SPECTRUM_SAMPLES)
    if not count:
        return np.inf
    power = (np.abs(np.fft.rfft(frames * np.hanning(SPECTRUM_SAMPLES))) ** 2).mean(axis=0)
    hertz = np.fft.rfftfreq(SPECTRUM_SAMPLES, 1 / rate)
    voice = power[(hertz >= TELEPHONE_BAND[0]) & (hertz <= TELEPHONE_BAND[1])]
    for band in BANDS:
        # Up to 8 kHz, since training resamples to 16 kHz. Resamplers' filters pass a little up to a quarter above.
        above = power[(hertz > 1.25 * band) & (hertz < 0.95 * min(rate / 2, SAMPLE_RATE / 2))]
        if len(above) and len(voice) and above.mean() < NO_SOUND_SHARE * voice.mean():
            return band
    return np.inf


def decibels(amplitude: float) -> float:
    """Return an amplitude in dBFS, at least -120."""
    return max(FLOOR, 20 * float(np.log10(max(amplitude, 1e-9))))


def clipped_runs(samples: np.ndarray) -> int:
    """Return the number of runs of three or more consecutive samples at full scale with the same sign."""
    side = np.sign(samples) * (np.abs(samples) >= FULL_SCALE)
    same = (side[1:] == side[:-1]) & (side[1:] != 0)
    three = same[1:] & same[:-1]
    # A run is counted at its first triple.
    return int(three[:1].sum() + (three[1:] & ~three[:-1]).sum())


# --------------------
# Example utterances of a report, each with its problem, and named counts.


MAX_EXAMPLES = 20


@dataclass(frozen=True)
class ExampleRow:
    """An utterance in a report: its row in the manifest, its id and text in printable form, and its problem."""

    row: int
    id: str
    text: str
    detail: str

    @property
    def place(self) -> str:
        """Return the location for the user; a broken row may name no audio."""
        return f"row {self.row}, {self.id}" if self.id else f"row {self.row}"


@dataclass(frozen=True)
class Listed:
    """A total count, and the first or the worst utterances as examples."""

    count: int = 0
    examples: tuple[ExampleRow, ...] = ()


@dataclass(frozen=True)
class Tally:
    """A name and the number of its occurrences."""

    name: str
    count: int


def example(utterance: Utterance, detail: str) -> ExampleRow:
    """Return the utterance in printable form, with its problem."""
    # Control characters of a corpus must not reach the terminal.
    return ExampleRow(utterance.row, show_text(utterance.id), show_text(utterance.text), show_text(detail, 300))


def tallies(counts: Counter[str] | Counter[int]) -> tuple[Tally, ...]:
    """Return the most frequent entries in descending order."""
    return tuple(Tally(str(name), count) for name, count in counts.most_common(MAX_EXAMPLES))
