"""Reports of scores: text, JSON and a page."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from pathlib import Path

from konkanivani.console import count, display_width, duration_words, padded, show_text, table_lines
from konkanivani.scoring.html import draw_bar, draw_cells, draw_document, draw_table, draw_tile, escape
from konkanivani.scoring.metrics import Edit, EditCounts, EditKind, ErrorRates, Interval
from konkanivani.scoring.score import AlignedUtterance, Comparison, ConditionScore, ScoreReport, Slice, TextPairs

# --------------------
# Score report as lines for a terminal.


# Limits for a terminal; --json and --html list all slices.
MAX_SLICES = 10
MAX_CONFUSIONS = 8
MAX_TEXT_WORDS = 200
LINE_WIDTH = 100
GAP = "***"  # in place of a missing word, as in sclite
SIGNS: dict[EditKind, str] = {"hit": "", "substitution": "S", "deletion": "D", "insertion": "I"}
COLUMNS = ("utterances", "words", "WER %", "95 %", "CER %", "S", "D", "I")
CONDITION_COLUMNS = ("WER %", "95 %", "CER %", "× unchanged")  # the last is a ratio of WERs


def score_lines(report: ScoreReport) -> str:
    return "\n".join(_lines(report))


def _lines(report: ScoreReport) -> Iterator[str]:
    speech = "" if report.seconds is None else f", {duration_words(report.seconds / 3600)} of speech"
    yield f"{report.title}: {count(report.utterances, 'utterance')}{speech}"
    yield ""
    rates = report.rates
    yield f"  WER  {rate_words(rates.wer, report.wer_interval)}: {error_words(rates.words, 'word')}"
    yield f"  CER  {rate_words(rates.cer, report.cer_interval)}: {error_words(rates.characters, 'character')}"
    yield ""
    yield from (f"  {name:<12} {show_text(value)}" for name, value in report.facts)
    yield f"  {'intervals':<12} 95 %, {report.interval_words}"
    yield from (f"  {'note':<12} {note}" for note in report.notes)
    if report.comparison:
        yield ""
        yield from comparison_sentences(report.comparison)
    for name, slices in (("speaker", report.speakers), ("duration", report.durations), ("pattern", report.patterns)):
        yield from _table_lines(name, slices)
    yield from _condition_lines(report.conditions)
    yield from _confusion_lines(report)
    if report.worst:
        yield from ("", "Worst utterances, by word errors (S substituted, D deleted, I inserted)")
        for utterance in report.worst:
            yield from _aligned_lines(utterance)


def percent(share: float) -> str:
    """Format a fraction as in "12.3 %"; "undefined" if it is not finite."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "undefined"


def rate_words(rate: float, interval: Interval) -> str:
    """Format a rate with its interval, as in "12.3 % (95 %: 10.1 to 14.8)"."""
    return percent(rate) + (f" (95 %: {interval_words(interval)})" if math.isfinite(interval.low) else "")


def interval_words(interval: Interval) -> str:
    """Format an interval in percent, as in "10.1 to 14.8"; "" if it is undefined."""
    return f"{100 * interval.low:.1f} to {100 * interval.high:.1f}" if math.isfinite(interval.low) else ""


def error_words(edits: EditCounts, noun: str) -> str:
    """Return the number of errors of each kind in words."""
    kinds = f"{edits.substitutions:,} substituted, {edits.deletions:,} deleted, {edits.insertions:,} inserted"
    return f"{count(edits.errors, 'error')} in {count(edits.length, noun)}: {kinds}"


def comparison_sentences(compared: Comparison) -> Iterator[str]:
    """Yield sentences on which of two systems is better, by how much, and with which confidence."""
    own_wer = compared.rates.wer
    other_wer = compared.other.wer
    difference = compared.difference
    both = f"{show_text(compared.name)} on {count(compared.utterances, 'common utterance')}"
    yield f"Compared with {both}: WER {percent(own_wer)} (this system), {percent(other_wer)} (other system)."
    if not math.isfinite(difference):  # the references have no words
        return
    if not math.isfinite(compared.interval.low):
        # Without variation there is no interval (see `percentiles`).
        yield f"Difference {100 * difference:+.1f} points, the same in every resample."
        return
    low = 100 * compared.interval.low
    high = 100 * compared.interval.high
    yield (
        f"Difference {100 * difference:+.1f} points (95 %: {low:+.1f} to {high:+.1f}); this system has fewer "
        f"word errors in {percent(compared.fewer)} of the resamples, more in {percent(compared.more)}."
    )
    if low <= 0 <= high:
        yield "The interval contains 0: the difference is not significant on these utterances."


def slice_cells(part: Slice) -> tuple[str, ...]:
    """Return the cells of a slice's row, in the order of COLUMNS."""
    edits = part.rates.words
    shares = (part.rates.wer, part.rates.cer)
    wer, cer = (f"{100 * share:.1f}" if math.isfinite(share) else "-" for share in shares)
    counts = (f"{number:,}" for number in (edits.substitutions, edits.deletions, edits.insertions))
    return f"{part.utterances:,}", f"{edits.length:,}", wer, interval_words(part.interval) or "-", cer, *counts


def slice_name(part: Slice) -> str:
    """Return the name of a slice in printable form."""
    return show_text(part.name, 40) or "(no label)"


def _table_lines(name: str, slices: Sequence[Slice]) -> Iterator[str]:
    """Yield the first slices as rows; nothing if there are none."""
    if not slices:
        return
    rows = [(name, *COLUMNS), *((slice_name(part), *slice_cells(part)) for part in slices[:MAX_SLICES])]
    yield ""
    yield from (f"  {line}" for line in table_lines(rows))
    if len(slices) > MAX_SLICES:
        yield f"  … the {MAX_SLICES} with the highest WER of {len(slices):,}; --json and --html list all"


def _condition_lines(conditions: Sequence[ConditionScore]) -> Iterator[str]:
    """Yield a table of all recording conditions; nothing if there are none."""
    if conditions:
        rows: list[tuple[str, ...]] = [("condition", *CONDITION_COLUMNS)]
        rows += [(condition.part.name, *condition_cells(condition)) for condition in conditions]
        yield ""
        yield from (f"  {line}" for line in table_lines(rows))


def condition_cells(condition: ConditionScore) -> tuple[str, ...]:
    """Return the cells of a condition's row, in the order of CONDITION_COLUMNS."""
    part = condition.part
    wer, cer = (f"{100 * share:.1f}" if math.isfinite(share) else "-" for share in (part.rates.wer, part.rates.cer))
    ratio = f"{condition.ratio:.2f}" if math.isfinite(condition.ratio) else "-"
    return wer, interval_words(part.interval) or "-", cer, ratio


def _confusion_lines(report: ScoreReport) -> Iterator[str]:
    kinds = (("substituted", report.substitutions), ("deleted", report.deletions), ("inserted", report.insertions))
    if any(confusions for _, confusions in kinds):
        yield from ("", "Most frequent word errors")
    for title, confusions in kinds:
        shown = []
        for edit, times in confusions[:MAX_CONFUSIONS]:
            words = (show_text(word, 40) for word in (edit.reference, edit.hypothesis) if word)
            shown.append(f"{' → '.join(words)} ({times:,})")
        if shown:
            yield f"  {title:<12} {', '.join(shown)}"


def utterance_words(utterance: AlignedUtterance) -> str:
    """Return the heading of an aligned utterance: number of errors, speaker and duration."""
    text = utterance.text
    edits = utterance.rates.words
    description = f"{count(edits.errors, 'error')} in {count(edits.length, 'word')}"
    details = [f"speaker {show_text(text.speaker, 40)}"] if text.speaker else []
    details += [f"{text.seconds:.1f} s"] if text.seconds is not None else []
    return ", ".join([description, *details])


def _aligned_lines(utterance: AlignedUtterance) -> Iterator[str]:
    """Yield reference, hypothesis and marks below each other, wrapped to the line width."""
    yield f"  {show_text(utterance.text.id)}: {utterance_words(utterance)}"
    edits = utterance.edits[:MAX_TEXT_WORDS]
    columns = [(show_text(e.reference, 60) or GAP, show_text(e.hypothesis, 60) or GAP, SIGNS[e.kind]) for e in edits]
    for stretch in _split_columns(columns):
        for title, row in zip(("reference", "hypothesis", ""), zip(*stretch, strict=True), strict=True):
            # Columns in a terminal: combining marks have no width, some characters have two columns.
            widths = [max(map(display_width, column)) for column in stretch]
            words = " ".join(padded(word, width) for word, width in zip(row, widths, strict=True))
            yield f"    {title:<11}{words}".rstrip()
    if len(utterance.edits) > MAX_TEXT_WORDS:
        yield f"    … and {count(len(utterance.edits) - MAX_TEXT_WORDS, 'word')} more"


def _split_columns(columns: list[tuple[str, str, str]]) -> Iterator[list[tuple[str, str, str]]]:
    """Yield the columns in lines of at most LINE_WIDTH; a wider column has its own line."""
    stretch: list[tuple[str, str, str]] = []
    width = 0
    for column in columns:
        column_width = 1 + max(map(display_width, column))  # with the space to the next column
        if stretch and width + column_width > LINE_WIDTH:
            yield stretch
            stretch = []
            width = 0
        stretch.append(column)
        width += column_width
    if stretch:
        yield stretch


# --------------------
# Score report as one line of JSON.


def score_json(pairs: TextPairs, report: ScoreReport, output: Path | None) -> str:
    """Return the origin and the numbers of the report as one line of JSON.

    Numbers are rounded to six decimal places; those that are not finite become null.
    """
    fields = asdict(pairs.source) | {"normalize": pairs.normalizer} | score_fields(report)
    fields |= {"hypotheses": str(output)} if output else {}
    # Round on parsing, which reaches nested values, too; parse_constant receives NaN and Infinity.
    exact = json.dumps(fields)
    rounded = json.loads(exact, parse_float=lambda number: round(float(number), 6), parse_constant=lambda _: None)
    return json.dumps(rounded, ensure_ascii=False, allow_nan=False)


def score_fields(report: ScoreReport) -> dict[str, object]:
    """Return the numbers of the report; rates are fractions."""
    edits = report.rates
    fields: dict[str, object] = {"wer": edits.wer, "cer": edits.cer, "utterances": report.utterances}
    fields |= count_fields(edits) | _kind_fields(edits)
    fields |= {"wer_interval": astuple(report.wer_interval), "cer_interval": astuple(report.cer_interval)}
    fields |= {"interval_unit": report.unit}
    for part in report.patterns:
        fields |= {f"wer_{part.name}_patterns": part.rates.wer, f"cer_{part.name}_patterns": part.rates.cer}
        fields |= {f"words_{part.name}_patterns": part.rates.words.length}
    fields |= {"speakers": [_slice_fields("speaker", part) for part in report.speakers]}
    fields |= {"durations": [_slice_fields("duration", part) for part in report.durations]}
    if report.conditions:
        fields |= {"conditions": [_condition_fields(condition) for condition in report.conditions]}
    if report.comparison:
        fields |= {"comparison": _comparison_fields(report.comparison)}
    return fields


def count_fields(rates: ErrorRates) -> dict[str, int]:
    """Return the errors and lengths from which the two rates are computed."""
    words = rates.words
    characters = rates.characters
    counts = {"word_errors": words.errors, "words": words.length}
    return counts | {"character_errors": characters.errors, "characters": characters.length}


def _kind_fields(rates: ErrorRates) -> dict[str, int]:
    kinds = ("substitutions", "deletions", "insertions")
    sides = (("word", rates.words), ("character", rates.characters))
    return {f"{name}_{kind}": getattr(edits, kind) for name, edits in sides for kind in kinds}


def _slice_fields(name: str, part: Slice) -> dict[str, object]:
    fields = {name: part.name, "wer": part.rates.wer, "wer_interval": astuple(part.interval), "cer": part.rates.cer}
    fields |= {"utterances": part.utterances, "seconds": part.seconds}
    return fields | count_fields(part.rates) | _kind_fields(part.rates)


def _condition_fields(condition: ConditionScore) -> dict[str, object]:
    part = condition.part
    return {
        "condition": condition.name,
        "description": part.name,
        "wer": part.rates.wer,
        "wer_interval": astuple(part.interval),
        "cer": part.rates.cer,
        "ratio": condition.ratio,
        **count_fields(part.rates),
    }


def _comparison_fields(compared: Comparison) -> dict[str, object]:
    return {
        "other": compared.name,
        "utterances": compared.utterances,
        "wer": compared.rates.wer,
        "other_wer": compared.other.wer,
        "difference": compared.difference,
        "difference_interval": astuple(compared.interval),
        "share_fewer_errors": compared.fewer,
        "share_more_errors": compared.more,
    }


# --------------------
# Score report as an HTML page.


MAX_OPEN_ROWS = 15  # rows of a table that are shown unfolded
MAX_PAGE_WORDS = 1_000  # of an aligned utterance
NUMBERS = {*COLUMNS, *CONDITION_COLUMNS, "count"}
STYLE = """
:root { --of-substitution: #8a5a00; --of-deletion: #b3261e; --of-insertion: #1f5fa8 }
@media (prefers-color-scheme: dark) { :root { --of-substitution: #f2c14e; --of-deletion: #ff8a80;
  --of-insertion: #8fc1ff } }
.tiles { grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)) }
.tiles div:nth-child(-n + 2) dd { font-size: 1.6rem; line-height: 1.3 }
.tiles div:nth-child(-n + 2) small { font-size: .95rem }
svg.inline { width: 10rem; height: 1rem; margin-top: .2rem }
.range { stroke: var(--ink); stroke-width: 1.5 }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0 }
.facts dd { font-size: .95rem; font-weight: 400; min-width: 0 }
.notes { border-left: .4rem solid var(--warning); background: var(--card); padding: .6rem .8rem; border-radius: .3rem }
.lists { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr)) }
.aligned { background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: .6rem .8rem;
  margin: 0 0 .6rem } .aligned header { font-size: .85rem; color: var(--soft) }
.substitution { --tint: var(--of-substitution) } .deletion { --tint: var(--of-deletion) }
.insertion { --tint: var(--of-insertion) } .hit { color: var(--soft) }
.words { display: flex; flex-wrap: wrap; gap: .35rem .3rem; margin-top: .4rem }
.words span { display: grid; grid-template-rows: 1.7rem 1.7rem 1.1rem; text-align: center; padding: .1rem .3rem;
  max-width: 100%; overflow: hidden; border: 1px solid var(--tint, transparent); border-radius: .25rem }
.words i { font-style: normal } .words del, .words ins { text-decoration: none }
.words .deletion { border-style: dashed } .words .insertion { border-style: dotted } .words b { font-size: .75rem }
.words del, .words ins, .words b, .key { color: var(--tint) }
.key { display: inline-block; border: 1px solid; border-radius: .25rem; padding: 0 .4rem }
@media (max-width: 34rem) { .facts { grid-template-columns: 1fr } .facts dd { margin-bottom: .3rem }
  .cards td { display: inline-block; margin-right: .7rem } .cards td:first-child { display: block; font-weight: 600 } }
"""


def draw_score_page(report: ScoreReport) -> str:
    """Return the whole page; all text in it is escaped."""
    sentences = comparison_sentences(report.comparison) if report.comparison else ()
    compared = [f"<p><bdi>{escape(sentence)}</bdi></p>" for sentence in sentences]
    body = [
        _headline(report),
        _facts(report),
        *(f'<p class="notes"><bdi>{escape(note)}</bdi></p>' for note in report.notes),
        f"<section><h2>Compared</h2>{''.join(compared)}</section>" if compared else "",
        _draw_slices("speaker", "By speaker", report.speakers),
        _draw_slices("duration", "By duration", report.durations),
        _draw_slices("pattern", "By pattern", report.patterns),
        _draw_conditions(report.conditions),
        _confusions(report),
        _worst(report.worst),
    ]
    return draw_document(f"Score of {show_text(report.title)}", "\n".join(part for part in body if part), STYLE)


def _headline(report: ScoreReport) -> str:
    sides = (
        ("WER", "word", report.rates.words, report.wer_interval),
        ("CER", "character", report.rates.characters, report.cer_interval),
    )
    rates = []
    errors = []
    for name, noun, edits, interval in sides:
        rates.append(draw_tile(name, percent(edits.rate), f"95 %: {interval_words(interval) or 'not known'}"))
        kinds = f"{edits.substitutions:,} substituted, {edits.deletions:,} deleted, {edits.insertions:,} inserted"
        errors.append(draw_tile(f"{noun} errors", f"{edits.errors:,}", f"in {count(edits.length, noun)}: {kinds}"))
    speech = "" if report.seconds is None else f"{duration_words(report.seconds / 3600)} of speech"
    utterances = draw_tile("utterances", f"{report.utterances:,}", speech)
    return f'<dl class="tiles">{"".join([*rates, *errors, utterances])}</dl>'


def _facts(report: ScoreReport) -> str:
    facts = [(name, show_text(value)) for name, value in report.facts]
    facts.append(("intervals", f"95 %, {report.interval_words}"))
    rows = "".join(f"<dt>{escape(name)}</dt><dd><bdi>{escape(value)}</bdi></dd>" for name, value in facts)
    return f'<dl class="facts">{rows}</dl>'


def _draw_slices(name: str, title: str, slices: Sequence[Slice]) -> str:
    """Return the slices as rows with bars, folded from the sixteenth on; "" if there are none."""
    if not slices:
        return ""
    names = (name, *COLUMNS, "")
    rows = [_row(names, part, _longest_bar(slices)) for part in slices]
    shown = draw_table(names, rows[:MAX_OPEN_ROWS], NUMBERS, "cards")
    if len(rows) > MAX_OPEN_ROWS:
        rest = draw_table(names, rows[MAX_OPEN_ROWS:], NUMBERS, "cards")
        shown += f"<details><summary>{len(rows) - MAX_OPEN_ROWS:,} more</summary>{rest}</details>"
    return f"<section><h2>{title}</h2>{shown}</section>"


def _draw_conditions(conditions: Sequence[ConditionScore]) -> str:
    """Return the recording conditions as rows with bars; "" if there are none."""
    if not conditions:
        return ""
    parts = [condition.part for condition in conditions]
    longest = _longest_bar(parts)
    names = ("condition", *CONDITION_COLUMNS, "")
    rows = []
    for condition in conditions:
        cells = draw_cells(names[:-1], (condition.part.name, *condition_cells(condition)), NUMBERS)
        rows.append(cells + _bar_cell(condition.part, longest))
    drawn = draw_table(names, rows, NUMBERS, "cards")
    return f"<section><h2>By recording condition</h2><p>Simulated on the same utterances.</p>{drawn}</section>"


def _longest_bar(parts: Sequence[Slice]) -> float:
    """Return the rate at full width: all bars of a table have one scale, which leaves space for the intervals."""
    ends = [end for part in parts for end in (part.rates.wer, part.interval.high) if math.isfinite(end)]
    return max(ends, default=0.0)


def _bar_cell(part: Slice, longest: float) -> str:
    if not math.isfinite(part.rates.wer):
        return "<td></td>"
    label = f"WER {rate_words(part.rates.wer, part.interval)}"
    return f"<td>{draw_bar(part.rates.wer, part.interval.low, part.interval.high, longest, label)}</td>"


def _row(names: tuple[str, ...], part: Slice, longest: float) -> str:
    cells = draw_cells(names[:-1], (slice_name(part), *slice_cells(part)), NUMBERS)
    return cells + _bar_cell(part, longest)


def _confusions(report: ScoreReport) -> str:
    kinds = (
        ("Substituted", ("reference", "hypothesis", "count"), report.substitutions),
        ("Deleted", ("reference", "count"), report.deletions),
        ("Inserted", ("hypothesis", "count"), report.insertions),
    )
    tables = ""
    for title, names, confusions in kinds:
        pairs = [((edit.reference, edit.hypothesis), times) for edit, times in confusions]
        # A deletion or insertion has one empty word, and its table one column less.
        cells = [(*(show_text(word, 60) for word in words if word), f"{times:,}") for words, times in pairs]
        rows = [draw_cells(names, row, NUMBERS) for row in cells]
        tables += f"<div><h3>{title}</h3>{draw_table(names, rows, NUMBERS)}</div>" if rows else ""
    return f'<section><h2>Most frequent word errors</h2><div class="lists">{tables}</div></section>' if tables else ""


def _worst(worst: Sequence[AlignedUtterance]) -> str:
    if not worst:
        return ""
    keys: dict[EditKind, str] = {"substitution": "S substituted", "deletion": "D deleted: only in the reference"}
    keys["insertion"] = "I inserted: only in the hypothesis"
    key = " ".join(f'<span class="key {kind}">{words}</span>' for kind, words in keys.items())
    aligned = "".join(map(_aligned, worst))
    return (
        "<section><h2>Worst utterances</h2><p>Sorted by word errors. Reference above, hypothesis below. "
        f"{key}</p>{aligned}</section>"
    )


def _aligned(utterance: AlignedUtterance) -> str:
    words = "".join(map(_word, utterance.edits[:MAX_PAGE_WORDS]))
    rest = len(utterance.edits) - MAX_PAGE_WORDS
    more = f'<p class="soft">… and {count(rest, "word")} more</p>' if rest > 0 else ""
    name = show_text(utterance.text.id)
    label = utterance_words(utterance)
    return (
        f'<article class="aligned"><header><bdi>{escape(name)}</bdi>: <bdi>{escape(label)}</bdi></header>'
        f'<div class="words">{words}</div>{more}</article>'
    )


def _word(edit: Edit) -> str:
    """Return the column of an aligned word: reference, hypothesis and sign; a missing word leaves its cell empty."""
    # bdi isolates the direction of right-to-left text.
    reference, hypothesis = (f"<bdi>{escape(show_text(word, 60))}</bdi>" for word in (edit.reference, edit.hypothesis))
    reference = f"<del>{reference}</del>" if edit.kind == "deletion" else f"<i>{reference}</i>"
    hypothesis = f"<ins>{hypothesis}</ins>" if edit.kind == "insertion" else f"<i>{hypothesis}</i>"
    return f'<span class="{edit.kind}">{reference}{hypothesis}<b>{SIGNS[edit.kind]}</b></span>'
