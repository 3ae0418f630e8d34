#!/usr/bin/env python3
"""Compare a training step of this trainer with other toolkits: time and memory, and how they grow.

    python3 benchmarks/peers/step.py compare --rounds 7
    python3 benchmarks/peers/step.py compare --device cuda --mixed_precision --utterances 64 --markdown table.md
    python3 benchmarks/peers/step.py growth --plot docs/growth.png

compare: one global batch of utterances of 3 to 12 s (features given, 62.6 s in all for 8), a Conformer of about 25 M
parameters (12 + 6 layers, width 256, vocabulary 1000), CTC and attention losses, backward pass, clipping, AdamW. Each
toolkit runs in its own process; a round is one step of each, sequentially. The others are installed into a separate
environment. Peak is the number of live tensor bytes counted at dispatch (CUDA: the allocator's); growth is VmHWM minus
the resident memory of the process before its model. A claim needs both.

growth: time and memory by utterance duration, batch size and model width. Each step has one micro-batch of equal
utterances. A toolkit that runs out of memory has no value there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

import torch

from benchmarks.measuring.common import VOCABULARY, build_speech, run_subcommand
from benchmarks.peers.processes import OURS, SIDE, Entry, Result, check_plot, pythons_of, race
from benchmarks.peers.toolkits import Terms, model_of
from konkanivani.command_line import read_flags
from konkanivani.config import FeatureConfig
from konkanivani.console import MIB
from konkanivani.errors import ResourceError, UsageError
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.models.architecture import forward_layers, step_flop

LEANER = "within the leanest other's peak"
# Weights, gradients and two moments in fp32 take 16 bytes per parameter.
NEAR_FLOOR = "within 1.1 x 16 bytes a parameter"


@dataclass(frozen=True)
class Comparison:
    """Results with dropout, and those without it if they were measured."""

    terms: Terms
    audio_seconds: float
    rounds: int
    machine: str
    results: tuple[Result, ...]
    without_dropout: tuple[Result, ...]

    def fastest(self, toolkit: str, limit_mib: float = math.inf) -> Result:
        """Return the toolkit's fastest result with a peak of at most `limit_mib`."""
        return min(self._of(toolkit, limit_mib), key=lambda result: result.median)

    def leanest(self, toolkit: str) -> Result:
        """Return the toolkit's result with the lowest peak."""
        return min(self._of(toolkit), key=lambda result: result.peak_mib)

    def _of(self, toolkit: str, limit_mib: float = math.inf) -> list[Result]:
        return [r for r in self.results if r.entry.toolkit == toolkit and r.peak_mib <= limit_mib]

    @property
    def toolkits(self) -> tuple[str, ...]:
        """Names of the other toolkits, in their order."""
        return tuple(dict.fromkeys(r.entry.toolkit for r in self.results if r.entry.toolkit != OURS))

    def share_of_rate(self, result: Result) -> float:
        """Return the FLOP/s of this trainer's step as a share of the plain products' rate, median over rounds."""
        flop = step_flop_of(result.entry, self.terms)
        # The rate is the one measured around the same step, since the speed of a shared machine varies.
        taken = zip(result.seconds, result.rates, strict=True)
        return statistics.median(flop / seconds / rate.plain for seconds, rate in taken)

    def ratios(self) -> list[tuple[str, Result, Result]]:
        """Return the pairs to compare: (description, this trainer's result, another toolkit's fastest result).

        This trainer takes part with its fastest result, and with its fastest ones below two limits of the peak.
        """
        found, ours = [], [result for result in self.results if result.entry.toolkit == OURS]
        leanest_other = min((self.leanest(toolkit).peak_mib for toolkit in self.toolkits), default=math.inf)
        # No step in fp32 with AdamW can have a lower peak than its weights, gradients and moments.
        floor = STATE_BYTES * max((result.parameters for result in ours), default=0) / MIB
        for toolkit in self.toolkits if ours else ():
            theirs = self.fastest(toolkit)
            found.append(("fastest", self.fastest(OURS), theirs))
            for what, limit in ((LEANER, leanest_other), (NEAR_FLOOR, 1.1 * floor)):
                # No row if every step of this trainer exceeds the limit.
                if self._of(OURS, limit):
                    found.append((what, self.fastest(OURS, limit), theirs))
        return found

    def markdown(self) -> str:
        """Return a description of the measurement and the tables as Markdown."""
        rates = [rate for result in self.results for rate in result.rates]
        plain, layers = [rate.plain / 1e9 for rate in rates], [rate.layers / 1e9 for rate in rates]
        lines = [
            f"{self.terms.utterances} utterances of {self.terms.shortest:g} to {self.terms.longest:g} s, "
            f"{self.audio_seconds:.1f} s in all; dropout {self.terms.dropout:g}; {self.machine}; medians of "
            f"{self.rounds} rounds, one step of each in turn; products of {SIDE} x {SIDE} x {SIDE} in fp32 between all "
            f"steps: {statistics.median(plain):.0f} GFLOP/s as PyTorch takes them ({min(plain):.0f} to "
            f"{max(plain):.0f}), {statistics.median(layers):.0f} as our layers do.",
            "",
            "| contestant | parameters | cut | step, s | from, to | audio s/s | peak, MiB | growth, MiB |",
            "|---|---|---|---|---|---|---|---|",
            *(self._row(result) for result in self.results),
            "",
            "| ours | beside | step, s | ratio of times | ratio of peaks |",
            "|---|---|---|---|---|",
            *map(_ratio_row, self.ratios()),
        ]
        if self.without_dropout:
            lines += [
                "",
                "| at dropout 0 | cut | step, s | peak, MiB |",
                "|---|---|---|---|",
                *(
                    f"| {r.entry.name} | {_cut(r, self.terms)} | {r.median:.2f} | {r.peak_mib:.0f} |"
                    for r in self.without_dropout
                ),
            ]
        # Results within a limit are omitted: the formulas do not include the arithmetic of a few recomputed blocks.
        ours = [r for r in self.results if r.entry.toolkit == OURS and not r.entry.limit_mib]
        if ours:
            shares = ", ".join(f"{_cut(r, self.terms)}{_setting(r)} {self.share_of_rate(r):.0%}" for r in ours)
            said = "Our share of the rate of plain products about the same step, by how the batch is cut"
            lines += ["", f"{said}: {shares}."]
        return "\n".join(lines)

    def _row(self, result: Result) -> str:
        cells = (
            f"{result.entry.name} {result.version}",
            f"{result.parameters / 1e6:.1f} M",
            _cut(result, self.terms),
            f"{result.median:.2f}",
            f"{min(result.seconds):.2f} to {max(result.seconds):.2f}",
            f"{self.audio_seconds / result.median:.1f}",
            f"{result.peak_mib:.0f}",
            f"{result.growth_mib:.0f}",
        )
        return f"| {' | '.join(cells)} |"

    def as_json(self) -> dict[str, object]:
        """Return all fields as JSON-serialisable values."""
        return asdict(self)


def _setting(result: Result) -> str:
    return result.entry.name.removeprefix(OURS)


def _cut(result: Result, terms: Terms) -> str:
    return f"{result.entry.micro_batches} x {terms.utterances // result.entry.micro_batches}"


def _ratio_row(row: tuple[str, Result, Result]) -> str:
    what, ours, theirs = row
    return (
        f"| {what} | {theirs.entry.name} | {ours.median:.2f} : {theirs.median:.2f} | "
        f"{ours.median / theirs.median:.2f} | {ours.peak_mib / theirs.peak_mib:.2f} |"
    )


def step_flop_of(entry: Entry, terms: Terms) -> float:
    """Return the FLOP of this trainer's step at the entry's micro-batches, padding included."""
    speech, total = build_speech(terms.utterances, terms.shortest, terms.longest), 0.0
    size = terms.utterances // entry.micro_batches
    for start in range(0, terms.utterances, size):
        # Utterances are sorted, so that each slice is a micro-batch of `cut`.
        frames = tuple(speech.frames[start : start + size].tolist())
        tokens = int(speech.token_lengths[start : start + size].max())
        layers = forward_layers(model_of(terms), VOCABULARY, FeatureConfig().mel_bins, frames, tokens)
        total += step_flop(layers, entry.setting == "recompute")
    return total


def entries_of(
    toolkits: tuple[str, ...],
    cuts: tuple[int, ...],
    limits: Sequence[tuple[int, int]] = (),
    at_once: tuple[int, ...] = (1,),
) -> tuple[Entry, ...]:
    """Return the entries: every toolkit at every number of micro-batches, and the settings of this trainer.

    Args:
        cuts: Numbers of micro-batches; this trainer also recomputes all blocks at the largest one.
        limits: Pairs (micro-batches, MiB): peaks within which this trainer is also measured.
        at_once: Numbers of concurrent micro-batches of this trainer, used with at least twice as many micro-batches.
    """
    entries = []
    for toolkit in toolkits:
        own = [Entry(toolkit, "", cut) for cut in cuts]
        if toolkit == OURS:
            own.append(Entry(toolkit, "recompute", max(cuts)))
            own += [Entry(toolkit, "", cut, limit) for cut, limit in limits]
            own = [
                replace(entry, at_once=n) for n in at_once for entry in own if n == 1 or 2 * n <= entry.micro_batches
            ]
        entries += own
    return tuple(entries)


def compare_all(
    terms: Terms, entries: tuple[Entry, ...], rounds: int, folder: Path, without_dropout: bool
) -> Comparison:
    """Run the comparison; the environment of the other toolkits is created unless it exists."""
    toolkits = tuple(dict.fromkeys(entry.toolkit for entry in entries))
    pythons = pythons_of(toolkits, folder)
    comparison = Comparison(
        terms=terms,
        audio_seconds=build_speech(terms.utterances, terms.shortest, terms.longest).seconds,
        rounds=rounds,
        machine=_machine(terms.device),
        results=race(entries, pythons, terms, rounds),
        without_dropout=(),
    )
    if not without_dropout or not terms.dropout:
        return comparison
    # The other toolkits also drop attention probabilities; without dropout, this difference vanishes.
    fastest = tuple(comparison.fastest(toolkit).entry for toolkit in toolkits)
    return replace(comparison, without_dropout=race(fastest, pythons, replace(terms, dropout=0.0), rounds))


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


Toolkit = Literal["konkanivani", "speechbrain", "espnet"]


@dataclass(frozen=True)
class CompareFlags:
    """Flags of this script."""

    rounds: int = 5
    """Steps of each toolkit after a warm-up; the median counts."""
    utterances: int = 8
    """Utterances of the global batch."""
    shortest: float = 3.0
    """Seconds of the shortest utterance."""
    longest: float = 12.0
    """Seconds of the longest utterance."""
    width: int = 256
    """Width of every model."""
    cuts: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of micro-batches to measure for every toolkit."""
    within: tuple[str, ...] = ()
    """Also measure this trainer within a memory limit, as CUT:MIB (such as 2:619), with the fewest recomputed blocks
    that fit."""
    concurrent_micro_batches: tuple[int, ...] = (1, 2)
    """Numbers of concurrent micro-batches of this trainer to measure (CPU only)."""
    contestants: tuple[Toolkit, ...] = get_args(Toolkit)
    """Toolkits to compare."""
    dropout: float = 0.1
    """Dropout of the residual branches; the other toolkits also drop attention probabilities."""
    without_dropout: bool = True
    """Also time every toolkit's fastest number of micro-batches without dropout."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on."""
    mixed_precision: bool = False
    """fp16 with loss scaling on CUDA, bf16 on a CPU."""
    folder: str = "~/.cache/konkanivani/peers"
    """Folder for the environment of the other toolkits."""
    markdown: str | None = None
    """Write the tables to this file as well."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def compare(flags: CompareFlags) -> str:
    """Return the report."""
    if flags.rounds < 1 or any(cut < 1 or flags.utterances % cut for cut in flags.cuts) or not flags.cuts:
        raise UsageError("--rounds must be at least 1, and each of --cuts must divide --utterances.")
    if flags.width < 8 or flags.width % 8:
        raise UsageError("--width must be a multiple of 8: four heads of an even width.")
    if not 0.2 <= flags.shortest <= flags.longest:
        raise UsageError("--shortest must be at least 0.2, and --longest no less.")
    if not flags.concurrent_micro_batches or min(flags.concurrent_micro_batches) < 1:
        raise UsageError("--concurrent_micro_batches must be at least 1.")
    limits = [re.fullmatch(r"([1-9]\d*):([1-9]\d*)", limit) for limit in flags.within]
    if any(limit is None or flags.utterances % int(limit[1]) for limit in limits):
        raise UsageError("--within is not CUT:MIB. Give it as 2:619, where CUT divides --utterances.")

    terms = Terms(
        flags.utterances, flags.shortest, flags.longest, flags.width, flags.dropout, flags.device, flags.mixed_precision
    )
    folder = Path(flags.folder).expanduser()
    # Micro-batches run concurrently on a CPU only.
    concurrent_micro_batches = flags.concurrent_micro_batches if flags.device == "cpu" else (1,)
    limits = [(int(limit[1]), int(limit[2])) for limit in limits]
    entries = entries_of(flags.contestants, flags.cuts, limits, concurrent_micro_batches)
    comparison = compare_all(terms, entries, flags.rounds, folder, flags.without_dropout)
    if flags.markdown:
        Path(flags.markdown).write_text(comparison.markdown() + "\n", encoding="utf-8")
    return json.dumps(comparison.as_json()) if flags.json else comparison.markdown()


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
        lines = [_cells_row(head), _cells_row(["---"] * len(head))]
        for value in self.axis.values:
            points = [point for point in self.points if point.value == value]
            cells = ["out of memory" if p.milliseconds is None else _figures(p) for p in points]
            lines.append(_cells_row([f"{value:g}", *cells]))
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Return the curve as JSON-serialisable values."""
        return {"title": self.axis.title, "points": [asdict(point) for point in self.points]}


def _cells_row(cells: list[str]) -> str:
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


QUANTITIES = (("milliseconds", "ms an audio second"), ("peak_mib_a_second", "MiB an audio second"))


def draw(curves: tuple[Curve, ...], picture: str) -> None:
    """Draw time and memory of each toolkit along each axis into a PNG file: time above memory, a column per axis."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure, rows = plt.subplots(2, len(curves), figsize=(4.6 * len(curves), 7.2), squeeze=False)
    for row, (name, unit) in zip(rows, QUANTITIES, strict=True):
        for axes, curve in zip(row, curves, strict=True):
            for toolkit in curve.toolkits:
                points = [p for p in curve.points if p.toolkit == toolkit and getattr(p, name) is not None]
                axes.plot([p.value for p in points], [getattr(p, name) for p in points], marker="o", label=toolkit)
            axes.set(xscale="log", yscale="log", xlabel=curve.axis.title, ylabel=unit)
            axes.set_xticks(curve.axis.values, [f"{tick:g}" for tick in curve.axis.values])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.grid(alpha=0.3)
    rows[0][0].legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


@dataclass(frozen=True)
class GrowthFlags:
    """Flags of this script; one quantity is varied at a time."""

    seconds: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 60.0)
    """Durations of one utterance at width 256."""
    utterances: tuple[int, ...] = (1, 4, 16, 64)
    """Utterances of 3 s at once at width 256."""
    widths: tuple[int, ...] = (128, 256, 512)
    """Widths of the model, with 4 utterances of 6 s at once."""
    contestants: tuple[Toolkit, ...] = get_args(Toolkit)
    """Toolkits to compare."""
    rounds: int = 3
    """Steps of each after a warm-up; the median counts."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on."""
    mixed_precision: bool = False
    """fp16 with loss scaling on CUDA, bf16 on a CPU."""
    folder: str = "~/.cache/konkanivani/peers"
    """Folder for the environment of the other toolkits."""
    plot: str | None = None
    """Draw the tables into this PNG file (needs matplotlib)."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def measure_growth(flags: GrowthFlags) -> str:
    """Measure every case; return the report."""
    if flags.rounds < 1 or min((*flags.seconds, 0.5)) < 0.5 or min((*flags.utterances, *flags.widths, 1)) < 1:
        raise UsageError("--rounds, --utterances and --widths must be at least 1, --seconds at least 0.5.")

    check_plot(flags.plot)
    where = flags.device, flags.mixed_precision
    axes = (
        Axis("seconds of one utterance", flags.seconds, tuple(Terms(1, s, s, 256, 0.1, *where) for s in flags.seconds)),
        Axis(
            "utterances of 3 s at once",
            tuple(map(float, flags.utterances)),
            tuple(Terms(count, 3.0, 3.0, 256, 0.1, *where) for count in flags.utterances),
        ),
        Axis(
            "width, 4 utterances of 6 s",
            tuple(map(float, flags.widths)),
            tuple(Terms(4, 6.0, 6.0, width, 0.1, *where) for width in flags.widths),
        ),
    )
    folder = Path(flags.folder).expanduser()
    curves = tuple(grow(axis, flags.contestants, flags.rounds, folder) for axis in axes)
    if flags.plot:
        draw(curves, flags.plot)
    if flags.json:
        return json.dumps([curve.as_json() for curve in curves])
    return "\n\n".join(curve.markdown() for curve in curves)


SUBCOMMANDS = {
    "compare": lambda arguments: compare(read_flags(CompareFlags, arguments)),
    "growth": lambda arguments: measure_growth(read_flags(GrowthFlags, arguments)),
}

if __name__ == "__main__":
    sys.exit(run_subcommand(SUBCOMMANDS, sys.argv[1:]))
