"""Report on a corpus: its content, in the terminal and as a page."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from konkanivani.console import JOINERS, count, duration_words, short_name
from konkanivani.corpora.findings import Diagnosis, Finding
from konkanivani.corpora.health import PartHealth, PartOverlap
from konkanivani.corpora.recordings import SoundHealth
from konkanivani.corpora.statistics import Changes, Character, CharacterHealth, Listed, Tally
from konkanivani.scoring.html import Histogram, draw_cells, draw_document, draw_histogram, draw_table, draw_tile, escape

# --------------------
# Content of the health report, section by section: the figures, charts and tables that terminal and page share.


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


def _new_section(title: str, facts: Iterable[Fact], charts: Iterable[Chart], tables: Iterable[Table]) -> Section:
    return Section(title, tuple(facts), tuple(charts), tuple(table for table in tables if table.rows))


def _part(part: PartHealth) -> Section:
    role = "training" if part.is_training else "validation or test"
    # `_new_section` drops the lists without rows.
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
            "Recordings with digital silence": part.sound.gated,
            "Recordings with a limited band": part.sound.narrow,
            "Recordings reduced to one channel": part.sound.mixing,
            "Recordings with a wrong duration in the manifest": part.sound.deviating,
        }
    title = f"{short_name(part.path)}, {role}"
    return _new_section(title, _facts(part), _charts(part), (_listing(name, listed) for name, listed in lists.items()))


def _facts(part: PartHealth) -> Iterator[Fact]:
    speakers = part.speakers
    epoch = part.epoch
    yield Fact("utterances", f"{part.utterances:,}", f"{part.usable:,} usable")
    yield Fact("speech", duration_words(part.hours), f"{duration_words(part.usable_hours)} usable")
    most = f"median {duration_words(speakers.median_hours)}; {100 * speakers.largest_share:.0f} % by {speakers.largest}"
    most += f"; {count(speakers.unnamed, 'row')} without a label" if speakers.unnamed else ""
    yield Fact("speakers", f"{speakers.count:,}", most if speakers.count else "no speaker labels")
    yield Fact("sentences", f"{part.sentences:,}", f"different; {part.words:,} words")
    yield Fact("files", _tally_words(part.formats))
    if epoch:
        window = f"{epoch.window_size} utterances, {epoch.window_seconds:.0f} s each"
        yield Fact("steps per epoch", f"{epoch.steps:,}", window)
        yield Fact("padding", f"{100 * epoch.padding_share:.1f} %", f"in micro-batches of {epoch.micro_batch}")
    if part.sound:
        yield from _sound_facts(part.sound)


def _sound_facts(sound: SoundHealth) -> Iterator[Fact]:
    yield Fact("recordings decoded", f"{sound.decoded}", f"of {sound.asked} sampled")
    if not sound.decoded:  # the statistics below are undefined
        return
    yield Fact("sample rates", _tally_words(sound.rates, " Hz"))
    yield Fact("channels", _tally_words(sound.channels))
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
    if sound and sound.decoded:
        yield Chart("Level", sound.levels, "dBFS", "recordings", sound.median_level)
        yield Chart("Silence", sound.silence, "% of the time", "recordings")


def _listing(title: str, listed: Listed) -> Table:
    # `count` is the total; the number of examples is limited.
    shown = "" if listed.count == len(listed.examples) else f", {len(listed.examples)} shown"
    rows = tuple((example.place, example.detail, example.text) for example in listed.examples)
    return Table(f"{title} ({listed.count:,}{shown})", ("utterance", "what", "transcript"), rows, is_folded=True)


def _crossings(crossings: tuple[PartOverlap, ...]) -> Section:
    columns = ("manifests", "recordings", "speakers", "sentences", "characters missing in the latter")
    rows = []
    lists = []
    for crossing in crossings:
        first = short_name(crossing.first)
        second = short_name(crossing.second)
        unknown = " ".join(tally.name for tally in crossing.unknown_characters)
        unnamed = crossing.unknown_character_count - len(crossing.unknown_characters)
        if unnamed:
            unknown += f" and {unnamed} more"
        shared = (crossing.audio.count, crossing.speakers, crossing.sentences.count)
        rows.append((f"{second} in {first}", *shared, unknown))
        for kind, listed in (("Recordings", crossing.audio), ("Sentences", crossing.sentences)):
            lists.append(_listing(f"{kind} of {second} that are also in {first}", listed))
    return _new_section("Overlap of the manifests", (), (), (Table("In both", columns, tuple(rows)), *lists))


def _text(text: CharacterHealth, diagnosis: Diagnosis) -> Section:
    is_less = diagnosis.vocabulary < diagnosis.vocabulary_asked
    maximum = f", the maximum for this text (--vocab_size {diagnosis.vocabulary_asked})" if is_less else ""
    tokens = f"{diagnosis.tokenizer_type} tokens{maximum}" if diagnosis.vocabulary else "no vocabulary"
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
    return _new_section(
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
    return ", ".join(f"{count(number, noun)} {kind}" for number, noun, kind in parts if number) or "nothing"


def _code_points(codes: Iterable[int]) -> str:
    return " ".join(f"U+{code:04X}" for code in codes)


def _tally_words(counted: tuple[Tally, ...], unit: str = "") -> str:
    if len(counted) == 1:
        return f"{counted[0].name}{unit}"
    return ", ".join(f"{tally.name}{unit} ({tally.count:,})" for tally in counted) or "none"


# --------------------
# Health report as lines for a terminal.


BLOCKS = "·▁▂▃▄▅▆▇█"
WIDTH = 26
MAX_ROWS = 8


def health_lines(diagnosis: Diagnosis) -> str:
    """Return the whole report; its last line is the verdict."""
    lines = [line for section in sections_of(diagnosis) for line in (*_section_lines(section), "")]
    lines.append("Findings" if diagnosis.findings else "No findings")
    for finding in diagnosis.findings:
        remedy = f"\n           {finding.remedy}" if finding.remedy else ""
        lines.append(f"  {finding.severity:8} {finding.sentence}{remedy}")
    return "\n".join([*lines, "", diagnosis.verdict.sentence])


def _section_lines(section: Section) -> Iterator[str]:
    yield section.title
    for fact in section.facts:
        yield f"  {fact.title:<{WIDTH}}{fact.value}" + (f", {fact.more}" if fact.more else "")
    for chart in section.charts:
        median = "" if chart.median is None else f", median {chart.median:.1f}"
        yield f"  {chart.title:<{WIDTH}}{sparkline(chart.histogram, chart.across)}{median}"
    for table in section.tables:
        yield from _table_lines(table)


def _table_lines(table: Table) -> Iterator[str]:
    """Yield the first rows; a number is followed by the name of its column."""
    yield f"  {table.title}"
    for row in table.rows[:MAX_ROWS]:
        cells = (
            # count() restores the plural of the column's name.
            count(cell, column.removesuffix("s")) if isinstance(cell, int) else cell
            for column, cell in zip(table.columns, row, strict=True)
        )
        yield f"    {' · '.join(cell for cell in cells if cell)}"
    if len(table.rows) > MAX_ROWS:
        yield "    …"


def sparkline(histogram: Histogram, unit: str) -> str:
    """Return the bins as block characters between the histogram's ends, followed by the amounts outside."""
    most = max(histogram.amounts, default=0)
    if not most:
        return "nothing"
    # Round up, so that a bin with few values is visible.
    blocks = "".join(BLOCKS[int(-(-8 * amount // most))] for amount in histogram.amounts)
    outside = ((histogram.below, "below"), (histogram.beyond, "beyond"))
    outliers = "".join(f", {amount:,.5g} {word}" for amount, word in outside if amount)
    return f"{histogram.start:g} {blocks} {histogram.end:g} {unit}{outliers}"


# --------------------
# Health report as an HTML page.


STYLE = """
.verdict { border-left: .4rem solid var(--good); background: var(--card); padding: .75rem 1rem; border-radius: .3rem;
  font-weight: 600 } .verdict.no { border-color: var(--error) }
.findings { list-style: none; padding: 0; margin: 0; display: grid; gap: .5rem }
.findings li { background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: .6rem .8rem }
.findings b { display: inline-block; min-width: 4.6rem; font-size: .8rem; text-transform: uppercase;
  letter-spacing: .04em }
.error b { color: var(--error) } .warning b { color: var(--warning) } .note b { color: var(--note) }
td[data-name=""] { font-size: 1.3rem; line-height: 1.3; text-align: center }
.remedy { color: var(--soft); font-size: .9rem; display: block }
"""


def draw_page(diagnosis: Diagnosis) -> str:
    """Return the whole page; all text of the corpus in it is escaped."""
    verdict = diagnosis.verdict
    names = ", ".join(short_name(part.path) for part in diagnosis.health.parts) or "no readable manifest"
    state = "yes" if verdict.can_be_trained else "no"
    body = (
        f'<p class="verdict {state}">{escape(verdict.sentence)}</p>\n{_findings(diagnosis.findings)}\n'
        f"{''.join(map(_draw_section, sections_of(diagnosis)))}"
    )
    return draw_document(f"Health of {names}", body, STYLE)


def _findings(findings: tuple[Finding, ...]) -> str:
    if not findings:
        return "<h2>Findings</h2><p>None.</p>"
    rows = [
        f'<li class="{finding.severity}"><b>{finding.severity}</b> <bdi>{escape(finding.sentence)}</bdi>'
        f'<span class="remedy">{escape(finding.remedy)}</span></li>'
        for finding in findings
    ]
    notes = sum(finding.severity == "note" for finding in findings)
    # Findings are sorted by severity, so the notes are last; [:-0] would be empty.
    first, rest = (f'<ul class="findings">{"".join(some)}</ul>' for some in (rows[: -notes or None], rows[-notes:]))
    folded = f"<details><summary>{count(notes, 'note')} (no action needed)</summary>{rest}</details>" if notes else ""
    return f"<h2>Findings</h2>{first if len(rows) > notes else ''}{folded}"


def _draw_section(section: Section) -> str:
    tiles = "".join(draw_tile(fact.title, fact.value, fact.more) for fact in section.facts)
    charts = "".join(
        draw_histogram(chart.histogram, chart.title, chart.across, chart.up, chart.median) for chart in section.charts
    )
    return (
        f'<section><h2>{escape(section.title)}</h2><dl class="tiles">{tiles}</dl><div class="charts">{charts}</div>'
        f"{''.join(map(_draw_table, section.tables))}</section>\n"
    )


def _draw_table(table: Table) -> str:
    # A column of integers is right-aligned; the first row shows the types of all.
    numbers = {name for name, cell in zip(table.columns, table.rows[0], strict=True) if isinstance(cell, int)}
    rows = (draw_cells(table.columns, row, numbers) for row in table.rows)
    drawn = draw_table(table.columns, rows, numbers, "cards")
    if table.is_folded:
        return f"<details><summary>{escape(table.title)}</summary>{drawn}</details>"
    return f"<h3>{escape(table.title)}</h3>{drawn}"


# --------------------
# The report as JSON.


def health_json(diagnosis: Diagnosis) -> str:
    """Return one line of JSON with all data of the report."""
    # allow_nan=False: NaN is not valid JSON, so raise an error instead of writing it.
    return json.dumps(dataclasses.asdict(diagnosis), ensure_ascii=False, allow_nan=False)
