"""Charts as inline SVG that inherit the colours of the page, for light and dark mode, wide and narrow screens."""

import html
import math
from collections.abc import Iterator

from konkanivani.data.health.histogram import Histogram, round_step

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
    said = ([] if mark is None else [f"median {mark:.3g}"]) + ([f"not drawn: {', '.join(outside)}"] if outside else [])
    note = f'<span class="outside">{"; ".join(said)}</span>' if said else ""
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
    _, most = _scale(histogram)
    for number, amount in enumerate(histogram.amounts):
        if not amount:
            continue
        left, right = (_across(histogram, histogram.edge(n)) for n in (number, number + 1))
        # A bin with few values must stay visible.
        height = max(1.0, amount / most * (BOTTOM - TOP))
        said = f"{histogram.edge(number):g} to {histogram.edge(number + 1):g} {across}: {amount:,.4g} {up}"
        yield (
            f'<rect class="bar" x="{left + 0.5:.1f}" width="{max(1.0, right - left - 1):.1f}" '
            f'y="{BOTTOM - height:.1f}" height="{height:.1f}"><title>{html.escape(said)}</title></rect>'
        )


def _scale(histogram: Histogram) -> tuple[float, float]:
    """Return the step of the horizontal grid lines, and the round value at the upper end of the axis."""
    most = max(histogram.amounts)
    step = round_step(most, MAX_Y_LABELS)
    if all(float(amount).is_integer() for amount in histogram.amounts):
        # Counts need integer labels: 2.5 becomes 5.
        step = max(1.0, step if step.is_integer() else 2 * step)
    return step, math.ceil(most / step - 1e-9) * step


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


def draw_bar(value: float, low: float, high: float, longest: float, said: str) -> str:
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
        f'<svg class="inline" viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" role="img" aria-label="{html.escape(said)}">'
        f"{drawn}</svg>"
    )
