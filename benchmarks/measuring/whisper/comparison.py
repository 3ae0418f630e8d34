"""Tables of time and memory of a Whisper step in this trainer and in transformers, and their ratios."""

import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.measuring.peers.contest import Entry
from benchmarks.measuring.peers.environment import OURS
from benchmarks.measuring.peers.race import Result, race
from benchmarks.measuring.whisper.work import WhisperTerms
from konkanivani.base.errors import NumericsError
from konkanivani.base.units import MIB
from konkanivani.memory.plan import STATE_BYTES

THEIRS = "transformers"
CONTESTANTS = "benchmarks.measuring.whisper.contestants"
LOSS_SHARE = 0.001  # largest relative difference of the last losses (half precision: ten times that)
ON_CARD = "card"
HEARD = {"window": "all of the window", "speech": "the speech alone"}
TRAINED = {"all": "all weights", "decoder": "the decoder alone", "lora": "LoRA of rank 32 on q and v"}


@dataclass(frozen=True)
class WhisperComparison:
    """Results of all settings; the last one is that for transformers."""

    terms: WhisperTerms
    rounds: int
    machine: str
    results: tuple[Result, ...]

    def markdown(self) -> str:
        """Return a description of the measurement and the tables as Markdown."""
        terms, theirs = self.terms, self.results[-1]
        return "\n".join(
            [
                f"Whisper {terms.size}, {TRAINED[terms.train]} ({theirs.parameters / 1e6:.1f} M parameters trained); "
                f"{terms.utterances} windows of {terms.window_seconds} s, {terms.together} a micro-batch, with "
                f"{min(terms.seconds):.1f} to {max(terms.seconds):.1f} s of speech and {min(terms.labels)} to "
                f"{max(terms.labels)} labels; ours takes {HEARD[terms.audio_context]}; every block recomputed; "
                f"{_precision(terms)}; {self.machine}; {self.rounds} rounds of a step each.",
                "",
                "| | step, s: median | least | most | CPU s | its features, s | peak, MiB | above state | growth |",
                "|---|---|---|---|---|---|---|---|---|",
                *(_row(result) for result in self.results),
                "",
                f"| ours over {THEIRS}' | median | least | CPU s | features | peak | above state | growth |",
                "|---|---|---|---|---|---|---|---|",
                *(_ratios(result, theirs) for result in self.results[:-1]),
            ]
        )

    def as_json(self) -> dict[str, object]:
        """Return all fields as JSON-serialisable values."""
        return asdict(self)


def compare(
    terms: WhisperTerms, rounds: int, at_once: tuple[int, ...], weights: tuple[str, ...] = (ON_CARD,)
) -> WhisperComparison:
    """Compare this trainer with transformers.

    Raises NumericsError if the losses show that the two do not compute the same step.

    Args:
        at_once: Numbers of concurrent micro-batches of this trainer.
        weights: Locations of this trainer's weights, keys of PLACEMENTS or "card".
    """
    pieces = terms.utterances // terms.together
    entries = (
        *(Entry(OURS, "", pieces, at_once=count) for count in at_once if ON_CARD in weights),
        *(Entry(OURS, place, pieces) for place in weights if place != ON_CARD),
        Entry(THEIRS, "", pieces),
    )
    pythons = dict.fromkeys((OURS, THEIRS), Path(sys.executable))
    results = race(entries, pythons, terms, rounds, CONTESTANTS, aside=("features",))
    losses = [result.loss for result in results]
    # With the speech alone, the encoder input differs from that in transformers, and so does the loss.
    is_same_work = terms.audio_context == "window"
    if is_same_work and max(losses) - min(losses) > (10 if terms.mixed_precision else 1) * LOSS_SHARE * max(losses):
        raise NumericsError(
            f"The losses {losses} are not from the same step, so nothing is comparable. Fix the compared programs."
        )
    return WhisperComparison(terms, rounds, _machine(terms.device), results)


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _precision(terms: WhisperTerms) -> str:
    half = "fp16" if terms.device == "cuda" else "bf16"
    return f"autocast to {half}" if terms.mixed_precision else "fp32"


def _above_state(result: Result) -> float:
    """Return the peak minus weights, gradients and moments of the trained parameters, in MiB."""
    return result.peak_mib - STATE_BYTES * result.parameters / MIB


def _row(result: Result) -> str:
    times, features = result.seconds, statistics.median(result.aside["features"])
    cpu = statistics.median(result.cpu_seconds)
    cells = (f"{result.median:.3f}", f"{min(times):.3f}", f"{max(times):.3f}", f"{cpu:.3f}", f"{features:.3f}")
    sizes = (f"{result.peak_mib:.0f}", f"{_above_state(result):.0f}", f"{result.growth_mib:.0f}")
    return f"| {result.entry.name} {result.version} | {' | '.join((*cells, *sizes))} |"


def _ratios(ours: Result, theirs: Result) -> str:
    features = [statistics.median(result.aside["features"]) for result in (ours, theirs)]
    cpu = [statistics.median(result.cpu_seconds) for result in (ours, theirs)]
    pairs = (
        (ours.median, theirs.median),
        (min(ours.seconds), min(theirs.seconds)),
        cpu,
        features,
        (ours.peak_mib, theirs.peak_mib),
        (_above_state(ours), _above_state(theirs)),
        (ours.growth_mib, theirs.growth_mib),
    )
    return f"| {ours.entry.name} | {' | '.join(f'{one / other:.2f}' for one, other in pairs)} |"
