"""The health report as a page."""

from collections.abc import Iterator

from konkanivani.base.console import count, duration_words, short_name
from konkanivani.data.health.characters import JOINERS, Character, CharacterHealth
from konkanivani.data.health.examples import Example, Listed, Tally
from konkanivani.data.health.findings import Diagnosis, Finding
from konkanivani.data.health.health import Crossing, PartHealth
from konkanivani.data.health.recordings import SoundHealth
from konkanivani.evaluation.reports.charts import draw_histogram
from konkanivani.evaluation.reports.health_text import changed_words, code_points, speaker_levels, vocabulary_words
from konkanivani.evaluation.reports.html import draw_cells, draw_document, draw_table, draw_tile, escape

STYLE = """
.verdict { border-left: .4rem solid var(--good); background: var(--card); padding: .75rem 1rem; border-radius: .3rem;
  font-weight: 600 } .verdict.no { border-color: var(--error) }
.findings { list-style: none; padding: 0; margin: 0; display: grid; gap: .5rem }
.findings li { background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: .6rem .8rem }
.findings b { display: inline-block; min-width: 4.6rem; font-size: .8rem; text-transform: uppercase;
  letter-spacing: .04em }
.error b { color: var(--error) } .warning b { color: var(--warning) } .note b { color: var(--note) }
td.sign { font-size: 1.3rem; line-height: 1.3; text-align: center }
.remedy { color: var(--soft); font-size: .9rem; display: block }
"""
NUMBERS = {"count", "recordings", "speakers", "sentences", "first row"}  # columns that stand right


def draw_page(diagnosis: Diagnosis) -> str:
    """The whole page; every text of the corpus in it is escaped."""
    health, verdict = diagnosis.health, diagnosis.verdict
    names = ", ".join(short_name(part.path) for part in health.parts) or "no manifest that can be read"
    state = "yes" if verdict.can_be_trained else "no"
    parts = "".join(_part(part) for part in health.parts)
    body = (
        f'<p class="verdict {state}">{escape(verdict.sentence)}</p>\n'
        f"{_findings(diagnosis.findings)}\n{parts}{_crossings(health.crossings)}"
        f"{_text(health.characters, diagnosis) if health.parts else ''}"
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
    first, rest = (f'<ul class="findings">{"".join(some)}</ul>' for some in (rows[: -notes or None], rows[-notes:]))
    folded = f"<details><summary>{count(notes, 'note')}, good to know</summary>{rest}</details>" if notes else ""
    return f"<h2>Findings</h2>{first if len(rows) > notes else ''}{folded}"


def _part(part: PartHealth) -> str:
    role = "trained on" if part.is_training else "validated or tested on"
    lists = (
        (part.broken, "Rows that are broken"),
        (part.rejected, "Utterances that cannot be used"),
        (part.rates.unusual, "Transcripts that may not be what is said"),
        (part.repeated_rows, "Rows listed again"),
        (part.repeated_audio, "Audio that is there already"),
        (part.repeated_sentences, "Sentences said again"),
        *(_sound_lists(part.sound) if part.sound else ()),
    )
    listed = "".join(_listing(title, rows) for rows, title in lists)
    return (
        f'<section><h2>{escape(short_name(part.path))} <span class="soft">{role}</span></h2>'
        f'<dl class="tiles">{"".join(_tiles(part))}</dl><div class="charts">{"".join(_charts(part))}</div>'
        f"{listed}</section>\n"
    )


def _tiles(part: PartHealth) -> Iterator[str]:
    speakers, sound, epoch = part.speakers, part.sound, part.epoch
    yield draw_tile("utterances", f"{part.utterances:,}", f"{part.usable:,} can be used")
    yield draw_tile("speech", duration_words(part.hours), f"{duration_words(part.usable_hours)} can be used")
    most = f"median {duration_words(speakers.median_hours)}; {100 * speakers.largest_share:.0f} % is {speakers.largest}"
    yield draw_tile("speakers", f"{speakers.count:,}", most if speakers.count else "no row names one")
    yield draw_tile("sentences", f"{part.sentences:,}", f"different ones; {part.words:,} words")
    yield draw_tile("files", _tallied(part.formats))
    if epoch:
        yield draw_tile(
            "steps an epoch", f"{epoch.steps:,}", f"{epoch.window_size} utterances, {epoch.window_seconds:.0f} s each"
        )
        yield draw_tile("padding", f"{100 * epoch.padding_share:.1f} %", f"in micro-batches of {epoch.micro_batch}")
    if sound and sound.heard:
        yield draw_tile("sample rates", _tallied(sound.rates, " Hz"), f"of {sound.heard} recordings decoded")
        yield draw_tile("channels", _tallied(sound.channels))
        quietest = f"; quietest speakers: {speaker_levels(sound)}" if len(sound.speaker_levels) > 1 else ""
        yield draw_tile("level", f"{sound.median_level:.1f} dBFS", f"median{quietest}")
        ends = f"median {sound.median_leading:.2f} s before, {sound.median_trailing:.2f} s after"
        yield draw_tile("silence", f"{100 * sound.silence_share:.0f} %", ends)
        yield draw_tile(
            "clipped", f"{sound.clipped.count} of {sound.heard}", f"{100 * sound.full_scale_share:.3g} % of samples"
        )


def _charts(part: PartHealth) -> Iterator[str]:
    yield draw_histogram(part.durations, "Duration", "seconds", "utterances")
    yield draw_histogram(part.hours_by_duration, "Hours by duration", "seconds", "hours")
    rates = part.rates
    yield draw_histogram(rates.characters, "Characters a second", "characters/s", "utterances", rates.median)
    yield draw_histogram(rates.words, "Words a second", "words/s", "utterances")
    if part.sound and part.sound.heard:
        yield draw_histogram(part.sound.levels, "Level", "dBFS", "recordings", part.sound.median_level)
        yield draw_histogram(part.sound.silence, "Silence", "% of the time", "recordings")


def _sound_lists(sound: SoundHealth) -> tuple[tuple[Listed, str], ...]:
    return (
        (sound.unreadable, "Recordings that cannot be read"),
        (sound.clipped, "Clipped recordings"),
        (sound.quiet, "Quiet recordings"),
        (sound.loud, "Loud recordings"),
        (sound.mute, "Empty recordings"),
        (sound.silent, "Recordings that are mostly silence"),
        (sound.offset, "Recordings with a DC offset"),
        (sound.deviating, "Recordings whose duration is not the manifest's"),
    )


def _listing(title: str, listed: Listed) -> str:
    """What is listed, folded; nothing where nothing is."""
    if not listed.count:
        return ""
    shown = "" if listed.count == len(listed.examples) else f", {len(listed.examples)} shown"
    names = ("row", "utterance", "what", "transcript")
    rows = [_example(names, example) for example in listed.examples]
    table = draw_table(names, rows, NUMBERS, "cards")
    return f"<details><summary>{escape(title)} ({listed.count:,}{shown})</summary>{table}</details>"


def _example(names: tuple[str, ...], example: Example) -> str:
    cells = (example.row, example.id, example.detail, example.text)
    return draw_cells(names, cells)


def _crossings(crossings: tuple[Crossing, ...]) -> str:
    if not crossings:
        return ""
    names = ("what is in both", "recordings", "speakers", "sentences", "characters only in the first")
    rows = [_crossing(names, crossing) for crossing in crossings]
    lists = "".join(
        _listing(f"{title} of {short_name(c.second)} that are in {short_name(c.first)}", listed)
        for c in crossings
        for title, listed in (("Recordings", c.audio), ("Sentences", c.sentences))
    )
    return f"<section><h2>Between the manifests</h2>{draw_table(names, rows, NUMBERS, 'cards')}{lists}</section>\n"


def _crossing(names: tuple[str, ...], crossing: Crossing) -> str:
    both = f"{short_name(crossing.second)} in {short_name(crossing.first)}"
    unknown = " ".join(tally.name for tally in crossing.unknown_characters) or "none"
    cells = (both, crossing.audio.count, crossing.speakers, crossing.sentences.count, unknown)
    return draw_cells(names, cells, NUMBERS)


def _text(text: CharacterHealth, diagnosis: Diagnosis) -> str:
    tiles = (
        draw_tile("script", text.script.capitalize() or "none", "of most letters"),
        draw_tile("characters", f"{text.different:,}", f"{text.letters:,} after normalisation"),
        draw_tile("vocabulary", f"{diagnosis.vocabulary:,}", vocabulary_words(diagnosis)),
        draw_tile("texts that normalisation changes", f"{text.changes.texts:,}", changed_words(text)),
    )
    marked = [character for character in text.inventory if character.marks]
    names = ("", "code", "name", "count", "noteworthy")
    worth = f"<h3>Noteworthy</h3>{draw_table(names, map(_character, marked), NUMBERS)}" if marked else ""
    whole = draw_table(names, map(_character, text.inventory), NUMBERS)
    return (
        f'<section><h2>Text</h2><dl class="tiles">{"".join(tiles)}</dl>{worth}{_twins(text)}{_mixed(text)}'
        f"<details><summary>All characters ({text.different:,})</summary>{whole}</details></section>\n"
    )


def _character(character: Character) -> str:
    sign = chr(character.code)
    if not sign.isprintable() or sign.isspace() or sign in JOINERS:
        sign = ""
    elif "SIGN" in character.name and character.script:
        sign = "\u25cc" + sign  # a mark stands on a dotted circle
    return (
        f'<td class="sign"><bdi>{escape(sign)}</bdi></td><td>U+{character.code:04X}</td>'
        f"<td>{escape(character.name)}</td>"
        f'<td class="number">{character.count:,}</td><td>{escape(", ".join(character.marks))}</td>'
    )


def _twins(text: CharacterHealth) -> str:
    rows = [
        f'<td class="sign"><bdi>{escape(twin.shape)}</bdi></td>'
        f"<td>{'<br>'.join(f'{code_points(s.codes)} ({s.count:,})' for s in twin.spellings)}</td>"
        for twin in text.twins
    ]
    return f"<h3>Written in two ways</h3>{draw_table(('', 'code points (count)'), rows)}" if rows else ""


def _mixed(text: CharacterHealth) -> str:
    rows = [
        f"<td><bdi>{escape(word.word)}</bdi></td><td>{escape(' and '.join(word.scripts).lower())}</td>"
        f'<td class="number">{word.count:,}</td><td class="number">{word.row}</td>'
        for word in text.mixed_words
    ]
    title = f"<h3>Words of two scripts ({text.mixed_word_count:,})</h3>"
    return title + draw_table(("word", "scripts", "count", "first row"), rows, NUMBERS) if rows else ""


def _tallied(counted: tuple[Tally, ...], unit: str = "") -> str:
    if len(counted) == 1:
        return f"{counted[0].name}{unit}"
    return ", ".join(f"{tally.name}{unit} ({tally.count:,})" for tally in counted) or "none"
