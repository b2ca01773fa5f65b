"""What a campaign of kills takes for a checkpoint that was lost."""

import pytest

from tests.chaos import start_problem


@pytest.mark.parametrize(
    ("newest", "told", "has_moved", "problem"),
    [
        (6, "going on after step 6\n", True, None),
        (0, "beginning at step 1: no checkpoint in run-0\n", True, None),
        (6, "", False, None),
        (6, "going on after step 3\n", False, "it went on after step 3 with a checkpoint of step 6"),
        (
            6,
            "beginning at step 1: no checkpoint\n",
            False,
            "it went on after step 0 with a checkpoint of step 6",
        ),
        (0, "going on after step 3\n", True, "it went on after step 3 with a checkpoint of step 0"),
        (6, "step  1/10\n", True, "it did not say where it began, with a checkpoint of step 6"),
    ],
)
def test_a_start_must_go_on_from_the_newest_checkpoint(
    newest: int, told: str, has_moved: bool, problem: str | None
):
    assert start_problem(newest, told, has_moved=has_moved) == problem
