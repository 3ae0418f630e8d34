"""Draw learning curves, JSON on standard input, into a PNG file: validation CER by epoch, a panel per data set."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

runs = json.load(sys.stdin)
sets = list(dict.fromkeys(run["set_name"] for run in runs))
columns = min(4, len(sets))
rows = -(-len(sets) // columns)
figure, panels = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.0 * rows), squeeze=False)
colours = {learner: f"C{number}" for number, learner in enumerate(dict.fromkeys(run["learner"] for run in runs))}
for axes in panels.flat[len(sets) :]:
    axes.set_visible(False)
for axes, name in zip(panels.flat, sets, strict=False):  # one line per seed, one colour per learner
    for run in runs:
        if run["set_name"] == name:
            rates = [100 * epoch["cer"] for epoch in run["valid"]]
            axes.plot(range(1, len(rates) + 1), rates, color=colours[run["learner"]], alpha=0.8, linewidth=1.2)
    axes.set(title=name, xlabel="epochs", ylabel="CER of validation, %", yscale="log", ylim=(1, 110))
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
panels[0][0].legend(handles=[plt.Line2D([], [], color=c, label=learner) for learner, c in colours.items()])
figure.tight_layout()
figure.savefig(sys.argv[1], dpi=110)
