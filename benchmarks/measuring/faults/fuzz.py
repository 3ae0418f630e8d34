"""Randomly changed audio, media, manifest lines, checkpoints and flags: outcomes, times and memory."""

from benchmarks.measuring.faults.effort import Effort, FaultTable
from tests.faults.fuzz import Kind, fuzz
from tests.faults.small_run import train_small_run

COUNTS: dict[Kind, int] = {"audio": 10_000, "media": 1_000, "manifests": 5_000, "checkpoints": 1_000, "flags": 2_000}
NAMES: dict[Kind, str] = {
    "audio": "audio headers",
    "media": "containers of sound and film",
    "manifests": "manifest lines",
    "checkpoints": "checkpoints",
    "flags": "sets of flags",
}
MAX_NAMED = 5  # faults listed per kind of input


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per kind of input."""
    run = train_small_run(effort.folder / "run")
    rows, failures = [], []
    for kind, full in COUNTS.items():
        tally = fuzz(kind, effort.count(full, full // 100), effort.seed, effort.folder / kind, run)
        refused = {name: count for name, count in sorted(tally.outcomes.items()) if name not in ("taken", "fault")}
        outcomes = ", ".join(f"{count:,} {name}" for name, count in refused.items())
        total = f"{sum(tally.outcomes.values()):,}"
        numbers = f"{tally.slowest:.2f} s", f"{max(0.0, tally.largest):.0f} MiB", str(tally.outcomes["fault"])
        rows.append((NAMES[kind], total, f"{tally.outcomes['taken']:,}", outcomes, *numbers))
        failures += [f"{NAMES[kind]}: {fault}" for fault in tally.faults[-MAX_NAMED:]]
    return FaultTable(
        "Input changed at random",
        ("input", "tried", "taken", "refused with an error of ours", "slowest", "largest growth", "faults"),
        tuple(rows),
        tuple(failures),
        (
            "A fault: another error, a hang over 5 s, growth over 200 MiB, a file written elsewhere, a program started;"
            " of containers also 5 s of a processor or 250 MiB in the process that decodes, or its death.",
        ),
    )
