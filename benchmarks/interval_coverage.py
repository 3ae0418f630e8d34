#!/usr/bin/env python3
"""Measure how often a 95 % interval of the WER contains the true WER, by resampling unit and number of speakers.

    python3 benchmarks/interval_coverage.py

Speech is simulated: every speaker has an error rate with a beta distribution around 20 % and standard deviation
`spread`, every utterance one around its speaker's, and every word is wrong with the probability of its utterance. The
intervals are the evaluation's own bootstrap. A good interval contains 20 % in 95 of 100 trials.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

from dataclasses import dataclass

import numpy as np

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError
from konkanivani.evaluation.bootstrap import percentiles, ratios, resample_sums

TRUE_RATE = 0.2
WITHIN_SPEAKER = 4.0  # sum of the two parameters of an utterance's beta distribution


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    trials: int = 1000
    """Test sets per cell of the table."""
    utterances: int = 160
    """Utterances of a test set, of 3 to 12 words."""
    speakers: tuple[int, ...] = (2, 4, 6, 10, 20, 40)
    """Numbers of speakers to try."""
    spreads: tuple[float, ...] = (0.0, 0.03, 0.08)
    """Standard deviations of the speakers' error rates."""


def measure_coverage(flags: Flags) -> str:
    """Return the table, one line per spread and number of speakers."""
    if flags.trials < 1 or not all(1 <= speakers <= flags.utterances for speakers in flags.speakers):
        raise UsageError("--trials must be at least 1, and --speakers between 1 and --utterances.")
    if not all(0 <= spread < 0.2 for spread in flags.spreads):
        raise UsageError("--spreads must lie between 0 and 0.2.")
    lines = ["spread  speakers  by utterance  by speaker"]
    for spread in flags.spreads:
        for speakers in flags.speakers:
            # The same seed in each cell, so that cells differ by their parameters only.
            shares = coverage(np.random.default_rng(1), flags, speakers, spread)
            lines.append(f"{spread:6.2f}  {speakers:8}  {shares[0]:11.1%}  {shares[1]:9.1%}")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def coverage(generator: np.random.Generator, flags: Flags, speakers: int, spread: float) -> np.ndarray:
    """Return the fractions (2,) of trials whose interval contains the true rate: resampled by utterance, by speaker."""
    of_speaker = np.arange(flags.utterances) % speakers
    held = np.zeros(2)
    for _ in range(flags.trials):
        sums = simulate(generator, of_speaker, speakers, spread)
        for column, blocks in enumerate((np.arange(flags.utterances), of_speaker)):
            resampled = resample_sums(sums, blocks, resamples=500, seed=int(generator.integers(2**32)))
            interval = percentiles(ratios(resampled[:, 0], resampled[:, 1]))
            held[column] += interval.low <= TRUE_RATE <= interval.high
    return held / flags.trials


def simulate(generator: np.random.Generator, of_speaker: np.ndarray, speakers: int, spread: float) -> np.ndarray:
    """Return word errors and words of each utterance, (utterances, 2)."""
    rates = np.full(speakers, TRUE_RATE)
    if spread:
        # From the variance of a beta distribution with mean m and parameter sum s: m (1 - m) / (s + 1).
        strength = TRUE_RATE * (1 - TRUE_RATE) / spread**2 - 1
        rates = generator.beta(TRUE_RATE * strength, (1 - TRUE_RATE) * strength, size=speakers)
    rates = np.clip(rates, 1e-3, 1 - 1e-3)[of_speaker]
    of_utterance = generator.beta(WITHIN_SPEAKER * rates, WITHIN_SPEAKER * (1 - rates))
    words = generator.integers(3, 13, size=len(of_speaker))
    return np.stack([generator.binomial(words, of_utterance), words], axis=1)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure_coverage(flags)))
