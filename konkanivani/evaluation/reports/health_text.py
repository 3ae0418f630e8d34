"""Health report as lines for a terminal."""

from collections.abc import Iterator

from konkanivani.base.console import count
from konkanivani.data.health.findings import Diagnosis
from konkanivani.data.health.histogram import Histogram
from konkanivani.evaluation.reports.health_view import Section, Table, sections_of

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
    told = "".join(f", {amount:,.5g} {word}" for amount, word in outside if amount)
    return f"{histogram.start:g} {blocks} {histogram.end:g} {unit}{told}"
