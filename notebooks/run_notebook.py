#!/usr/bin/env python3
"""Execute the notebook and store its outputs in it.

    python3 notebooks/run_notebook.py
    python3 notebooks/run_notebook.py --small

It runs in a temporary folder, in about 40 minutes on two CPU cores, or with small settings, from which the model learns
nothing, in half a minute. `--folder` keeps the files that it writes. Needs nbclient, ipykernel and matplotlib (extra
`test`).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass

import nbformat
from nbclient import NotebookClient

from konkanivani.command_line import read_flags, run_script

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "konkanivani.ipynb"
SECONDS = 7200  # per cell
PROGRESS_BAR = re.compile(r"\s*\d+%\|")


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    small: bool = False
    """Small settings, for a quick test of the notebook."""
    folder: str | None = None
    """Folder to run in (default: a temporary one)."""


def execute(notebook: nbformat.NotebookNode, folder: Path, is_small: bool) -> nbformat.NotebookNode:
    """Run all cells in `folder`; raises CellExecutionError if a cell fails."""
    names = {"PYTHONPATH": str(ROOT), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    if is_small:
        names["KONKANIVANI_SMALL"] = "1"
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}})
    return client.execute(env=os.environ | names)


def without_machine(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Join the text outputs of each cell, without progress bars, execution times and the paths of this machine.

    Pictures stay, after the text.
    """
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if not cell.get("outputs"):
            continue
        # Lines of stdout and stderr arrive in any number of outputs; a carriage return overwrites the line.
        text = "".join(output.get("text", "") for output in cell.outputs)
        lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
        kept = "\n".join(line for line in lines if line and not PROGRESS_BAR.match(line))
        kept = kept.replace(str(folder), ".").replace(str(ROOT), "konkanivani")
        pictures = [
            nbformat.v4.new_output("display_data", {"image/png": output["data"]["image/png"]})
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        ]
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=kept), *pictures]
    return notebook


def store_outputs(flags: Flags) -> str:
    """Execute the notebook and write its outputs into it."""
    with contextlib.ExitStack() as stack:
        name = flags.folder or stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        executed = execute(nbformat.read(NOTEBOOK, as_version=4), folder, flags.small)
        nbformat.write(without_machine(executed, folder), NOTEBOOK)
    return f"{NOTEBOOK.relative_to(ROOT)}: outputs written"


if __name__ == "__main__":
    sys.exit(run_script(lambda: store_outputs(read_flags(Flags, sys.argv[1:]))))
