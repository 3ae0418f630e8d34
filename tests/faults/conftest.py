"""One run, really trained, whose checkpoint the tests damage."""

from pathlib import Path

import pytest

from tests.faults.small_run import train_small_run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has trained for two epochs and been saved seven times."""
    return train_small_run(tmp_path_factory.mktemp("small"))
