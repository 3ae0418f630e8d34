"""SIGKILLs of ranks under torchrun, which restarts them: each run must end like an undisturbed one."""

import random

from benchmarks.measuring.faults.effort import Effort, FaultTable
from tests.conftest import write_corpus
from tests.faults.under_torchrun import SAVE_STEPS, RankRun, kill_ranks, train_undisturbed, what_differs

KILLS_A_RUN, RUNS = 5, 2


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per run."""
    draw = random.Random(effort.seed)
    corpus = write_corpus(effort.folder / "corpus", {"train": 26, "valid": 5})
    rows, failures = [], []
    for sharded in (False, True):
        name = "FSDP2" if sharded else "data parallel"
        undisturbed = train_undisturbed(RankRun(corpus, effort.folder / f"undisturbed_{sharded}", sharded))
        for number in range(effort.count(RUNS, short=1)):
            run = RankRun(corpus, effort.folder / f"killed_{sharded}_{number}", sharded)
            where = kill_ranks(run, effort.count(KILLS_A_RUN, short=1), draw)
            found = what_differs(run, undisturbed)
            rows.append((name, str(len(where)), "; ".join(where), str(len(found))))
            failures += [f"{name}: {difference}" for difference in found]
    return FaultTable(
        title=f"Ranks killed under torchrun: {sum(int(row[1]) for row in rows)} SIGKILLs, two ranks",
        columns=("run", "kills", "which", "differences from the undisturbed run"),
        rows=tuple(rows),
        failures=tuple(failures),
        notes=(
            f"Saved every {SAVE_STEPS} steps. Compared bit for bit: weights, optimizer, counters, every logged loss.",
        ),
    )
