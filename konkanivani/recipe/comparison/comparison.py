"""Comparison of models that are trained in sequence on the same data, each in its own folder."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from konkanivani.base.console import say
from konkanivani.base.errors import UsageError
from konkanivani.base.files import atomic_write
from konkanivani.recipe.comparison.candidates import Candidate
from konkanivani.recipe.comparison.outcome import Kept, Outcome, outcome_of, read_kept, write_kept
from konkanivani.recipe.comparison.trainer import Trainer

REPORT = "comparison.json"


def check_conditions(conditions: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Raise a UsageError if the folder has a run of one of the models, by name, under different conditions."""
    for name in conditions:
        kept = read_kept(folder / name)
        if other := kept.differences(conditions[name]) if kept else []:
            raise UsageError(
                f"{folder / name} contains a run with different {', '.join(other)}, so its result is not "
                "comparable. Use the same flags as before, or another --folder."
            )


def compare(
    candidates: Sequence[Candidate], conditions: Mapping[str, Mapping[str, str]], folder: Path, trainer: Trainer
) -> list[Outcome]:
    """Train the models that are not finished, and write the report after each one.

    Raises Interrupted after a signal, once the trainer has saved and exited.
    """
    outcomes: list[Outcome] = []
    for number, candidate in enumerate(candidates, start=1):
        trainer.check()
        place = folder / candidate.name
        beginning = f"Model {number} of {len(candidates)}, {candidate.name}"
        kept = read_kept(place)
        if kept is not None and kept.outcome is not None and kept.is_finished:
            say(f"{beginning}: already trained.", sys.stderr)
            outcome = kept.outcome
        else:
            say(f"{beginning}: training in {place}.", sys.stderr)
            outcome = _train(candidate, conditions[candidate.name], place, trainer)
        outcomes.append(outcome)
        with atomic_write(folder / REPORT) as partial:
            partial.write_text(report_of(outcomes) + "\n", encoding="utf-8")
    return outcomes


def report_of(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as one line of JSON."""
    return json.dumps({"models": [dataclasses.asdict(outcome) for outcome in outcomes]}, ensure_ascii=False)


def _train(candidate: Candidate, conditions: Mapping[str, str], place: Path, trainer: Trainer) -> Outcome:
    kept = Kept(conditions)
    write_kept(place, kept)
    folders = ("--checkpoint_dir", str(place / "checkpoints"), "--log_dir", str(place / "logs"))
    ended = trainer.run([*candidate.flags, *folders, "--resume", "auto"])
    if ended.exit_code == 0:
        # The trainer prints its JSON line last.
        summary = json.loads(ended.said[-1])
        outcome = outcome_of(candidate.name, candidate.source, summary)
        write_kept(place, dataclasses.replace(kept, summary=summary, outcome=outcome))
    else:
        # An interrupted run has no outcome, so that the next call resumes it: raise before a failure is recorded.
        trainer.check()
        outcome = Outcome(candidate.name, candidate.source, ended.exit_code, ended.reason)
        write_kept(place, dataclasses.replace(kept, outcome=outcome))
    return outcome
