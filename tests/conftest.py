"""Fixtures of all tests."""

import functools
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import typer.main
import typer.testing

from tests.ranks import RankPool, warm_context

# Like the rank processes of the tests: several that use all cores would wait for each other.
torch.set_num_threads(1)

# How long an example takes says more about what else the machine does; a test has its timeout.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# Every CliRunner().invoke(app) would make all commands from their functions again, a tenth of a second.
typer.testing._get_command = functools.cache(typer.main.get_command)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Run a function on ranks: ``results = ranks(4, function, *args)``, by rank."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def warm() -> None:
    """Let ranks that the launcher starts in this process be forks of the one that has imported torch, too."""
    warm_context()
