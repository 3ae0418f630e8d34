"""Self-contained HTML pages with charts."""

import html
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from konkanivani.errors import ResourceError, explained
from konkanivani.files import atomic_replace

# --------------------
# A report as a self-contained HTML page: no network, no scripts, light and dark mode, any width.


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


# --------------------
# Histograms with round bin edges; distant outliers are counted but not drawn.


MIN_BINS = 6
MAX_BINS = 24
ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # times a power of ten


@dataclass(frozen=True)
class Histogram:
    """Amounts per bin: `amounts[i]` is in [start + i * width, start + (i + 1) * width), the last bin includes its end.

    `below` and `beyond` are the amounts outside all bins. An amount is a number of values or a sum of their weights.
    """

    start: float
    width: float
    amounts: tuple[float, ...]
    below: float
    beyond: float

    @property
    def end(self) -> float:
        return self.start + self.width * len(self.amounts)

    def edge(self, number: int) -> float:
        return round(self.start + number * self.width, 9)


def build_histogram(values: np.ndarray, weights: np.ndarray | None = None, finest: float = 0.0) -> Histogram:
    """Return the histogram of the finite values.

    The bins span the values without the outer 0.5 % on each side, or all values if that is not much wider.
    No bin is narrower than `finest`, because smaller differences mean nothing.
    """
    finite = np.isfinite(values)
    values = values[finite]
    weights = None if weights is None else weights[finite]
    if not len(values):
        return Histogram(0.0, 1.0, (), 0.0, 0.0)
    start, width, count = _bins(values, finest)
    # A value on an edge belongs to the bin above, whatever the last bit of the division is; a value at the end belongs
    # to the last bin.
    exact = (values - start) / width
    bin_numbers = np.floor(exact + 1e-9)
    bin_numbers[(bin_numbers == count) & (exact < count + 1e-9)] = count - 1
    # Index 0 collects the values below, the last index those beyond.
    sums = np.bincount(np.clip(bin_numbers, -1, count).astype(np.int64) + 1, weights, minlength=count + 2)
    return Histogram(start, width, tuple(sums[1:-1].tolist()), float(sums[0]), float(sums[-1]))


def round_step(span: float, most: int) -> float:
    """Return the smallest round number such that `most` of them cover `span`."""
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    # The tolerance absorbs rounding errors: 0.30000000000000004 / 3 gives 0.1, not 0.2.
    return next(step * power for step in ROUND_STEPS if step * power >= rough * (1 - 1e-9))


def _bins(values: np.ndarray, finest: float) -> tuple[float, float, int]:
    """Return the start, width and number of the bins."""
    low, high = (float(value) for value in np.quantile(values, [0.005, 0.995]))
    # A tail of less than 30 % of the range is drawn.
    if values.max() - high < 0.3 * (high - low):
        high = float(values.max())
    if low - values.min() < 0.3 * (high - low):
        low = float(values.min())
    # Start at zero if that leaves less than 40 % of the axis empty.
    if 0 <= low < 0.4 * high:
        low = 0.0
    span = high - low if high - low > 1e-9 * max(1.0, abs(high)) else max(abs(high) * 0.1, 0.1)
    # Rice's rule: twice the cube root of the number of values; more bins would show noise.
    target_count = min(MAX_BINS, max(MIN_BINS, round(2 * len(values) ** (1 / 3))))
    width = max(round_step(span, target_count - 1), finest)
    first = math.floor(low / width + 1e-9)
    count = max(1, math.ceil(high / width - 1e-9) - first)
    if count == 1:  # a single bar needs an empty bin next to it to be recognisable
        first, count = (first - 1, 3) if first else (0, 2)
    return first * width, width, count


# --------------------
# Charts as inline SVG that inherit the colours of the page, for light and dark mode, wide and narrow screens.


WIDTH = 360
HEIGHT = 172
LEFT = 40
RIGHT = 348
TOP = 10
BOTTOM = 140
MAX_X_LABELS = 6
MAX_Y_LABELS = 4
BAR_WIDTH = 160
BAR_HEIGHT = 16


def draw_histogram(histogram: Histogram, title: str, across: str, up: str, mark: float | None = None) -> str:
    """Return a figure with its caption; `across` and `up` name the axes, `mark` is a line at the median."""
    outside = [f"{histogram.below:,.4g} below {histogram.start:g}"] if histogram.below else []
    outside += [f"{histogram.beyond:,.4g} beyond {histogram.end:g}"] if histogram.beyond else []
    notes = ([] if mark is None else [f"median {mark:.3g}"]) + ([f"not drawn: {', '.join(outside)}"] if outside else [])
    note = f'<span class="outside">{"; ".join(notes)}</span>' if notes else ""
    caption = f"<figcaption>{html.escape(title)}{note}</figcaption>"
    if not any(histogram.amounts):
        return f'<figure>{caption}<p class="none">no data</p></figure>'
    fullest = max(range(len(histogram.amounts)), key=histogram.amounts.__getitem__)
    label = (  # for screen readers
        f"{title}: from {histogram.start:g} to {histogram.end:g} {across}, most ({histogram.amounts[fullest]:,.4g} "
        f"{up}) between {histogram.edge(fullest):g} and {histogram.edge(fullest + 1):g}"
    )
    drawn = "".join([*_rows(histogram), *_bars(histogram, across, up), *_columns(histogram, across)])
    if mark is not None and histogram.start <= mark <= histogram.end:
        x = _across(histogram, mark)
        drawn += f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"/>'
    return (
        f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">'
        f"{drawn}</svg></figure>"
    )


def _across(histogram: Histogram, value: float) -> float:
    return LEFT + (value - histogram.start) / (histogram.end - histogram.start) * (RIGHT - LEFT)


def _bars(histogram: Histogram, across: str, up: str) -> Iterator[str]:
    _, highest = _scale(histogram)
    for number, amount in enumerate(histogram.amounts):
        if not amount:
            continue
        left, right = (_across(histogram, histogram.edge(n)) for n in (number, number + 1))
        # A bin with few values must stay visible.
        height = max(1.0, amount / highest * (BOTTOM - TOP))
        label = f"{histogram.edge(number):g} to {histogram.edge(number + 1):g} {across}: {amount:,.4g} {up}"
        yield (
            f'<rect class="bar" x="{left + 0.5:.1f}" width="{max(1.0, right - left - 1):.1f}" '
            f'y="{BOTTOM - height:.1f}" height="{height:.1f}"><title>{html.escape(label)}</title></rect>'
        )


def _scale(histogram: Histogram) -> tuple[float, float]:
    """Return the step of the horizontal grid lines, and the round value at the upper end of the axis."""
    highest = max(histogram.amounts)
    step = round_step(highest, MAX_Y_LABELS)
    if all(float(amount).is_integer() for amount in histogram.amounts):
        # Counts need integer labels: 2.5 becomes 5.
        step = max(1.0, step if step.is_integer() else 2 * step)
    return step, math.ceil(highest / step - 1e-9) * step


def _rows(histogram: Histogram) -> Iterator[str]:
    step, top = _scale(histogram)
    for number in range(round(top / step) + 1):
        y = BOTTOM - number * step / top * (BOTTOM - TOP)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{_short(number * step)}</text>'


def _columns(histogram: Histogram, across: str) -> Iterator[str]:
    step = round_step(histogram.end - histogram.start, MAX_X_LABELS)
    # The tolerance keeps a label at the ends despite rounding.
    first = math.ceil(histogram.start / step - 1e-9)
    last = math.floor(histogram.end / step + 1e-9)
    for number in range(first, last + 1):
        x = _across(histogram, number * step)
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 4}"/>'
        yield f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{round(number * step, 9):g}</text>'
    yield f'<text class="axis" x="{RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{html.escape(across)}</text>'


def _short(value: float) -> str:
    """Format a number in at most five characters: 1500 is 1.5k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def draw_bar(value: float, low: float, high: float, longest: float, label: str) -> str:
    """Return a bar for a table, `longest` being full width, with an interval from `low` to `high` drawn over it."""
    scale = BAR_WIDTH / longest if longest > 0 else 0.0
    middle = BAR_HEIGHT / 2
    drawn = f'<rect class="bar" x="0" y="3" height="{BAR_HEIGHT - 6}" width="{value * scale:.1f}"/>'
    if math.isfinite(low) and math.isfinite(high):
        drawn += f'<line class="range" x1="{low * scale:.1f}" x2="{high * scale:.1f}" y1="{middle}" y2="{middle}"/>'
        for end in (low, high):
            x = min(max(end * scale, 0.75), BAR_WIDTH - 0.75)  # half the line's width, else it is clipped
            drawn += f'<line class="range" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{BAR_HEIGHT - 2}"/>'
    return (
        f'<svg class="inline" viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" role="img" aria-label="{html.escape(label)}">'
        f"{drawn}</svg>"
    )
