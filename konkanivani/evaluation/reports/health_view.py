"""Content of the health report, section by section: the figures, charts and tables that terminal and page share."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from konkanivani.base.console import JOINERS, count, duration_words, short_name
from konkanivani.data.health.characters import Changes, Character, CharacterHealth
from konkanivani.data.health.examples import Listed, Tally
from konkanivani.data.health.findings import Diagnosis
from konkanivani.data.health.health import PartHealth, PartOverlap
from konkanivani.data.health.histogram import Histogram
from konkanivani.data.health.recordings import SoundHealth

MOST_SPEAKERS = 5


@dataclass(frozen=True)
class Fact:
    """A figure with its title and a supplement."""

    title: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class Chart:
    """A histogram, the names of its two axes, and the median if it is to be marked."""

    title: str
    histogram: Histogram
    across: str
    up: str
    median: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows of texts and integers; the page shows a folded table only on demand."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]
    is_folded: bool = False


@dataclass(frozen=True)
class Section:
    """Part of the report: a manifest, the overlap of manifests, or the text of all."""

    title: str
    facts: tuple[Fact, ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]


def sections_of(diagnosis: Diagnosis) -> Iterator[Section]:
    """Yield all sections; findings and verdict are not included, and tables without rows are left out."""
    health = diagnosis.health
    for part in health.parts:
        yield _part(part)
    if health.crossings:
        yield _crossings(health.crossings)
    if health.parts:
        yield _text(health.characters, diagnosis)


def _section(title: str, facts: Iterable[Fact], charts: Iterable[Chart], tables: Iterable[Table]) -> Section:
    return Section(title, tuple(facts), tuple(charts), tuple(table for table in tables if table.rows))


def _part(part: PartHealth) -> Section:
    role = "training" if part.is_training else "validation or test"
    # `_section` drops the lists without rows.
    lists = {
        "Broken rows": part.broken,
        "Utterances that training skips": part.rejected,
        "Transcripts that may not match the audio": part.rates.unusual,
        "Duplicate rows": part.repeated_rows,
        "Duplicate audio": part.repeated_audio,
        "Repeated sentences": part.repeated_sentences,
    }
    if part.sound:
        lists |= {
            "Unreadable recordings": part.sound.unreadable,
            "Clipped recordings": part.sound.clipped,
            "Quiet recordings": part.sound.quiet,
            "Loud recordings": part.sound.loud,
            "Empty recordings": part.sound.mute,
            "Mostly silent recordings": part.sound.silent,
            "Recordings with a DC offset": part.sound.offset,
            "Recordings with a wrong duration in the manifest": part.sound.deviating,
        }
    title = f"{short_name(part.path)}, {role}"
    return _section(title, _facts(part), _charts(part), (_listing(name, found) for name, found in lists.items()))


def _facts(part: PartHealth) -> Iterator[Fact]:
    speakers = part.speakers
    epoch = part.epoch
    yield Fact("utterances", f"{part.utterances:,}", f"{part.usable:,} usable")
    yield Fact("speech", duration_words(part.hours), f"{duration_words(part.usable_hours)} usable")
    most = f"median {duration_words(speakers.median_hours)}; {100 * speakers.largest_share:.0f} % by {speakers.largest}"
    most += f"; {count(speakers.unnamed, 'row')} without a label" if speakers.unnamed else ""
    yield Fact("speakers", f"{speakers.count:,}", most if speakers.count else "no speaker labels")
    yield Fact("sentences", f"{part.sentences:,}", f"different; {part.words:,} words")
    yield Fact("files", _tallied(part.formats))
    if epoch:
        window = f"{epoch.window_size} utterances, {epoch.window_seconds:.0f} s each"
        yield Fact("steps per epoch", f"{epoch.steps:,}", window)
        yield Fact("padding", f"{100 * epoch.padding_share:.1f} %", f"in micro-batches of {epoch.micro_batch}")
    if part.sound:
        yield from _sound_facts(part.sound)


def _sound_facts(sound: SoundHealth) -> Iterator[Fact]:
    yield Fact("recordings decoded", f"{sound.heard}", f"of {sound.asked} sampled")
    if not sound.heard:  # the statistics below are undefined
        return
    yield Fact("sample rates", _tallied(sound.rates, " Hz"))
    yield Fact("channels", _tallied(sound.channels))
    quietest = ", ".join(f"{speaker.name} {speaker.level:.0f}" for speaker in sound.speaker_levels[:MOST_SPEAKERS])
    more = f"; quietest speakers: {quietest}" if len(sound.speaker_levels) > 1 else ""
    yield Fact("level", f"{sound.median_level:.1f} dBFS", f"median{more}")
    ends = f"median {sound.median_leading:.2f} s before, {sound.median_trailing:.2f} s after"
    yield Fact("silence", f"{100 * sound.silence_share:.0f} %", ends)
    yield Fact("clipped", f"{sound.clipped.count}", f"{100 * sound.full_scale_share:.3g} % of samples at full scale")


def _charts(part: PartHealth) -> Iterator[Chart]:
    rates = part.rates
    sound = part.sound
    yield Chart("Duration", part.durations, "seconds", "utterances")
    yield Chart("Hours by duration", part.hours_by_duration, "seconds", "hours")
    yield Chart("Characters per second", rates.characters, "characters/s", "utterances", rates.median)
    yield Chart("Words per second", rates.words, "words/s", "utterances")
    if sound and sound.heard:
        yield Chart("Level", sound.levels, "dBFS", "recordings", sound.median_level)
        yield Chart("Silence", sound.silence, "% of the time", "recordings")


def _listing(title: str, listed: Listed) -> Table:
    # `count` is the total; the number of examples is limited.
    shown = "" if listed.count == len(listed.examples) else f", {len(listed.examples)} shown"
    rows = tuple((example.place, example.detail, example.text) for example in listed.examples)
    return Table(f"{title} ({listed.count:,}{shown})", ("utterance", "what", "transcript"), rows, is_folded=True)


def _crossings(crossings: tuple[PartOverlap, ...]) -> Section:
    columns = ("manifests", "recordings", "speakers", "sentences", "characters only in the first")
    rows = []
    lists = []
    for crossing in crossings:
        first = short_name(crossing.first)
        second = short_name(crossing.second)
        unknown = " ".join(tally.name for tally in crossing.unknown_characters)
        shared = (crossing.audio.count, crossing.speakers, crossing.sentences.count)
        rows.append((f"{second} in {first}", *shared, unknown))
        for kind, listed in (("Recordings", crossing.audio), ("Sentences", crossing.sentences)):
            lists.append(_listing(f"{kind} of {second} that are also in {first}", listed))
    return _section("Overlap of the manifests", (), (), (Table("In both", columns, tuple(rows)), *lists))


def _text(text: CharacterHealth, diagnosis: Diagnosis) -> Section:
    is_less = diagnosis.vocabulary < diagnosis.vocabulary_asked
    asked = f", the maximum for this text (--vocab_size {diagnosis.vocabulary_asked})" if is_less else ""
    tokens = f"{diagnosis.tokenizer_type} tokens{asked}" if diagnosis.vocabulary else "no vocabulary"
    facts = (
        Fact("script", text.script.capitalize() or "none", "of most letters"),
        Fact("characters", f"{text.different:,}", f"{text.letters:,} after normalisation"),
        Fact("vocabulary", f"{diagnosis.vocabulary:,}", tokens),
        Fact("changed by normalisation", count(text.changes.texts, "text"), _changed_words(text.changes)),
    )
    # Show the code points, because the encodings look alike.
    twins = tuple(
        (twin.shape, " or ".join(f"{_code_points(s.codes)} ({s.count:,})" for s in twin.spellings))
        for twin in text.twins
    )
    mixed = tuple((w.word, " and ".join(w.scripts).lower(), w.count, f"row {w.row}") for w in text.mixed_words)
    columns = ("", "code", "name", "times", "noteworthy")
    characters = [(character, _character(character)) for character in text.inventory]
    return _section(
        "Text",
        facts,
        (),
        (
            Table("Noteworthy", columns, tuple(row for character, row in characters if character.marks)),
            Table("Encoded in two ways", ("", "code points (count)"), twins),
            Table(f"Words in two scripts ({text.mixed_word_count:,})", ("word", "scripts", "times", "first"), mixed),
            Table(f"All characters ({text.different:,})", columns, tuple(row for _, row in characters), is_folded=True),
        ),
    )


def _character(character: Character) -> tuple[str | int, ...]:
    sign = chr(character.code)
    if not sign.isprintable() or sign.isspace() or sign in JOINERS:
        sign = ""
    elif "SIGN" in character.name and character.script:
        sign = "\u25cc" + sign  # a combining mark is displayed on a dotted circle
    return sign, _code_points((character.code,)), character.name, character.count, ", ".join(character.marks)


def _changed_words(changes: Changes) -> str:
    parts = (
        (changes.not_composed, "text", "not in NFC"),
        (changes.joiners_removed, "joiner", "removed"),
        (changes.joiners_mapped, "joiner", "mapped to an equivalent encoding"),
        (changes.format_removed, "format character", "removed"),
        (changes.to_space, "mark", "replaced by spaces"),
        (changes.lowered, "letter", "lower-cased"),
    )
    return ", ".join(f"{count(number, noun)} {what}" for number, noun, what in parts if number) or "nothing"


def _code_points(codes: Iterable[int]) -> str:
    return " ".join(f"U+{code:04X}" for code in codes)


def _tallied(counted: tuple[Tally, ...], unit: str = "") -> str:
    if len(counted) == 1:
        return f"{counted[0].name}{unit}"
    return ", ".join(f"{tally.name}{unit} ({tally.count:,})" for tally in counted) or "none"
