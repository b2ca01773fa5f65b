"""The planner: its forwards against closed forms and every other plan, its memory against the program's."""

from functools import cache
from math import comb

import pytest

from fourfold.build import Sharding, build
from fourfold.layer.schedules import gpipe, one_forward_one_backward
from fourfold.program import Program
from fourfold.program.liveness import Block, peak_bytes
from fourfold.recompute.plan import forwards, plan
from fourfold.specs import REPLICATED
from fourfold.specs.recompute_name import RecomputeName
from tests.programs import own_units


def count(policy: str, blocks: int, *, at_once: bool = False) -> int:
    return forwards(plan(RecomputeName.parse(policy), [Block()] * blocks, at_once=at_once))


def program(policy: str, chain: list[Block], *, microbatches: int = 1, all_first: bool = False) -> Program:
    schedule = (gpipe if all_first else one_forward_one_backward)(ranks=1, microbatches=microbatches)
    return build(
        schedule,
        segments_of_stage=[len(chain)],
        units=own_units(len(chain)),
        sharding=Sharding(REPLICATED),
        recompute=RecomputeName.parse(policy),
        blocks=chain,
    )


def peak(policy: str, chain: list[Block], *, microbatches: int = 1, all_first: bool = False) -> int:
    (found,) = peak_bytes(program(policy, chain, microbatches=microbatches, all_first=all_first), chain)
    return found


def test_the_plans_of_four_blocks() -> None:
    """Before the backward of each block, from the first: what runs again."""
    chain = [Block()] * 4

    def found(policy: str, at_once: bool) -> tuple[tuple[int, ...], ...]:
        return plan(RecomputeName.parse(policy), chain, at_once=at_once)

    assert found("none", False) == ((), (), (), ())
    assert found("full", False) == ((0,), (1,), (2,), (3,))
    assert found("full", True) == ((0,), (1,), (2,), ())
    assert found("every:2", False) == ((), (0, 1), (), (2, 3))
    assert found("every:2", True) == ((), (0, 1), (), ())
    assert found("every:3", True) == ((), (), (0, 1, 2), ())
    assert found("min", False) == ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3))
    assert found("min", True) == ((0,), (0, 1), (0, 1, 2), ())
    assert found("slots:2", True) == ((0,), (1,), (1, 2), ())


@pytest.mark.parametrize("blocks", [1, 2, 16, 32, 64])
def test_forwards_are_those_of_the_closed_forms(blocks: int) -> None:
    """2N for full, one less where the backward comes at once; N(N+1)/2 in all from one input."""
    N = blocks
    assert count("none", N) == count("none", N, at_once=True) == N
    assert count("full", N) == 2 * N
    assert count("full", N, at_once=True) == 2 * N - 1
    assert count("every:8", N) == 2 * N
    assert count("every:8", N, at_once=True) == 2 * N - (N - 1) % 8 - 1
    assert count("min", N, at_once=True) == N * (N + 1) // 2
    assert count("min", N) == N * (N + 1) // 2 + N
    for s in {1, 2, 3, 5, 8, N}.intersection(range(1, N + 1)):
        r = next(r for r in range(N) if comb(s + r, s) >= N)
        again = r * N - comb(s + r, r - 1) if r else 0
        assert count(f"slots:{s}", N, at_once=True) == N + again, f"{s} slots"
    assert count(f"slots:{N + 5}", N) == 2 * N


def test_the_root_of_the_blocks() -> None:
    for blocks, k in ((1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (12, 3), (13, 4), (16, 4), (64, 8)):
        chain = [Block()] * blocks
        assert plan(RecomputeName("sqrt"), chain, at_once=False) == plan(
            RecomputeName("every", k), chain, at_once=False
        )


def least_forwards(blocks: int, slots: int) -> int:
    """By the definition: cut anywhere, with one slot less on the right."""

    @cache
    def again(n: int, s: int) -> float:
        if n == 1:
            return 0
        if s == 1:
            return n * (n - 1) // 2
        return min(k + again(n - k, s - 1) + again(k, s) for k in range(1, n))

    return blocks + int(again(blocks, slots))


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_slots_take_the_fewest_forwards_that_there_are(slots: int) -> None:
    for blocks in range(1, 24):
        assert count(f"slots:{slots}", blocks, at_once=True) == least_forwards(blocks, slots)


def test_where_the_backward_comes_later_inputs_are_all_that_is_held() -> None:
    """Two microbatches forward, then back: s inputs each, and one tape of 10."""
    chain = [Block(1.0, 1, 10)] * 9
    for slots in (1, 2, 3, 9):
        assert peak(f"slots:{slots}", chain, microbatches=2, all_first=True) <= 2 * slots + 10
    assert peak("min", chain, microbatches=2, all_first=True) == 2 * 1 + 10
    assert peak("full", chain, microbatches=2, all_first=True) == 2 * 9 + 9
    assert peak("none", chain, microbatches=2, all_first=True) == 2 * 9 * 10


@pytest.mark.parametrize(
    ("policy", "bytes_"),
    [("none", 640), ("full", 63 + 10), ("every:8", 7 * 1 + 8 * 10), ("sqrt", 87), ("min", 1 + 10)],
)
def test_the_memory_of_a_policy(policy: str, bytes_: int) -> None:
    """64 blocks with an input of 1 and a tape of 10, the backward at once."""
    assert peak(policy, [Block(1.0, 1, 10)] * 64) == bytes_
