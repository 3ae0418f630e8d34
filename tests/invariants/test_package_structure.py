"""Limits on file and function length, folder size and imports between packages (docs/architecture.md).

The direction of imports and the absence of cycles are checked by the contracts in setup.cfg.
"""

import ast
import inspect
import io
import itertools
import json
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

from konkanivani.training.loop import train
from konkanivani.training.step import train_step
from tests.conftest import ROOT, run_script

PACKAGE = ROOT / "konkanivani"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_LOOP_LINES = 500, 50, 40
MAX_CALLS_TO_LOOP, MAX_CALLS_TO_FEED_FORWARD, MAX_CALLS_TO_BACKWARD = 2, 9, 4
MAX_FILES_IN_A_STEP, MAX_FILES_IN_A_PLAIN_STEP = 21, 16  # with and without the passes of ops/passes.py
MAX_FIELDS, MAX_IMPORTS = 10, 25
MAX_FILES_IN_A_FOLDER, MAX_PACKAGES, MAX_PACKAGE_IMPORTS = 16, 15, 45

# Records: their fields are columns of a file, a log or a report; no function takes them as a parameter object.
RECORDS = set(
    """
    SourceUtterance Utterance RowNumbers SoundLevels PartHealth SoundHealth Preparation PreparationReport ScoreReport
    Outcome PlanReport StepRecord SkipRecord ValidationRecord MemoryPlan TrainState
    """.split()
)

# Names that were replaced by standard terms on 2026-11-27. Stored keys and old flags keep them, in strings only.
FORMER_NAMES = set(
    """
    begun_share later_parameters OVER_TOKENS begin_head lower_parts Unfilled Window WindowStream WindowGradient
    cut_window Cut Attempts Attempt result_or_end DidNotFit run_as weights_at_hand micro_batches_at_once PlacedWeights
    PlacedBlock _InPlaceOf _Coming onto _Places in_own_precision as_it_is_now by_x by_weight by_inner by_projected
    turned_by turned_up power_guard margins unheard Spoken Asked given_in beginning_with IDLE_WITHOUT OF_OUR_MODELS
    AS_BEFORE NOTHING AlreadyTold MAX_TOLD _cause_of_loss HERE ASKED FOUND agree from_first is_alone breaking_off
    stop_here Speech TrainingSpeech EvaluationSpeech RunSpeech LENGTHS_WITHOUT_HOPE _has_hope hopeful HOURS_HEARD Amount
    MUCH_SPEECH _tell_unless_the_trainer_has_gone shut_in Crossing Twins _fate never_said
    """.split()
)


def sources(folder: Path) -> dict[str, str]:
    """Return the text of every Python file below `folder`, by relative path."""
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def lines(text: str) -> int:
    return len(text.splitlines())


def too_long(files: dict[str, str]) -> list[str]:
    return [name for name, text in files.items() if lines(text) > MAX_FILE_LINES]


def long_functions(files: dict[str, str]) -> list[str]:
    return [
        f"{name}:{node.name}"
        for name, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def large_dataclasses(files: dict[str, str]) -> list[str]:
    """Return the dataclasses with too many fields that are neither groups of flags nor records."""
    results = []
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            is_dataclass = isinstance(node, ast.ClassDef) and "dataclass" in map(decorator_name, node.decorator_list)
            if is_dataclass and node.name not in RECORDS and not is_flags(name, node):
                fields = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
                results += [f"{name}:{node.name}"] if fields > MAX_FIELDS else []
    return results


def is_flags(name: str, node: ast.ClassDef) -> bool:
    """Return whether a dataclass is a group of command-line flags."""
    return name == "config.py" or (name.startswith("cli/") and node.name in ("Flags", "OwnFlags"))


def decorator_name(node: ast.expr) -> str:
    """Return the name of a decorator without its module and arguments."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def import_heavy(files: dict[str, str]) -> list[str]:
    """Return the files with too many import statements."""
    return [
        name
        for name, text in files.items()
        if sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(ast.parse(text))) > MAX_IMPORTS
    ]


def full_folders(files: dict[str, str]) -> list[str]:
    """Return the folders with too many files, `__init__.py` not counted."""
    folders = [name.rpartition("/")[0] for name in files if not name.endswith("__init__.py")]
    return sorted({folder for folder in folders if folders.count(folder) > MAX_FILES_IN_A_FOLDER})


def former_names(files: dict[str, str]) -> list[str]:
    """Return the identifiers that were replaced by standard terms."""
    result = set()
    for name, text in files.items():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string in FORMER_NAMES:
                result.add(f"{name}: {token.string}")
    return sorted(result)


def package_imports(files: dict[str, str]) -> set[tuple[str, str]]:
    """Return the pairs (importing, imported) of top-level packages; commands may import any of them."""
    result = set()
    packages = {name.partition("/")[0] for name in files if "/" in name}
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("konkanivani."):
                result.add((name.partition("/")[0], node.module.split(".")[1]))
    return {(one, other) for one, other in result if one != other and {one, other} <= packages and one != "cli"}


def test_files_are_within_length_limit():
    assert too_long(sources(PACKAGE)) == []


@pytest.mark.parametrize("folder", ["konkanivani", "training_scripts", "benchmarks", "notebooks"])
def test_functions_are_within_length_limit(folder):
    assert long_functions(sources(ROOT / folder)) == []


def test_parameter_objects_have_few_fields():
    assert large_dataclasses(sources(PACKAGE)) == []
    names = {
        node.name for text in sources(PACKAGE).values() for node in ast.walk(ast.parse(text)) if hasattr(node, "name")
    }
    assert names >= RECORDS


def test_files_have_few_imports():
    assert set(import_heavy(sources(PACKAGE))) == set()


def test_folders_are_within_file_limit():
    assert full_folders(sources(PACKAGE)) == []
    packages = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    assert len(packages) <= MAX_PACKAGES


@pytest.mark.parametrize("folder", ["konkanivani", "training_scripts", "benchmarks", "notebooks", "tests"])
def test_former_names_are_not_used(folder):
    assert former_names(sources(ROOT / folder)) == []


def names_used_from(library: str, texts: Iterable[str]) -> set[str]:
    """Return the names that the sources use from a library, as attributes or by import."""
    result = set()
    for node in itertools.chain.from_iterable(map(ast.walk, map(ast.parse, texts))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == library:
            result.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == library:
            result.update(alias.name for alias in node.names)
    return result


def missing_names(library: str, names: set[str]) -> set[str]:
    """Return the names that the library does not have."""
    module = pytest.importorskip(library)
    # dir() lists what transformers would import on access, which takes seconds.
    return {name for name in names - set(dir(module)) if not hasattr(module, name)}


@pytest.mark.parametrize("library, example", [("transformers", "WhisperConfig"), ("peft", "LoraConfig")])
def test_library_names_used_by_benchmarks_exist(library, example):
    """mypy does not analyze these libraries (pyproject.toml), because that would double its time."""
    names = names_used_from(library, sources(ROOT / "benchmarks").values())
    assert example in names
    assert missing_names(library, names) == set()
    old = f"import {library}\n{library}.Former()\nfrom {library} import Older"  # negative control
    assert missing_names(library, names_used_from(library, [old])) == {"Former", "Older"}


def test_packages_import_few_packages():
    assert len(package_imports(sources(PACKAGE))) <= MAX_PACKAGE_IMPORTS


def test_loop_and_step_are_within_length_limit():
    assert lines(inspect.getsource(train)) <= MAX_LOOP_LINES
    step = inspect.getsource(train_step)
    assert "forward_and_backward" in step and "update(" in step and lines(step) <= MAX_LOOP_LINES


def test_call_depth_from_script_to_backward_is_limited():
    depths = json.loads(run_script("benchmarks/walk.py", "--json").stdout)
    assert depths["script_to_loop"] <= MAX_CALLS_TO_LOOP and depths["step_to_backward"] <= MAX_CALLS_TO_BACKWARD
    assert 1 < depths["files_in_a_step"] <= MAX_FILES_IN_A_STEP
    plain = json.loads(run_script("benchmarks/walk.py", "--json", "--plain").stdout)
    assert 4 < plain["step_to_feed_forward"] <= MAX_CALLS_TO_FEED_FORWARD < depths["step_to_feed_forward"]
    assert 1 < plain["files_in_a_step"] <= MAX_FILES_IN_A_PLAIN_STEP


def paths_of(page: str) -> list[Path]:
    """Return the files and folders that a page names in code, relative to the package or the project."""
    names = re.findall(r"`([a-z_{}, /]+/[a-z_]*(?:\.py)?)`", page)
    return [
        PACKAGE / name if (PACKAGE / name.split("/")[0]).exists() else ROOT / name for name in names if "{" not in name
    ]


def test_architecture_page_names_existing_files():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = paths_of(page)
    assert len(named) > 30 and [path for path in named if not path.exists()] == []
    assert [
        path for path in paths_of(page.replace("manifest.py", "manifesto.py")) if not path.exists()
    ]  # negative control
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert all(f" {package} " in page for package in packages) and len(packages) == MAX_PACKAGES


def test_negative_control_each_limit_reports_its_excess():
    files = {f"package/{number}.py": "x = 1\n" for number in range(MAX_FILES_IN_A_FOLDER + 1)}
    assert full_folders(files) == ["package"] and full_folders(dict(list(files.items())[1:])) == []
    assert too_long({"a.py": "x\n" * (MAX_FILE_LINES + 1), "b.py": "x\n" * MAX_FILE_LINES}) == ["a.py"]
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert long_functions({"a.py": f"def f():\n{body}", "b.py": f"def g():\n{body[:-10]}"}) == ["a.py:f"]
    fields = "".join(f"    x{number}: int\n" for number in range(MAX_FIELDS + 1))
    large = f"@dataclasses.dataclass(frozen=True)\nclass Large:\n{fields}"
    assert large_dataclasses({"a.py": large, "b.py": large.replace("Large", "StepRecord")}) == ["a.py:Large"]
    assert large_dataclasses({"a.py": large[: large.rindex("    x")], "config.py": large}) == []
    assert import_heavy({"a.py": "import x\n" * 26, "b.py": "import x\n" * 25}) == ["a.py"]
    assert former_names({"a.py": "Window = 1  # Cut\n", "b.py": "GlobalBatch = 'Window'\n"}) == ["a.py: Window"]
    inside = {"model/a.py": "from konkanivani.model.b import c\n", "model/b.py": "c = 1\n"}
    assert package_imports(inside) == set()
    assert package_imports(inside | {"data/a.py": "from konkanivani.model.b import c\n"}) == {("data", "model")}
