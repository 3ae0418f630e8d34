"""The notebook runs from start to end, and the stored outputs come from such a run.

The whole notebook runs with --full only; its settings and outputs are always checked.
"""

import ast
import copy
import dataclasses
import json

import nbclient
import nbformat
import pytest

import konkanivani
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


def unknown_settings(source: str) -> list[str]:
    """Return the keywords in calls of konkanivani's dataclasses that are not among their fields."""
    unknown = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        kind = getattr(konkanivani, getattr(call.func, "id", ""), None)
        if kind is not None and dataclasses.is_dataclass(kind):
            fields = {field.name for field in dataclasses.fields(kind)}
            unknown += [f"{call.func.id}.{word.arg}" for word in call.keywords if word.arg not in fields]
    return unknown


def test_settings_exist_and_each_cell_has_its_output(stored):
    source = "\n".join(cell.source for cell in stored.cells if cell.cell_type == "code")
    imported = [name for name in ast.walk(ast.parse(source)) if isinstance(name, ast.ImportFrom)]
    names = {alias.name for node in imported if node.module == "konkanivani" for alias in node.names}
    assert len(names) > 5 and all(hasattr(konkanivani, name) for name in names)
    assert unknown_settings(source) == []
    assert unknown_settings("TrainConfig(run=RunConfig(presets=1))") == ["RunConfig.presets"]
    assert all(map(str.strip, outputs(stored)[2:])) and pictures(stored) == 1


@pytest.mark.full
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
    assert len(outputs(stored)) == len(text)
    assert pictures(executed) == pictures(stored) == 1


def test_negative_control_failing_cell_raises(stored, tmp_path):
    broken = copy.deepcopy(stored)
    broken.cells = [cell for cell in broken.cells if cell.cell_type == "code"][:1]
    broken.cells[0].source += "\nrun_nothing()"
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="run_nothing"):
        execute(broken, tmp_path, is_small=True)
