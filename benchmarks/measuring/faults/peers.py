"""Kills, flipped bits and truncated files for four ways to save the same state, in a separate environment."""

import json
import os
import subprocess
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort, FaultTable
from benchmarks.measuring.peers.environment import peer_python
from konkanivani.base.errors import ResourceError

FOLDER = Path("~/.cache/konkanivani/peers")
PACKAGES = ("speechbrain", "transformers", "accelerate")
OUTCOMES = ("newest, right", "an older one, right", "begins anew", "crashes", "wrong without a word")


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per way and kind of fault; only this trainer's bad outcomes are failures."""
    python = peer_python(FOLDER.expanduser(), PACKAGES)
    command = [str(python), str(Path(__file__).with_name("savers.py")), "--folder", str(effort.folder)]
    counts = {"--kills": effort.count(50, short=3), "--flips": effort.count(200, short=10), "--seed": effort.seed}
    command += [word for name, number in counts.items() for word in (name, str(number))]
    # Offline, since nothing has to be downloaded; one thread, as in the savers.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise ResourceError(
            f"The command {' '.join(command)} ended with {done.returncode}; see its output above. Fix that and "
            "start again."
        )
    # Other lines are output of the toolkits.
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    bad = ("begins anew", "crashes", "wrong without a word")
    ours = [row for row in found if row["saver"] == "KonkaniVani"]
    return FaultTable(
        title="Kills, flipped bits and cut files: four ways to save 19 MB after every step",
        columns=("way", "fault", "times", *OUTCOMES),
        rows=tuple(
            (row["saver"], row["fault"], str(_times(row)), *(str(row.get(outcome, 0)) for outcome in OUTCOMES))
            for row in found
        ),
        failures=tuple(f"{row['fault']}: {row[name]} x {name}" for row in ours for name in bad if row.get(name)),
    )


def _times(row: dict[str, object]) -> int:
    return sum(row.get(outcome, 0) for outcome in OUTCOMES)
