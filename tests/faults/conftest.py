"""One set of undisturbed runs and one run to damage, for all tests of this folder."""

from pathlib import Path

import pytest

from tests.faults.resuming import ResumeBench
from tests.faults.small_run import train_small_run


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ResumeBench:
    """Corpora and undisturbed runs, each made once."""
    return ResumeBench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has trained for two epochs and been saved seven times."""
    return train_small_run(tmp_path_factory.mktemp("small"))
