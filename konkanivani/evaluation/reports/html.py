"""A report as a self-contained HTML page: no network, no scripts, light and dark mode, any width."""

import html
from collections.abc import Collection, Iterable
from pathlib import Path

from konkanivani.base.errors import ResourceError, explained
from konkanivani.base.files import atomic_replace

STYLE = """
:root { color-scheme: light dark; --ground: #faf9f6; --card: #ffffff; --ink: #1c1d20; --soft: #5b5f66;
  --line: #e1dfd8; --bar: #2c7a96; --mark: #e8590c;
  --error: #b3261e; --warning: #8a5a00; --note: #3f6078; --good: #2a6b3c }
@media (prefers-color-scheme: dark) { :root { --ground: #14161a; --card: #1c1f25; --ink: #e8e6e1; --soft: #a2a7af;
  --line: #333842; --bar: #6cb6d2; --mark: #e8590c;
  --error: #ff8a80; --warning: #f2c14e; --note: #9cc3dd; --good: #7fd197 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.25rem 1rem 4rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, "Noto Sans", "Noto Sans Devanagari", sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .75rem } h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem } p { margin: .4rem 0 }
.soft, .outside { color: var(--soft); font-size: .9rem }
.tiles, .charts { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); margin: 0 }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); margin-top: .75rem }
.tiles div, figure { background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: .6rem .8rem;
  margin: 0 } dt { color: var(--soft); font-size: .85rem } dd { margin: 0; font-size: 1.05rem; font-weight: 600 }
dd small { display: block; font-weight: 400; font-size: .85rem; color: var(--soft) }
figcaption { display: flex; justify-content: space-between; gap: .75rem; font-size: .9rem; font-weight: 600 }
.outside { font-weight: 400; font-size: .8rem; text-align: right }
svg { display: block; width: 100%; height: auto } svg text { fill: var(--soft); font-size: 11px }
.bar { fill: var(--bar) } .grid, .tick { stroke: var(--line); stroke-width: 1 } .mark { stroke: var(--mark);
  stroke-width: 2; stroke-dasharray: 4 3 } .none { color: var(--soft) }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .3rem; background: var(--card) }
table { overflow-wrap: break-word; border-collapse: collapse; width: 100%; font-size: .9rem }
th, td { text-align: left; padding: .35rem .6rem;
  border-bottom: 1px solid var(--line); vertical-align: top } tr:last-child td { border-bottom: 0 }
th { color: var(--soft); font-weight: 600; white-space: nowrap } td.number, th.number { text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap }
details { margin: .6rem 0 } summary { cursor: pointer; font-weight: 600; padding: .25rem 0 }
@media (max-width: 34rem) { th, td { padding: .35rem; font-size: .85rem }
  .cards thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px;
  overflow: hidden } .cards tr { display: block; padding: .5rem .6rem; border-bottom: 1px solid var(--line) }
  .cards td { display: block; border: 0; padding: 0; text-align: left }
  .cards td::before { content: attr(data-name) " "; color: var(--soft); font-size: .8rem } }
"""
NUMBER = ' class="number"'
PAGE_START = "<!doctype html>"


def draw_document(title: str, body: str, style: str = "") -> str:
    """Return the whole page with `body`, which is HTML; `style` has the rules of this report only."""
    return (
        f'{PAGE_START}\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body><main>\n"
        f"<h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def escape(text: object) -> str:
    return html.escape(str(text))


def draw_tile(title: str, value: str, more: str = "") -> str:
    """Return a value with its title above it, and a supplement in small print."""
    more = more.replace(" %", "\u00a0%")  # no line break between a number and its unit
    small = f"<small>{escape(more)}</small>" if more else ""
    return f"<div><dt>{escape(title)}</dt><dd>{escape(value)}{small}</dd></div>"


def draw_cells(names: Iterable[str], cells: Iterable[object], numbers: Collection[str] = ()) -> str:
    """Return the cells of a row, each with its column's name for narrow screens; `numbers` are right-aligned."""
    # bdi isolates right-to-left text; a narrow screen shows data-name in front of the cell.
    return "".join(
        f'<td data-name="{escape(n)}"{NUMBER if n in numbers else ""}><bdi>{escape(c)}</bdi></td>'
        for n, c in zip(names, cells, strict=True)
    )


def draw_table(names: Iterable[str], rows: Iterable[str], numbers: Collection[str] = (), kind: str = "") -> str:
    """Return a table with rows of HTML cells; with the kind `cards`, a row becomes a card on narrow screens."""
    kinds = ((name, NUMBER if name in numbers else "") for name in names)
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in kinds)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def write_page(path: str, page: str) -> None:
    """Write the page to a temporary file and rename it to `path`."""
    with explained(ResourceError, f"--html {path} cannot be written", "Choose another path."):
        with atomic_replace(Path(path)) as partial:
            # A file name that is not UTF-8 has lone surrogates, which cannot be encoded.
            partial.write_text(page, encoding="utf-8", errors="backslashreplace")
