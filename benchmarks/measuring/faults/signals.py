"""SIGTERM, SIGINT and a closed terminal during training: seconds until the process has saved and ended, and losses."""

import itertools
import random
import signal
import statistics
from collections.abc import Sequence
from typing import get_args

from benchmarks.measuring.faults.effort import Effort, FaultTable
from tests.conftest import write_corpus
from tests.faults.killing import what_differs
from tests.faults.signalling import (
    Ending,
    Target,
    end_by_closing_its_terminal,
    end_by_signal,
    end_by_two,
    end_while_workers_hang,
    run_of_preset,
    run_to_be_signalled,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIX_SECONDS = range(14, 15)  # words per utterance, about 6 s of audio
MAX_SECONDS = 5.0  # limit for the minimal preset, at the 95th percentile
DELAY = 2.0  # the signal comes within so many seconds after the first step: about two steps of the minimal preset


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per signal and receiver, for models of two presets on utterances of 6 s."""
    draw = random.Random(effort.seed)
    counts = {"train": 24, "valid": 4}
    corpus = write_corpus(effort.folder / "long", counts, lengths=SIX_SECONDS)
    minimal, original = (run_of_preset(corpus, effort.folder / name, name) for name in ("minimal", "original"))
    small_corpus = write_corpus(effort.folder / "short", {"train": 26, "valid": 5})
    small = run_to_be_signalled(small_corpus, effort.folder / "small")
    endings = {}
    for number, target in itertools.product(SIGNALS, get_args(Target)):
        tries = range(effort.count(20, short=2))
        endings[f"minimal, {number.name} to {target}"] = [
            end_by_signal(minimal, number, target, 2 * (attempt % 2), DELAY * draw.random()) for attempt in tries
        ]
    endings["minimal, its terminal closes"] = [
        end_by_closing_its_terminal(minimal, 2 * (attempt % 2)) for attempt in range(effort.count(20, short=2))
    ]
    tries = range(effort.count(6, short=1))
    endings["original, SIGTERM to the process"] = [
        end_by_signal(original, signal.SIGTERM, "the process", 2, DELAY * draw.random()) for _ in tries
    ]
    endings["minimal, SIGTERM while the workers hang"] = [
        end_while_workers_hang(minimal, signal.SIGTERM) for _ in range(effort.count(5, short=1))
    ]
    endings["minimal, a second signal to its group (seconds from it on)"] = [
        end_by_two(minimal, number, 2, draw.random())
        for number, _ in zip(itertools.cycle(SIGNALS), range(effort.count(20, short=2)), strict=False)
    ]
    endings["small model, SIGINT to its group"] = [
        end_by_signal(small, signal.SIGINT, "its group", 2, 0.5 * draw.random()) for _ in range(effort.count(20, 2))
    ]
    failures = [f"{name}: {said}" for name, found in endings.items() for each in found for said in each.complaints]
    failures += [
        f"{name}: {_percentile(found):.1f} s at the 95th percentile"
        for name, found in endings.items()
        if name.startswith(("minimal, SIG", "minimal, its")) and _percentile(found) > MAX_SECONDS
    ]
    differences = what_differs(small, run_to_be_signalled(small_corpus, effort.folder / "undisturbed"))
    return FaultTable(
        title=f"Asked to stop: {sum(map(len, endings.values()))} lives ended by signals",
        columns=("model, signal", "times", "p50 s", "p95 s", "most s", "steps lost or exit codes wrong"),
        rows=tuple(_row(name, found) for name, found in endings.items()),
        failures=(*failures, *differences),
        notes=(
            "Seconds from the signal to the end of the process, one thread on a shared machine; half of the lives read "
            "their audio in two workers. Exit codes 143, 130 and 129, nobody left in the process group. The small "
            f"model's run, {small.logged_step()} steps long, differs from one that nobody disturbed in "
            f"{len(differences)} places.",
        ),
    )


def _row(name: str, found: Sequence[Ending]) -> tuple[str, ...]:
    seconds = [each.seconds for each in found]
    shown = statistics.median(seconds), _percentile(found), max(seconds)
    return (name, str(len(found)), *(f"{number:.2f}" for number in shown), str(sum(bool(e.complaints) for e in found)))


def _percentile(found: Sequence[Ending]) -> float:
    """Return the 95th percentile of the seconds, the nearest rank without interpolation."""
    seconds = sorted(each.seconds for each in found)
    return seconds[int(0.95 * (len(seconds) - 1) + 0.5)]
