"""Fixtures shared by the fault tests: undisturbed runs, and one run to damage."""

from pathlib import Path

import pytest

from tests.faults.resumed_runs import ResumeBench
from tests.faults.small_run import train_small_run


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ResumeBench:
    """Return the corpora and undisturbed runs, each created once."""
    return ResumeBench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two epochs and seven saves."""
    return train_small_run(tmp_path_factory.mktemp("small"))
