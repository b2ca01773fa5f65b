"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import RankPool

# Like the rank processes of the tests: several that use all cores would wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Run a function on ranks: ``results = ranks(4, function, *args)``, by rank."""
    pool = RankPool()
    yield pool
    pool.close()
