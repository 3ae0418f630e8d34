"""Folders that the processes of a test run share are written once and never changed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, SLOW_FILES, runs_whole_suite
from tests.shared_folders import made_once, shared_root
from tests.timeouts import PROCESS_TIMEOUT


def write_name(folder: Path) -> None:
    (folder / "name").write_text(folder.name)


def fail_on_write(folder: Path) -> None:
    raise AssertionError(f"{folder} is written again")


def test_shared_folder_is_written_once(tmp_path):
    for write in (write_name, fail_on_write):
        with made_once(tmp_path, "shared", write) as folder:
            assert (folder / "name").read_text() == "shared"
    with pytest.raises(AssertionError, match="is written again"), made_once(tmp_path, "other", fail_on_write):
        pass


def test_shared_folder_is_rewritten_after_failure(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), made_once(tmp_path, "shared", fail):
        pass
    with made_once(tmp_path, "shared", write_name) as folder:
        assert {path.name for path in folder.iterdir()} == {"name", "made_once.txt"}


@pytest.mark.parametrize("name", ["name", "another"])
def test_change_in_shared_folder_is_an_error(name, tmp_path):
    with pytest.raises(AssertionError, match="changed the files"), made_once(tmp_path, "shared", write_name) as folder:
        (folder / name).write_text("changed")


WRITE_SLOWLY = """
import sys, time
from pathlib import Path
from tests.shared_folders import made_once

def write(folder):
    with open(folder.parent / "writers", "a") as file:
        file.write("a writer\\n")
    time.sleep(0.3)
    (folder / "late").touch()

with made_once(Path(sys.argv[1]), "shared", write) as folder:
    assert (folder / "late").exists()
"""


def test_processes_wait_for_the_writing_process(tmp_path):
    command = [sys.executable, "-c", WRITE_SLOWLY, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [process.wait(PROCESS_TIMEOUT) for process in processes] == [0, 0, 0]
    assert (tmp_path / "writers").read_text() == "a writer\n"


def test_xdist_workers_share_one_root_folder(tmp_path_factory, monkeypatch):
    own = tmp_path_factory.getbasetemp()
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert shared_root(tmp_path_factory) == own
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    assert shared_root(tmp_path_factory) == own.parent


@pytest.mark.parametrize("arguments, is_whole", [([], True), (["tests"], True), (["tests/data", "tests"], False)])
def test_run_of_whole_suite_is_detected(arguments, is_whole, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert runs_whole_suite(SimpleNamespace(args=arguments)) == is_whole


def test_slow_files_exist_and_are_unique():
    assert len(set(SLOW_FILES)) == len(SLOW_FILES)
    assert [name for name in SLOW_FILES if not (ROOT / "tests" / name).is_file()] == []
