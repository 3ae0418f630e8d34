"""The notebook runs from start to end, and the stored outputs come from such a run."""

import copy
import json

import nbclient
import nbformat
import pytest

from notebooks.run_notebook import NOTEBOOK, execute, without_machine
from tests.conftest import ROOT
from tests.whisper.small_model import write_model


@pytest.fixture(scope="module")
def stored() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the text printed by each code cell."""
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: nbformat.NotebookNode) -> int:
    """Return the number of pictures."""
    return sum("image/png" in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", ()))


def test_notebook_runs_from_start_to_end(stored, tmp_path, monkeypatch):
    write_model(tmp_path / "whisper")
    monkeypatch.setenv("KONKANIVANI_WHISPER", str(tmp_path / "whisper"))
    executed = without_machine(execute(copy.deepcopy(stored), tmp_path, is_small=True), tmp_path)
    text = outputs(executed)
    joined = "\n".join(text)
    assert "1 epochs, 3 steps" in joined and "2 epochs, 6 steps" in joined
    assert "Resuming from checkpoints/checkpoint_last.pt: step 3." in joined
    assert "Traced for T4" in joined and "best validation score" in text[-1]
    row = json.loads((tmp_path / "data/builtin/test.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert f"reference:  {row['text']}" in joined
    assert str(tmp_path) not in joined and str(ROOT) not in joined
    assert len(outputs(stored)) == len(text) and all(map(str.strip, outputs(stored)[2:]))
    assert pictures(executed) == pictures(stored) == 1


def test_negative_control_failing_cell_raises(stored, tmp_path):
    broken = copy.deepcopy(stored)
    broken.cells = [cell for cell in broken.cells if cell.cell_type == "code"][:1]
    broken.cells[0].source += "\nrun_nothing()"
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="run_nothing"):
        execute(broken, tmp_path, is_small=True)
