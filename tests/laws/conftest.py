"""What laws of several threads stand on."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As on a processor of two cores, whatever runs the tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert left == 2, "a step leaves the number of threads as it was"
