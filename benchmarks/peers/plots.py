"""Draw results as a PNG file, in the environment of the other toolkits, which has matplotlib.

    PYTHON benchmarks/peers/plots.py growth|learning PICTURE.png < RESULTS.json

growth: curves, with time above and memory below, a column per axis. learning: validation CER by epoch, a panel per data
set.
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

QUANTITIES = (("milliseconds", "ms an audio second"), ("peak_mib_a_second", "MiB an audio second"))


def draw_growth(curves: list[dict]) -> plt.Figure:
    """Return time and memory of each toolkit along each axis."""
    figure, rows = plt.subplots(2, len(curves), figsize=(4.6 * len(curves), 7.2), squeeze=False)
    for row, (name, unit) in zip(rows, QUANTITIES, strict=True):
        for axes, curve in zip(row, curves, strict=True):
            for toolkit in dict.fromkeys(point["toolkit"] for point in curve["points"]):
                points = [p for p in curve["points"] if p["toolkit"] == toolkit and p[name] is not None]
                axes.plot([p["value"] for p in points], [p[name] for p in points], marker="o", label=toolkit)
            axes.set(xscale="log", yscale="log", xlabel=curve["title"], ylabel=unit)
            ticks = sorted({point["value"] for point in curve["points"]})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.grid(alpha=0.3)
    rows[0][0].legend()
    return figure


def draw_learning(runs: list[dict]) -> plt.Figure:
    """Return the validation CER of all runs, one line per seed and one colour per learner."""
    sets = list(dict.fromkeys(run["set_name"] for run in runs))
    columns = min(4, len(sets))
    rows = -(-len(sets) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.0 * rows), squeeze=False)
    colours = {learner: f"C{number}" for number, learner in enumerate(dict.fromkeys(run["learner"] for run in runs))}
    for axes in panels.flat[len(sets) :]:
        axes.set_visible(False)
    for axes, name in zip(panels.flat, sets, strict=False):
        for run in runs:
            if run["set_name"] == name:
                rates = [100 * epoch["cer"] for epoch in run["valid"]]
                axes.plot(range(1, len(rates) + 1), rates, color=colours[run["learner"]], alpha=0.8, linewidth=1.2)
        axes.set(title=name, xlabel="epochs", ylabel="CER of validation, %", yscale="log", ylim=(1, 110))
        axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].legend(handles=[plt.Line2D([], [], color=c, label=learner) for learner, c in colours.items()])
    return figure


if __name__ == "__main__":
    draw = {"growth": draw_growth, "learning": draw_learning}[sys.argv[1]]
    figure = draw(json.load(sys.stdin))
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=110)
