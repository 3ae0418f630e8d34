"""Tables of the learning runs: error rates per data set, and epochs until the reference's final CER is reached."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measuring.learning.runs import OURS, LearningRun


@dataclass(frozen=True)
class Spread:
    """Mean, minimum and maximum over seeds."""

    mean: float
    least: float
    largest: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        """Return the spread of at least one figure."""
        return cls(statistics.mean(figures), min(figures), max(figures))

    def percent(self) -> str:
        """Return the spread in percent as a table cell."""
        return f"{100 * self.mean:.1f} ({100 * self.least:.1f}-{100 * self.largest:.1f})"


def rates_table(runs: Sequence[LearningRun]) -> str:
    """Return the test error rates in percent, mean (min-max) over seeds, and their ratios to the last learner's."""
    learners = list(dict.fromkeys(run.learner for run in runs))
    heads = [f"{learner} {rate}" for learner in learners for rate in ("WER", "CER")]
    relative = [learner for learner in learners if learner != learners[-1]] if len(learners) > 1 else []
    heads += [f"{learner} : {learners[-1]}, WER, CER, joint WER" for learner in relative]
    lines = ["| set, seeds | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name in dict.fromkeys(run.set_name for run in runs):
        of = {learner: [r for r in runs if (r.set_name, r.learner) == (name, learner)] for learner in learners}
        cells = [f"{name}, {max(map(len, of.values()))}"]
        for found in of.values():
            cells += [_cell([run.test.wer for run in found]), _cell([run.test.cer for run in found])]
        cells += [_relative(of[learner], of[learners[-1]]) for learner in relative]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def epochs_table(runs: Sequence[LearningRun], peer: str) -> str:
    """Return the number of epochs until this trainer reaches the reference's final validation CER, mean over seeds."""
    lines = ["| set | " + peer + "'s epochs, last CER | epochs of ours | share |", "|---|---|---|---|"]
    for name in dict.fromkeys(run.set_name for run in runs):
        theirs = [run for run in runs if (run.set_name, run.learner) == (name, peer)]
        ours = [run for run in runs if (run.set_name, run.learner) == (name, OURS)]
        if theirs and ours:
            # All runs of a learner have the same number of epochs.
            aim, epochs = statistics.mean(run.valid[-1].cer for run in theirs), len(theirs[0].valid)
            reached = [epochs_to(run, aim) for run in ours]
            # If one seed does not reach it, a mean over the others would be too low.
            mean = None if None in reached else statistics.mean(reached)
            share = "not reached" if mean is None else f"{mean:.1f} | {mean / epochs:.2f}"
            lines.append(f"| {name} | {epochs}, {100 * aim:.1f} % | {share} |")
    return "\n".join(lines)


def epochs_to(run: LearningRun, cer: float) -> int | None:
    """Return the first epoch with a validation CER of at most `cer`, or None."""
    return next((number for number, rates in enumerate(run.valid, start=1) if rates.cer <= cer), None)


def _cell(figures: Sequence[float]) -> str:
    return Spread.of(figures).percent() if figures else "-"


def _relative(ours: Sequence[LearningRun], theirs: Sequence[LearningRun]) -> str:
    if not ours or not theirs:
        return "-"
    wer, cer = (statistics.mean(getattr(run.test, rate) for run in theirs) for rate in ("wer", "cer"))
    figures = [
        statistics.mean(run.test.wer for run in ours) / wer,
        statistics.mean(run.test.cer for run in ours) / cer,
        *([statistics.mean(run.joint.wer for run in ours) / wer] if all(run.joint for run in ours) else []),
    ]
    return ", ".join(f"{figure:.2f}" for figure in figures)
