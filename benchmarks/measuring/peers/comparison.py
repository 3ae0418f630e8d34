"""Tables of the comparison between toolkits: fastest and smallest steps, and ratios of time and memory."""

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.measuring.fixed_step import VOCABULARY, build_speech
from benchmarks.measuring.peers.contest import Entry, Terms
from benchmarks.measuring.peers.environment import OURS, pythons_of
from benchmarks.measuring.peers.machine_rate import SIDE
from benchmarks.measuring.peers.ours import model_of
from benchmarks.measuring.peers.race import Result, race
from konkanivani.base.config import FeatureConfig
from konkanivani.base.units import MIB
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.model.flops import forward_layers, step_flop

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
