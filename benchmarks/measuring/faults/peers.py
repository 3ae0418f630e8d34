"""The same state saved in four ways, each killed, flipped and cut: in an environment of its own, made once."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort, FaultTable
from konkanivani.errors import ResourceError

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / ".venv.peers"
PACKAGES = ("speechbrain", "transformers", "accelerate")
OUTCOMES = ("newest, right", "an older one, right", "begins anew", "crashes", "wrong without a word")


def measure(effort: Effort) -> FaultTable:
    """A row for each way and kind of fault. What fails here is ours: for the others it is what is measured."""
    python = make_environment()
    command = [str(python), str(Path(__file__).with_name("savers.py")), "--folder", str(effort.folder)]
    counts = {"--kills": effort.count(50, short=3), "--flips": effort.count(200, short=10), "--seed": effort.seed}
    command += [word for name, number in counts.items() for word in (name, str(number))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise ResourceError(
            f"The command {' '.join(command)} ended with {done.returncode}; what it said stands above. Mend that and "
            "start again."
        )
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


def make_environment() -> Path:
    """The Python of an environment that has the other packages and our PyTorch; a ResourceError says why not."""
    python = ENVIRONMENT / "bin" / "python"
    if _has_packages(python):
        return python
    print(f"Making {ENVIRONMENT} with {', '.join(PACKAGES)}.", file=sys.stderr, flush=True)
    venv.create(ENVIRONMENT, with_pip=True)
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "this_project.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode or not _has_packages(python):
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ResourceError(
            f"The packages {', '.join(PACKAGES)} could not be installed into {ENVIRONMENT}: {reason} Start this part "
            "once with a network, or leave it out of --parts."
        )
    return python


def _has_packages(python: Path) -> bool:
    if not python.exists():
        return False
    imports = f"import torch, {', '.join(PACKAGES)}"
    return subprocess.run([str(python), "-c", imports], capture_output=True).returncode == 0


def _times(row: dict[str, object]) -> int:
    return sum(row.get(outcome, 0) for outcome in OUTCOMES)
