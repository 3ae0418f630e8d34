"""Score report as an HTML page."""

import math
from collections.abc import Sequence

from konkanivani.base.console import count, duration_words, show_text
from konkanivani.evaluation.metrics import Edit, EditKind
from konkanivani.evaluation.reports.charts import draw_bar
from konkanivani.evaluation.reports.html import draw_cells, draw_document, draw_table, draw_tile, escape
from konkanivani.evaluation.reports.score_text import (
    COLUMNS,
    SIGNS,
    comparison_sentences,
    interval_words,
    percent,
    rate_words,
    slice_cells,
    slice_name,
    utterance_words,
)
from konkanivani.evaluation.score import AlignedUtterance, ScoreReport, Slice

MAX_OPEN_ROWS = 15  # rows of a table that are shown unfolded
MAX_WORDS = 1_000  # of an aligned utterance
NUMBERS = set(COLUMNS) | {"count"}
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
        _table("speaker", "By speaker", report.speakers),
        _table("duration", "By duration", report.durations),
        _table("pattern", "By pattern", report.patterns),
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


def _table(name: str, title: str, slices: Sequence[Slice]) -> str:
    """Return the slices as rows with bars, folded from the sixteenth on; "" if there are none."""
    if not slices:
        return ""
    # All bars of a table have the same scale, which leaves space for the intervals.
    ends = [end for part in slices for end in (part.rates.wer, part.interval.high) if math.isfinite(end)]
    names = (name, *COLUMNS, "")
    rows = [_row(names, part, max(ends, default=0.0)) for part in slices]
    shown = draw_table(names, rows[:MAX_OPEN_ROWS], NUMBERS, "cards")
    if len(rows) > MAX_OPEN_ROWS:
        rest = draw_table(names, rows[MAX_OPEN_ROWS:], NUMBERS, "cards")
        shown += f"<details><summary>{len(rows) - MAX_OPEN_ROWS:,} more</summary>{rest}</details>"
    return f"<section><h2>{title}</h2>{shown}</section>"


def _row(names: tuple[str, ...], part: Slice, longest: float) -> str:
    cells = draw_cells(names[:-1], (slice_name(part), *slice_cells(part)), NUMBERS)
    if not math.isfinite(part.rates.wer):
        return f"{cells}<td></td>"
    said = f"WER {rate_words(part.rates.wer, part.interval)}"
    return f"{cells}<td>{draw_bar(part.rates.wer, part.interval.low, part.interval.high, longest, said)}</td>"


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
    words = "".join(map(_word, utterance.edits[:MAX_WORDS]))
    rest = len(utterance.edits) - MAX_WORDS
    more = f'<p class="soft">… and {count(rest, "word")} more</p>' if rest > 0 else ""
    name = show_text(utterance.text.id)
    said = utterance_words(utterance)
    return (
        f'<article class="aligned"><header><bdi>{escape(name)}</bdi>: <bdi>{escape(said)}</bdi></header>'
        f'<div class="words">{words}</div>{more}</article>'
    )


def _word(edit: Edit) -> str:
    """Return the column of an aligned word: reference, hypothesis and sign; a missing word leaves its cell empty."""
    # bdi isolates the direction of right-to-left text.
    said, heard = (f"<bdi>{escape(show_text(word, 60))}</bdi>" for word in (edit.reference, edit.hypothesis))
    said = f"<del>{said}</del>" if edit.kind == "deletion" else f"<i>{said}</i>"
    heard = f"<ins>{heard}</ins>" if edit.kind == "insertion" else f"<i>{heard}</i>"
    return f'<span class="{edit.kind}">{said}{heard}<b>{SIGNS[edit.kind]}</b></span>'
