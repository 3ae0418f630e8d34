"""Health report as an HTML page."""

from konkanivani.base.console import count, short_name
from konkanivani.data.health.findings import Diagnosis, Finding
from konkanivani.evaluation.reports.charts import draw_histogram
from konkanivani.evaluation.reports.health_view import Section, Table, sections_of
from konkanivani.evaluation.reports.html import draw_cells, draw_document, draw_table, draw_tile, escape

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
        f"{''.join(map(_section, sections_of(diagnosis)))}"
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


def _section(section: Section) -> str:
    tiles = "".join(draw_tile(fact.title, fact.value, fact.more) for fact in section.facts)
    charts = "".join(
        draw_histogram(chart.histogram, chart.title, chart.across, chart.up, chart.median) for chart in section.charts
    )
    return (
        f'<section><h2>{escape(section.title)}</h2><dl class="tiles">{tiles}</dl><div class="charts">{charts}</div>'
        f"{''.join(map(_table, section.tables))}</section>\n"
    )


def _table(table: Table) -> str:
    # A column of integers is right-aligned; the first row shows the types of all.
    numbers = {name for name, cell in zip(table.columns, table.rows[0], strict=True) if isinstance(cell, int)}
    rows = (draw_cells(table.columns, row, numbers) for row in table.rows)
    drawn = draw_table(table.columns, rows, numbers, "cards")
    if table.is_folded:
        return f"<details><summary>{escape(table.title)}</summary>{drawn}</details>"
    return f"<h3>{escape(table.title)}</h3>{drawn}"
