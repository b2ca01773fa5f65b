"""A budget of bytes: kept by every rank, used as well as can be, and refused with one that works."""

import re
from functools import cache
from math import inf

import pytest

from fourfold.build import build
from fourfold.errors import UserError
from fourfold.layer.schedules import gpipe, one_forward_one_backward, schedule
from fourfold.program import Kind, Program
from fourfold.program.liveness import Block, peak_bytes
from fourfold.recompute.budget import GIGABYTE, StageUse, plans_within
from fourfold.recompute.insertion import with_recomputation
from fourfold.specs.recompute_name import RecomputeName
from tests.programs import REPLICAS, own_units


def program(policy: str, chain: list[Block], *, microbatches: int = 1, all_first: bool = False) -> Program:
    return build(
        (gpipe if all_first else one_forward_one_backward)(ranks=1, microbatches=microbatches),
        segments_of_stage=[len(chain)],
        units=own_units(len(chain)),
        sharding=REPLICAS,
        recompute=RecomputeName.parse(policy),
        blocks=chain,
    )


def peak(policy: str, chain: list[Block], *, microbatches: int = 1, all_first: bool = False) -> int:
    return peak_bytes(program(policy, chain, microbatches=microbatches, all_first=all_first), chain)[0]


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
        (found,) = plans_within(budget, [StageUse(UNEQUAL, 1, at_once=True)]) or ()
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


def on_ranks(name: str, budget: int, blocks: list[Block], *, ranks: int = 2) -> tuple[Program, list[int]]:
    """A schedule with recomputation over its own stages, one block each, and what its ranks hold at most."""
    order = schedule(name, ranks=ranks, microbatches=6)
    stages = [range(stage, stage + 1) for stage in range(order.num_segments)]
    found = with_recomputation(order, RecomputeName.parse(policy_text(budget)), blocks, stages=stages)
    return found, peak_bytes(found, blocks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved2", "bfs2", "zb-h1", "zb-h2", "zbv"])
def test_every_rank_keeps_the_budget_and_the_least_one_named_works(name: str) -> None:
    """Over all stages of a rank and all microbatches on their way; also what deferred halves hold."""
    stages = schedule(name, ranks=2, microbatches=6).num_segments
    blocks = [Block(1.0, 10 + stage, 100 + 10 * stage, 60, 0) for stage in range(stages)]
    with pytest.raises(UserError) as error:
        on_ranks(name, 20, blocks)
    written = re.search(r"use budget:(\S+) or more", str(error.value))
    assert written is not None
    least = round(float(written[1]) * GIGABYTE)
    again = []
    for budget in (least, least + 50, 2 * least, 10**6):
        found, held = on_ranks(name, budget, blocks)
        assert max(held) <= budget
        again.append(sum(action.kind is Kind.RECOMPUTE for _, action in found.actions()))
    assert again == sorted(again, reverse=True)
    assert again[0] > 0
    assert again[-1] == 0
    with pytest.raises(UserError, match="is too little: the activations of pipeline rank"):
        on_ranks(name, least - 2, blocks)


def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    chain = [Block(1.0, GIGABYTE // 10, GIGABYTE)] * 8
    with pytest.raises(UserError) as error:
        program("budget:1", chain, microbatches=4, all_first=True)
    assert str(error.value) == (
        "recompute='budget:1' is too little: the activations of pipeline rank 0 take 1.4 GB at least: "
        "use budget:1.4 or more, or smaller microbatches"
    )
    assert peak("budget:1.4", chain, microbatches=4, all_first=True) == 1.4 * GIGABYTE
