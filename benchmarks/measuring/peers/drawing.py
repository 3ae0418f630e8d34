"""Draw curves, JSON on standard input, into a PNG file: time above, memory below, a column per axis."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

curves = json.load(sys.stdin)
figure, rows = plt.subplots(2, len(curves), figsize=(4.6 * len(curves), 7.2), squeeze=False)
for row, (name, unit) in zip(
    rows, (("milliseconds", "ms an audio second"), ("peak_mib_a_second", "MiB an audio second")), strict=True
):
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
figure.tight_layout()
figure.savefig(sys.argv[1], dpi=110)
