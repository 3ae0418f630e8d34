#!/usr/bin/env python3
"""Execute the notebook with small settings and store its outputs in it.

    python3 benchmarks/run_notebook.py

It runs in a temporary folder, in about half a minute on two CPU cores. Needs nbclient and ipykernel (extra `test`).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import os
import re
import tempfile

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "konkanivani.ipynb"
SECONDS = 600  # per cell
PROGRESS_BAR = re.compile(r"\s*\d+%\|")


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run all cells in `folder` with small settings; raises CellExecutionError if a cell fails."""
    names = {"KONKANIVANI_SMALL": "1", "PYTHONPATH": str(ROOT), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}})
    return client.execute(env=os.environ | names)


def without_machine(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Join the text outputs of each cell, without progress bars, execution times and the paths of this machine."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if not cell.get("outputs"):
            continue
        # Lines of stdout and stderr arrive in any number of outputs; a carriage return overwrites the line.
        text = "".join(output.get("text", "") for output in cell.outputs)
        lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
        kept = "\n".join(line for line in lines if line and not PROGRESS_BAR.match(line))
        kept = kept.replace(str(folder), ".").replace(str(ROOT), "konkanivani")
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=kept)]
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        executed = execute(nbformat.read(NOTEBOOK, as_version=4), Path(name))
        nbformat.write(without_machine(executed, Path(name)), NOTEBOOK)
    print(f"{NOTEBOOK.relative_to(ROOT)}: outputs written")
