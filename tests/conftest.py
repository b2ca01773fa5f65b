"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Run a function on ranks: ``results = ranks(4, function, *args)``, by rank."""
    pool = RankPool()
    yield pool
    pool.close()
