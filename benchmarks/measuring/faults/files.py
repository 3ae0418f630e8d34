"""Truncated checkpoints and flipped bits: the newest checkpoint of a real run is damaged, then all of them."""

from benchmarks.measuring.faults.effort import Effort, FaultTable
from konkanivani.training.checkpoint.checkpointer import LAST
from tests.faults.corrupt_checkpoints import flips, refuses_where_all_are_bad, truncations, try_damages
from tests.faults.small_run import train_small_run

FLIPS = 1000


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per kind of damage."""
    checkpoints = train_small_run(effort.folder / "run") / "checkpoints"
    whole = (checkpoints / LAST).read_bytes()
    kinds = {
        "cut to 0 bytes, 1 byte, 50 %, 99.99 %, all but a byte": truncations(whole),
        "one bit flipped": flips(whole, effort.count(FLIPS, 50), effort.seed),
    }
    rows, failures = [], []
    for number, (name, damages) in enumerate(kinds.items()):
        found = try_damages(checkpoints, damages, effort.folder / f"work{number}")
        wrong = [outcome for outcome in found if outcome not in ("detected", "harmless")]
        rows.append((name, str(found.total()), str(found["detected"]), str(found["harmless"]), str(len(wrong))))
        failures += wrong
    # Every checkpoint of a run: empty, only the signature of a ZIP archive, the first half.
    contents = (b"", b"PK", whole[: len(whole) // 2])
    refused = [
        refuses_where_all_are_bad(checkpoints, content, effort.folder / f"bad{number}")
        for number, content in enumerate(contents)
    ]
    rows.append(("every checkpoint damaged", str(len(refused)), str(sum(refused)), "0", str(refused.count(False))))
    failures += ["a run began anew over damaged checkpoints"] * refused.count(False)
    return FaultTable(
        "Checkpoints that lie",
        ("damage to the newest checkpoint", "tried", "detected", "harmless", "read wrongly"),
        tuple(rows),
        tuple(failures),
        (
            "Detected: named, moved aside, the previous one used (where all are damaged: refused, no fresh start). "
            "Harmless: what is loaded is what was saved, every tensor bit for bit.",
        ),
    )
