"""Score report as lines for a terminal."""

import math
from collections.abc import Iterator, Sequence

from konkanivani.base.console import count, display_width, duration_words, padded, show_text, table_lines
from konkanivani.evaluation.bootstrap import Interval
from konkanivani.evaluation.metrics import EditCounts, EditKind
from konkanivani.evaluation.score import AlignedUtterance, Comparison, ScoreReport, Slice

# Limits for a terminal; --json and --html list all slices.
MAX_SLICES = 10
MAX_CONFUSIONS = 8
MAX_WORDS = 200
LINE_WIDTH = 100
GAP = "***"  # in place of a missing word, as in sclite
SIGNS: dict[EditKind, str] = {"hit": "", "substitution": "S", "deletion": "D", "insertion": "I"}
COLUMNS = ("utterances", "words", "WER %", "95 %", "CER %", "S", "D", "I")


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
        yield from _table(name, slices)
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
    ours = compared.rates.wer
    theirs = compared.other.wer
    difference = compared.difference
    both = f"{show_text(compared.name)} on {count(compared.utterances, 'common utterance')}"
    yield f"Compared with {both}: WER {percent(ours)} (this system), {percent(theirs)} (other system)."
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


def _table(name: str, slices: Sequence[Slice]) -> Iterator[str]:
    """Yield the first slices as rows; nothing if there are none."""
    if not slices:
        return
    rows = [(name, *COLUMNS), *((slice_name(part), *slice_cells(part)) for part in slices[:MAX_SLICES])]
    yield ""
    yield from (f"  {line}" for line in table_lines(rows))
    if len(slices) > MAX_SLICES:
        yield f"  … the {MAX_SLICES} with the highest WER of {len(slices):,}; --json and --html list all"


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
    said = f"{count(edits.errors, 'error')} in {count(edits.length, 'word')}"
    more = [f"speaker {show_text(text.speaker, 40)}"] if text.speaker else []
    more += [f"{text.seconds:.1f} s"] if text.seconds is not None else []
    return ", ".join([said, *more])


def _aligned_lines(utterance: AlignedUtterance) -> Iterator[str]:
    """Yield reference, hypothesis and marks below each other, wrapped to the line width."""
    yield f"  {show_text(utterance.text.id)}: {utterance_words(utterance)}"
    edits = utterance.edits[:MAX_WORDS]
    columns = [(show_text(e.reference, 60) or GAP, show_text(e.hypothesis, 60) or GAP, SIGNS[e.kind]) for e in edits]
    for stretch in _stretches(columns):
        for title, row in zip(("reference", "hypothesis", ""), zip(*stretch, strict=True), strict=True):
            # Columns in a terminal: combining marks have no width, some characters have two columns.
            widths = [max(map(display_width, column)) for column in stretch]
            words = " ".join(padded(word, width) for word, width in zip(row, widths, strict=True))
            yield f"    {title:<11}{words}".rstrip()
    if len(utterance.edits) > MAX_WORDS:
        yield f"    … and {count(len(utterance.edits) - MAX_WORDS, 'word')} more"


def _stretches(columns: list[tuple[str, str, str]]) -> Iterator[list[tuple[str, str, str]]]:
    """Yield the columns in lines of at most LINE_WIDTH; a wider column has its own line."""
    stretch: list[tuple[str, str, str]] = []
    width = 0
    for column in columns:
        taken = 1 + max(map(display_width, column))  # with the space to the next column
        if stretch and width + taken > LINE_WIDTH:
            yield stretch
            stretch = []
            width = 0
        stretch.append(column)
        width += taken
    if stretch:
        yield stretch
