"""The measures of the house, which may only become stricter (docs/architecture.md): what is not tested grows.

That no import goes upward and nothing is in a circle is checked beside the tests, by the contracts in setup.cfg.
"""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

from konkanivani.training.loop import train
from konkanivani.training.step import train_step
from tests.conftest import ROOT, run_script

PACKAGE = ROOT / "konkanivani"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_LOOP_LINES = 300, 50, 40
MAX_CALLS_TO_LOOP, MAX_CALLS_TO_BACKWARD, MAX_FILES_IN_A_STEP = 2, 5, 20
MAX_FILES_IN_A_FOLDER, MAX_ENTRIES, MAX_ROOM_IMPORTS = 15, 10, 31
MAX_PACKAGE_LINES, MAX_TEST_LINES = 27_226, 25_338  # beside a recogniser's own folders
# Lists of settings, of their rules and of findings, which no cut would make easier to read.
LONGER_FILES = {
    "base/config.py": 400,
    "base/rules.py": 330,
    "data/health/findings.py": 400,
    "data/health/health.py": 370,
}


def sources(folder: Path) -> dict[str, str]:
    """Every Python file below the folder, by its path there."""
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def lines(text: str) -> int:
    return len(text.splitlines())


def too_long(files: dict[str, str]) -> list[str]:
    return [name for name, text in files.items() if lines(text) > LONGER_FILES.get(name, MAX_FILE_LINES)]


def long_functions(files: dict[str, str]) -> list[str]:
    return [
        f"{name}:{node.name}"
        for name, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def full_folders(files: dict[str, str]) -> list[str]:
    """The folders of more files than a person keeps apart; what only makes a folder a package does not count."""
    folders = [name.rpartition("/")[0] for name in files if not name.endswith("__init__.py")]
    return sorted({folder for folder in folders if folders.count(folder) > MAX_FILES_IN_A_FOLDER})


def room_imports(files: dict[str, str]) -> set[tuple[str, str]]:
    """Which room, a folder of the package, imports from which other one."""
    found = set()
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("konkanivani."):
                found.add((name.partition("/")[0], node.module.split(".")[1]))
    return {(one, other) for one, other in found if one != other and not one.endswith(".py")}


def test_no_file_is_long():
    assert too_long(sources(PACKAGE)) == []


@pytest.mark.parametrize("folder", ["konkanivani", "training_scripts", "benchmarks"])
def test_functions_fit_a_screen(folder):
    assert long_functions(sources(ROOT / folder)) == []


def test_no_folder_is_full():
    assert full_folders(sources(PACKAGE)) == []
    entries = [path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "__init__.py")]
    assert len(entries) <= MAX_ENTRIES


def test_rooms_know_few_rooms():
    assert len(room_imports(sources(PACKAGE))) <= MAX_ROOM_IMPORTS


def house_lines(folder: Path) -> int:
    """The lines below the folder, but those of another recogniser, whose own folder burdens nobody."""
    return sum(lines(text) for name, text in sources(folder).items() if not {"whisper", "nemo"} & set(name.split("/")))


def test_package_and_tests_do_not_grow():
    assert house_lines(PACKAGE) <= MAX_PACKAGE_LINES and house_lines(ROOT / "tests") <= MAX_TEST_LINES


def test_the_loop_and_the_step_can_be_read_at_a_glance():
    assert lines(inspect.getsource(train)) <= MAX_LOOP_LINES
    step = inspect.getsource(train_step)
    assert "forward_and_backward" in step and "update(" in step and lines(step) <= MAX_LOOP_LINES


def test_it_is_not_far_from_the_script_to_the_gradient():
    walked = json.loads(run_script("benchmarks/walk.py", "--json").stdout)
    assert walked["script_to_loop"] <= MAX_CALLS_TO_LOOP and walked["step_to_backward"] <= MAX_CALLS_TO_BACKWARD
    assert 1 < walked["files_in_a_step"] <= MAX_FILES_IN_A_STEP


def paths_of(page: str) -> list[Path]:
    """The files and folders that a page names in code, as they lie in the package or in the project."""
    names = re.findall(r"`([a-z_{}, /]+/[a-z_]*(?:\.py)?)`", page)
    return [
        PACKAGE / name if (PACKAGE / name.split("/")[0]).exists() else ROOT / name for name in names if "{" not in name
    ]


def test_the_page_about_the_house_names_what_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = paths_of(page)
    assert len(named) > 30 and [path for path in named if not path.exists()] == []
    assert [
        path for path in paths_of(page.replace("manifest.py", "manifesto.py")) if not path.exists()
    ]  # the negative control
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert all(f" {room} " in page for room in rooms) and len(rooms) == 9


def test_negative_control_what_is_too_much_is_named():
    files = {f"room/{number}.py": "x = 1\n" for number in range(MAX_FILES_IN_A_FOLDER + 1)}
    assert full_folders(files) == ["room"] and full_folders(dict(list(files.items())[1:])) == []
    assert too_long({"a.py": "x\n" * (MAX_FILE_LINES + 1), "b.py": "x\n" * MAX_FILE_LINES}) == ["a.py"]
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert long_functions({"a.py": f"def f():\n{body}", "b.py": f"def g():\n{body[:-10]}"}) == ["a.py:f"]
    inside = {"model/a.py": "from konkanivani.model.b import c\n", "model/b.py": "c = 1\n"}
    assert room_imports(inside) == set()
    assert room_imports(inside | {"data/a.py": "from konkanivani.model.b import c\n"}) == {("data", "model")}
