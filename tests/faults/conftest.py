"""One warmed-up parent and one set of undisturbed runs for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.faults.resuming import ResumeBench
from tests.faults.warm_trainer import WarmTrainer


@pytest.fixture(scope="session")
def trainer() -> Iterator[WarmTrainer]:
    """The parent of the runs."""
    with WarmTrainer() as warm:
        yield warm


@pytest.fixture(scope="session")
def bench(trainer: WarmTrainer, tmp_path_factory: pytest.TempPathFactory) -> ResumeBench:
    """Corpora and undisturbed runs, each made once."""
    return ResumeBench(trainer, tmp_path_factory.mktemp("bench"))
