"""Bars of the time and peak memory of a training step, from the tables of docs/performance.md."""

import re
from dataclasses import dataclass

from benchmarks.measuring.drawing.svg import page, rectangle, text

ROW = re.compile(
    r"^\| (konkanivani|speechbrain|espnet)[^|]*\| [\d.]+ M \| (\d+ x \d+) \| ([\d.]+) \|(?:[^|]*\|){2} (\d+) \|"
)
NAMES = {"konkanivani": "KonkaniVani", "speechbrain": "SpeechBrain", "espnet": "ESPnet"}
WIDTH, HEIGHT = 960, 392
NAME_X, PANELS, MAX_SECONDS = 148, (168, 580), 280
GROUPS = (("Fastest split of the batch", 64), ("Split of the batch with the lowest peak", 216))


LEGEND = "4 × 2: four micro-batches of two utterances; 62.6 s of audio in all. Shorter is better."


@dataclass(frozen=True)
class Measured:
    """A step of one toolkit: the split into micro-batches, seconds, and MiB at the peak."""

    toolkit: str
    cut: str
    seconds: float
    mib: float


def read_contest(markdown: str) -> list[Measured]:
    """Return the rows of the last table of contestants."""
    table = markdown[markdown.rindex("| contestant | parameters |") :]
    rows = [ROW.match(line) for line in table.split("\n\n")[0].splitlines()[2:]]
    return [Measured(row[1], row[2], float(row[3]), float(row[4])) for row in rows if row]


def steps_beside_others(markdown: str) -> str:
    """Return the picture as SVG: each toolkit's fastest step and its step with the lowest peak."""
    measured = read_contest(markdown)
    of_each = [[each for each in measured if each.toolkit == toolkit] for toolkit in NAMES]
    best = [min(rows, key=lambda row: row.seconds) for rows in of_each]
    leanest = [min(rows, key=lambda row: row.mib) for rows in of_each]
    longest = max(row.seconds for row in best + leanest), max(row.mib for row in best + leanest)
    heads = zip(PANELS, ("Seconds per step", "Peak memory, MiB"), strict=True)
    shapes = [text("text", left, 34, head, 15, 600) for left, head in heads]
    shapes.append(text("quiet", PANELS[0], 372, LEGEND, 11))
    for (title, top), rows in zip(GROUPS, (best, leanest), strict=True):
        shapes.append(text("quiet", PANELS[0], top, title, 12))
        for number, row in enumerate(rows):
            shapes += bars(row, top + 14 + 40 * number, longest)
    return page(
        WIDTH, HEIGHT, "Seconds and peak memory of a training step, compared with SpeechBrain and ESPnet", shapes
    )


def bars(row: Measured, top: float, longest: tuple[float, float]) -> list[str]:
    """Return the toolkit's name and its two bars."""
    kind, weight = ("orange", 600) if row.toolkit == "konkanivani" else ("pale", 400)
    shapes = [
        text("text", NAME_X, top + 16, NAMES[row.toolkit], 14, weight, "end"),
        text("quiet", NAME_X, top + 31, row.cut.replace("x", "×"), 11, 400, "end"),
    ]
    values = (row.seconds, f"{row.seconds:.2f}"), (row.mib, f"{row.mib:.0f}")
    for left, (value, said), most in zip(PANELS, values, longest, strict=True):
        length = MAX_SECONDS * value / most
        shapes.append(rectangle(kind, left, top + 4, length, 26, 4))
        shapes.append(text("text", left + length + 8, top + 22, said, 14, weight))
    return shapes
