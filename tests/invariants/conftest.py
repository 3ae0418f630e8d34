"""Fixtures for the tests of the invariants."""

from collections.abc import Iterator

import pytest
import torch

from konkanivani.ops.packing import PackedEncoder


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Use two threads, as on a processor with two cores."""
    torch.set_num_threads(2)
    yield
    result = torch.get_num_threads()
    torch.set_num_threads(1)
    assert result == 2, "a step has changed the number of threads"


@pytest.fixture(params=[True, False], ids=["packed", "padded"])
def is_packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the test with packed batches, as on a CPU, and with padded batches, as on a GPU."""
    monkeypatch.setattr(PackedEncoder, "packs", request.param)
    return request.param
