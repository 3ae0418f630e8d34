"""Time and memory of each toolkit along an axis, such as utterance length, as tables and as a picture."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measuring.peers.contest import Entry, Terms
from benchmarks.measuring.peers.environment import pythons_of
from benchmarks.measuring.peers.race import ROOT, Result, race
from konkanivani.base.errors import ResourceError


@dataclass(frozen=True)
class Axis:
    """Quantity that grows, its values, and the workload at each value."""

    title: str
    values: tuple[float, ...]
    terms: tuple[Terms, ...]


@dataclass(frozen=True)
class Point:
    """Result of a toolkit at one value: ms and MiB per second of audio, and total MiB; None: out of memory."""

    toolkit: str
    value: float
    milliseconds: float | None
    peak_mib: float | None
    peak_mib_a_second: float | None


@dataclass(frozen=True)
class Curve:
    """Results of all toolkits along one axis."""

    axis: Axis
    points: tuple[Point, ...]

    @property
    def toolkits(self) -> tuple[str, ...]:
        """Names of the toolkits, in their order."""
        return tuple(dict.fromkeys(point.toolkit for point in self.points))

    def markdown(self) -> str:
        """Return a Markdown table with a row per value."""
        head = [self.axis.title, *(f"{toolkit}, ms and MiB an audio second" for toolkit in self.toolkits)]
        lines = [_row(head), _row(["---"] * len(head))]
        for value in self.axis.values:
            points = [point for point in self.points if point.value == value]
            cells = ["out of memory" if p.milliseconds is None else _figures(p) for p in points]
            lines.append(_row([f"{value:g}", *cells]))
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Return the curve as JSON-serialisable values."""
        return {"title": self.axis.title, "points": [asdict(point) for point in self.points]}


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figures(point: Point) -> str:
    return f"{point.milliseconds:.0f}, {point.peak_mib_a_second:.1f} ({point.peak_mib:.0f} MiB in all)"


def grow(axis: Axis, toolkits: tuple[str, ...], rounds: int, folder: Path) -> Curve:
    """Measure the curve; at each value, the toolkits step in turn."""
    pythons, points = pythons_of(toolkits, folder), []
    for value, terms in zip(axis.values, axis.terms, strict=True):
        print(f"{axis.title}: {value:g}", file=sys.stderr, flush=True)
        entries = tuple(Entry(toolkit, "", 1) for toolkit in toolkits)
        try:
            # In turn, so that a varying speed of the machine affects all toolkits equally.
            results = {result.entry: result for result in race(entries, pythons, terms, rounds)}
        except ResourceError as error:  # one toolkit is out of memory: measure each alone
            print(error, file=sys.stderr)
            results = {entry: _alone(entry, pythons, terms, rounds) for entry in entries}
        points += [_point(entry.toolkit, value, terms, results[entry]) for entry in entries]
    return Curve(axis, tuple(points))


def _alone(entry: Entry, pythons: dict[str, Path], terms: Terms, rounds: int) -> Result | None:
    try:
        return race((entry,), pythons, terms, rounds)[0]
    except ResourceError:
        return None


def _point(toolkit: str, value: float, terms: Terms, result: Result | None) -> Point:
    if result is None:
        return Point(toolkit, value, None, None, None)
    # All utterances of a point have the same duration.
    audio = terms.utterances * terms.longest
    return Point(toolkit, value, 1000 * result.median / audio, result.peak_mib, result.peak_mib / audio)


def draw(curves: tuple[Curve, ...], picture: Path, folder: Path) -> None:
    """Draw the curves into a PNG file, with matplotlib from the environment of the other toolkits."""
    python = pythons_of(("speechbrain",), folder)["speechbrain"]
    curves_as_json = json.dumps([curve.as_json() for curve in curves])
    command = [str(python), str(Path(__file__).with_name("drawing.py")), str(picture.resolve())]
    done = subprocess.run(command, input=curves_as_json, text=True, capture_output=True, cwd=ROOT)
    if done.returncode:
        raise ResourceError(
            f"The picture {picture} could not be drawn: {done.stderr.strip().splitlines()[-1]} Give another --plot."
        )
