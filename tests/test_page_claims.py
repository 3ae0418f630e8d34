"""Each promise of docs/reliability.md names its tests; each entry of docs/experiments.md has a date and four parts."""

import re

import pytest

from tests.conftest import ROOT

RELIABILITY, EXPERIMENTS = (ROOT / "docs" / name for name in ("reliability.md", "experiments.md"))
PARTS = ["Question", "Command", "Numbers", "Decision"]
MAX_WORDS = {"reliability.md": 1150, "experiments.md": 3200, "architecture.md": 800, "colab.md": 300}
MAX_WORDS |= {"training.md": 1500, "memory.md": 1300, "performance.md": 1110, "scaling.md": 850}
REMOVED = "docs/" + "LOG.md"  # the former name of docs/experiments.md


def promises(page: str) -> dict[str, list[str]]:
    """Return the paths of the tests that the second column of the promise tables names, by promise."""
    rows = {}
    for table in re.findall(r"\| promise \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", page):
        for row in table.splitlines():
            promise, tests = (cell.strip() for cell in row.strip("|").split("|"))
            rows[promise] = re.findall(r"`([^`]+)`", tests)
    return rows


def missing_tests(page: str) -> list[str]:
    """Return the promises without a test, or with one that does not exist."""
    result = promises(page).items()
    return [promise for promise, tests in result if not tests or not all((ROOT / test).is_file() for test in tests)]


def entries(page: str) -> list[tuple[str, list[str]]]:
    """Return the date of each experiment and the names of its parts."""
    matches = re.findall(r"^## (\S+) .*\n((?:(?!## ).*\n?)*)", page, re.MULTILINE)
    return [(date, re.findall(r"^- \*\*(\w+):\*\*", body, re.MULTILINE)) for date, body in matches]


def test_each_promise_names_existing_tests():
    page = RELIABILITY.read_text(encoding="utf-8")
    assert len(promises(page)) >= 25 and missing_tests(page) == []


def files_named_by(page: str) -> list[str]:
    """Return the Python files that a page names."""
    return re.findall(r"`([\w/]+\.py)`", page)


def missing_files(page: str) -> list[str]:
    """Return the Python files that a page names and that are neither in the repository nor in one of these folders."""
    folders = (ROOT, ROOT / "konkanivani", ROOT / "training_scripts")
    return [name for name in files_named_by(page) if not any((folder / name).is_file() for folder in folders)]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_each_file_named_by_a_page_exists(path):
    page = path.read_text(encoding="utf-8")
    # Experiments name the benchmarks of their commit.
    assert missing_files(re.sub(r"(?m)^.*at commit.*$", "", page)) == []


def test_pages_name_files_and_a_missing_one_is_found():
    assert len(files_named_by(RELIABILITY.read_text(encoding="utf-8"))) >= 25
    assert len(files_named_by((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))) >= 40
    assert missing_files("`flags.py`, `training/no_module.py`") == ["training/no_module.py"]  # negative control


def test_negative_control_promise_without_test_is_found():
    page = RELIABILITY.read_text(encoding="utf-8")
    assert len(missing_tests(page.replace("test_kills.py", "test_kill.py"))) == 1
    assert missing_tests("| promise | test |\n|---|---|\n| It is safe | |\n") == ["It is safe"]


def test_experiments_are_dated_newest_first_and_complete():
    result = entries(EXPERIMENTS.read_text(encoding="utf-8"))
    dates = [date for date, _ in result]
    assert len(result) > 20 and all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
    assert dates == sorted(dates, reverse=True)
    assert [parts for _, parts in result if parts != PARTS] == []


def test_negative_control_experiment_without_decision_is_found():
    page = EXPERIMENTS.read_text(encoding="utf-8").replace("- **Decision:**", "- decision:", 1)
    assert [parts for _, parts in entries(page) if parts != PARTS] == [PARTS[:-1]]


@pytest.mark.parametrize("name", MAX_WORDS)
def test_page_is_within_word_limit(name):
    assert len((ROOT / "docs" / name).read_text(encoding="utf-8").split()) <= MAX_WORDS[name]


def test_no_source_names_a_removed_page():
    folders = ("konkanivani", "training_scripts", "benchmarks", "tests")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 200
    assert [path.name for path in sources if REMOVED in path.read_text(encoding="utf-8")] == []
