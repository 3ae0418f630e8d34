"""SIGKILLs of a training process at every point of a save and at random times; two runs are killed repeatedly."""

import random
from collections import defaultdict

from benchmarks.measuring.faults.effort import Effort, FaultTable
from tests.conftest import write_corpus
from tests.faults.killing import (
    SAVE_STEPS,
    Death,
    kill_at_points,
    kill_at_random,
    run_to_be_killed_at_points,
    run_to_be_killed_at_random,
    what_differs,
)

AT_POINTS, AT_RANDOM, ANEW = 105, 88, 12


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per point of a save, and rows for the random times."""
    draw = random.Random(effort.seed)
    corpus = write_corpus(effort.folder / "corpus", {"train": 26, "valid": 5, "test": 5})
    first = run_to_be_killed_at_points(corpus, effort.folder / "points")
    second = run_to_be_killed_at_random(corpus, effort.folder / "random")
    at_points = kill_at_points(first, effort.count(AT_POINTS, short=21))
    at_random = [kill_at_random(second, draw) for _ in range(effort.count(AT_RANDOM, short=6))]
    at_random += [kill_at_random(second, draw, starts_anew=True) for _ in range(effort.count(ANEW, short=1))]
    # The undisturbed runs end at the same step as the killed ones.
    differences = [
        *what_differs(first, run_to_be_killed_at_points(corpus, effort.folder / "undisturbed_points")),
        *what_differs(second, run_to_be_killed_at_random(corpus, effort.folder / "undisturbed_random")),
    ]
    deaths = at_points + at_random
    failures = [f"{death.where}: {complaint}" for death in deaths for complaint in death.complaints]
    return FaultTable(
        title=f"Killed in the act: {len(deaths)} SIGKILLs",
        columns=("killed", "times", "runs lost", "files that cannot be read", "steps lost at most", "save interval"),
        rows=(*_rows("in a save, ", at_points, 1), *_rows("at random, ", at_random, SAVE_STEPS)),
        failures=(*failures, *differences),
        notes=(
            f"Two runs lived through them, {first.logged_step()} and {second.logged_step()} steps long. Compared with "
            "runs to the same step that nobody killed, weights, optimizer state and logged losses differ in "
            f"{len(differences)} places; the logs hold each step once.",
        ),
    )


def _rows(prefix: str, deaths: list[Death], interval: int) -> list[tuple[str, ...]]:
    by_place = defaultdict(list)
    for death in deaths:
        by_place[death.where].append(death.aftermath)
    return [
        (
            prefix + place,
            str(len(found)),
            # Lost: no checkpoint although more than one save interval was logged.
            str(sum(each.saved == 0 and each.logged > interval for each in found)),
            str(sum(len(each.unsound) for each in found)),
            str(max(each.steps_lost for each in found)),
            f"{interval} step{'s' if interval > 1 else ''}",
        )
        for place, found in by_place.items()
    ]
