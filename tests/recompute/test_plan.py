"""The planner: its forwards against closed forms and every other plan, its memory against the program's."""

from functools import cache
from math import comb, inf

import pytest

from fourfold.build import Sharding, build
from fourfold.errors import UserError
from fourfold.layer.schedules import gpipe, one_forward_one_backward
from fourfold.program import Program
from fourfold.program.liveness import peak_bytes
from fourfold.recompute.plan import GIGABYTE, Block, forwards, plan
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
    (found,) = peak_bytes(
        program(policy, chain, microbatches=microbatches, all_first=all_first),
        input_bytes=[block.input_bytes for block in chain],
        tape_bytes=[block.tape_bytes for block in chain],
    )
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


UNEQUAL = [
    Block(1.0, 2, 9),
    Block(5.0, 3, 4),
    Block(1.0, 2, 12),
    Block(0.5, 4, 20),
    Block(7.0, 1, 3),
    Block(2.0, 2, 6),
]


def seconds(found: tuple[tuple[int, ...], ...], chain: list[Block]) -> float:
    return sum(chain[block].forward_seconds for again in found for block in again)


def best_within(budget: int, chain: list[Block]) -> float:
    """The least time of what runs again within a budget, the backward at once: by trying every choice."""

    @cache
    def back(i: int, j: int, spare: int) -> float:
        """With the input of i kept apart; the first way down the tree included."""
        here = chain[i]
        if j == i + 1:
            return here.forward_seconds if spare >= here.tape_bytes - here.input_bytes else inf
        found = inf
        keep = spare - (here.tape_bytes - here.input_bytes) - chain[i + 1].input_bytes
        if keep >= 0:
            found = here.forward_seconds + back(i + 1, j, keep)
        for k in range(i + 1, j):
            if max(block.input_bytes for block in chain[i + 1 : k + 1]) <= spare:
                run = sum(block.forward_seconds for block in chain[i:k])
                found = min(found, run + back(k, j, spare - chain[k].input_bytes) + back(i, k, spare))
        return found

    first = sum(block.forward_seconds for block in chain)
    return back(0, len(chain), budget - chain[0].input_bytes) - first


def test_a_budget_is_kept_and_used_as_well_as_can_be() -> None:
    """From the least that works to more than everything: within the budget, and no other plan is quicker."""
    times = []
    for budget in range(22, 60):
        found = plan(RecomputeName.parse(policy_text(budget)), UNEQUAL, at_once=True)
        times.append(seconds(found, UNEQUAL))
        assert times[-1] == pytest.approx(best_within(budget, UNEQUAL)), budget
        assert peak(policy_text(budget), UNEQUAL) <= budget
    assert times == sorted(times, reverse=True)
    assert times[0] > 0
    assert times[-1] == 0


def policy_text(budget: int) -> str:
    return f"budget:{(budget + 0.5) / GIGABYTE!r}"


@pytest.mark.parametrize("budget", [30, 45, 60, 100, 200])
def test_a_budget_is_for_all_microbatches_on_their_way(budget: int) -> None:
    held = peak(policy_text(budget), UNEQUAL, microbatches=3, all_first=True)
    assert held <= budget
    if budget >= 3 * sum(block.tape_bytes for block in UNEQUAL):
        assert held == 3 * sum(block.tape_bytes for block in UNEQUAL), "nothing runs again"


def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    chain = [Block(1.0, GIGABYTE // 10, GIGABYTE)] * 8
    with pytest.raises(UserError) as error:
        plan(RecomputeName.parse("budget:1"), chain, at_once=False, in_flight=4)
    assert str(error.value) == (
        "recompute='budget:1' is too little: the activations of a stage of 8 blocks take 1.4 GB at least: "
        "use budget:1.43 or more, or smaller microbatches"
    )
    assert plan(RecomputeName.parse("budget:1.43"), chain, at_once=False, in_flight=4)
