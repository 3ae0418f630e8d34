#!/usr/bin/env python3
"""Compare imported NeMo models with NeMo itself: NeMo 3.0 recreates the golden tensors, which are compared with ours.

    python3 benchmarks/import_parity.py --output tests/nemo
    python3 benchmarks/import_parity.py --large indic_random.nemo

NeMo is installed into a separate environment (300 MB), with the front end's file of NeMo 1.23. The models are tiny and
random: x4 like IndicConformer, x8 like FastConformer, x8 with 128 bands and without biases like Parakeet. The second
command writes a file of the published IndicConformer's size with random weights, without NeMo, to time import_asr.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import os
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import ResourceError

NEMO, OLDER = "nemo_toolkit[asr]==3.0.0", "nemo_toolkit==1.23.0"
OLDER_FEATURES = "nemo/collections/asr/parts/preprocessing/features.py"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    output: str | None = None
    """Folder for NeMo's files and golden tensors (None: compare and delete them)."""
    large: str | None = None
    """Only write a .nemo file of 523 MB of random weights to this path."""
    nemo: str | None = None
    """Python interpreter with NeMo 3.0 (None: an environment in --folder, created if missing)."""
    folder: str = "~/.cache/konkanivani/peers"
    """Folder for the environment of NeMo."""


def compare(flags: Flags) -> str:
    """Return the largest difference of each tensor, one line per file."""
    from benchmarks.measuring.nemo.large_file import write_large
    from benchmarks.measuring.peers.environment import peer_python

    if flags.large:
        write_large(Path(flags.large))
        return f"{flags.large}: {Path(flags.large).stat().st_size / 1e6:.0f} MB."
    python = Path(flags.nemo) if flags.nemo else peer_python(Path(flags.folder).expanduser(), (NEMO,))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(flags.output or scratch)
        out.mkdir(parents=True, exist_ok=True)
        script = ROOT / "benchmarks" / "measuring" / "nemo" / "goldens.py"
        run([str(python), str(script), str(out), str(older_features(python, Path(scratch)))])
        return "\n".join(measured(out))


def older_features(python: Path, scratch: Path) -> Path:
    """Extract the front end's file of NeMo 1.23 from its wheel."""
    run([str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), OLDER])
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        return Path(wheel.extract(OLDER_FEATURES, scratch))


def run(command: list[str]) -> None:
    """Run a command of the other environment; print its output only on failure."""
    # Offline, so that NeMo does not look for models or tokenizers on the Hugging Face hub.
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ResourceError(f"The command {' '.join(command)} failed: {last}. Check that PyPI can be reached.")


def measured(folder: Path) -> list[str]:
    """Return the differences from the golden tensors, one line per file."""
    from tests.nemo.goldens import FILES, distances_of

    lines = []
    for name in (*FILES, "older"):
        found, has_texts = distances_of(folder, name)
        words = ", ".join(f"{part} {distance:.1e}" for part, distance in found.items())
        lines.append(f"{name}: {words}; the same greedy texts: {'yes' if has_texts else 'no'}")
    return lines


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
