"""Fixtures of the invariants."""

from collections.abc import Iterator

import pytest
import torch

from konkanivani.ops.packing import PackedEncoder


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Use two threads, as on a processor with two cores."""
    torch.set_num_threads(2)
    yield
    found = torch.get_num_threads()
    torch.set_num_threads(1)
    assert found == 2, "a step leaves the number of threads as it was"


@pytest.fixture(params=[True, False], ids=["packed", "padded"])
def is_packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a batch packed, as on a CPU, and padded, as on a GPU."""
    monkeypatch.setattr(PackedEncoder, "packs", request.param)
    return request.param
