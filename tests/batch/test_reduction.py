from dataclasses import replace

import pytest

from fourfold.batch.reduction import SEGMENT_BYTES, SHARDED_SEGMENT_BYTES, blocks_of_segments, with_reductions
from fourfold.build import expanded
from fourfold.layer.schedules import one_forward_one_backward
from fourfold.program import Action, Kind, Program, check
from fourfold.specs import REPLICATED, Layout
from tests.programs import ZERO1, parsed, written


def compute_only(users: list[tuple[int, ...]], microbatches: int) -> Program:
    program = expanded(
        one_forward_one_backward(ranks=1, microbatches=microbatches), segments_of_stage=[len(users)]
    )
    return replace(program, users=tuple(users))


def replicated(program: Program, replicas: bool) -> Program:
    """Where ``replicas``: with units in pieces, each of which other ranks hold too."""
    if not replicas:
        return program
    return replace(program, placement=ZERO1, replicated=frozenset(range(len(program.users))))


def summed(program: Program, *, every_microbatch: bool = False, replicas: bool = False) -> str:
    return written(with_reductions(replicated(program, replicas), every_microbatch=every_microbatch))


def test_a_reduction_follows_the_last_contribution() -> None:
    assert summed(compute_only([(0,), (1,), (2,)], 2)) == (
        "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 LOSS 2B1 2REDUCE 1B1 1REDUCE 0B1 0REDUCE UPDATE"
    )


def test_a_tied_unit_waits_for_both_users() -> None:
    assert summed(compute_only([(0, 2), (1,), (2,)], 1)) == (
        "0F0 1F0 2F0 LOSS 2B0 2REDUCE 1B0 1REDUCE 0B0 0REDUCE UPDATE"
    )


def test_pieces_are_summed_after_every_microbatch() -> None:
    """The tied unit 0 once a microbatch, not once a user."""
    assert summed(compute_only([(0, 1), (1,)], 2), every_microbatch=True) == (
        "0F0 1F0 1B0 1REDUCE0 0B0 0REDUCE0 0F1 1F1 LOSS 1B1 1REDUCE1 0B1 0REDUCE1 UPDATE"
    )
    assert summed(compute_only([(0,), (1,)], 1), every_microbatch=True) == (
        "0F0 1F0 LOSS 1B0 1REDUCE 0B0 0REDUCE UPDATE"
    )


def test_weight_gradients_that_come_late_are_waited_for() -> None:
    """Of both microbatches, where one sum is taken; of each, where one a microbatch is."""
    program = compute_only([(0,)], 2)
    program = replace(program, ranks=(parsed("0F0 0I0 0F1 0I1 0W1 0W0"),))
    assert summed(program) == "0F0 0I0 0F1 LOSS 0I1 0W1 0W0 0REDUCE UPDATE"
    assert summed(program, every_microbatch=True) == "0F0 0I0 0F1 LOSS 0I1 0W1 0REDUCE0 0W0 0REDUCE1 UPDATE"


def test_replicas_are_summed_after_the_next_units_reduction_and_once_a_step() -> None:
    users = [(0,), (1,), (2,)]
    assert summed(compute_only(users, 1), replicas=True) == (
        "0F0 1F0 2F0 LOSS 2B0 2REDUCE 1B0 1REDUCE 2ALLREDUCE 0B0 0REDUCE 1ALLREDUCE 0ALLREDUCE UPDATE"
    )
    assert summed(compute_only(users, 2), every_microbatch=True, replicas=True) == (
        "0F0 1F0 2F0 2B0 2REDUCE0 1B0 1REDUCE0 0B0 0REDUCE0 0F1 1F1 2F1 LOSS 2B1 2REDUCE1 "
        "1B1 1REDUCE1 2ALLREDUCE 0B1 0REDUCE1 1ALLREDUCE 0ALLREDUCE UPDATE"
    )


def test_a_frozen_unit_is_not_summed() -> None:
    program = replace(compute_only([(0,), (1,), (2,)], 1), frozen=frozenset({0, 2}))
    assert summed(program, replicas=True) == ("0F0 1F0 2F0 LOSS 2B0 1B0 1REDUCE 0B0 1ALLREDUCE UPDATE")


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("every_microbatch", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_every_contribution_is_summed_once(microbatches: int, every_microbatch: bool, replicas: bool) -> None:
    """Between a unit's contribution and UPDATE stand one REDUCE that takes it, and then one ALLREDUCE."""
    program = with_reductions(
        replicated(compute_only([(0, 2), (0, 1), (2,)], microbatches), replicas),
        every_microbatch=every_microbatch,
    )
    check(replace(program, placement=REPLICATED))  # nothing is gathered
    assert len(set(program.ranks[0])) == len(program.ranks[0])
    for unit in range(3):
        kinds = [action.kind for action in program.ranks[0] if action.place == unit]
        assert kinds.count(Kind.REDUCE) == (microbatches if every_microbatch else 1)
        assert kinds.count(Kind.ALL_REDUCE) == int(replicas)
    assert program.ranks[0][-1] == Action(Kind.UPDATE)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # At least 25 MiB, filled from the end of the model, which the backward finishes first.
        ([12, 9, 9, 9, 9, 9, 9, 9, 9, 12], [(0, 1), (1, 4), (4, 7), (7, 10)]),
        ([500, 400, 400, 500], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([20, 25, 24, 20], [(0, 1), (1, 2), (2, 4)]),
        # Half of a small model.
        ([1, 1, 1, 1], [(0, 2), (2, 4)]),
        ([0.5, 0.5, 1, 1, 0.25, 0.75], [(0, 3), (3, 6)]),
        ([1, 1, 6], [(0, 2), (2, 3)]),
        ([7], [(0, 1)]),
    ],
)
def test_units_are_large_enough_and_several(sizes: list[float], expected: list[tuple[int, int]]) -> None:
    units = blocks_of_segments([int(size * 2**20) for size in sizes], Layout(dp=2, pp=2))
    assert [(unit.start, unit.stop) for unit in units] == expected
    assert SEGMENT_BYTES == 25 * 2**20


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([12, 9, 9, 9, 9, 12], [(0, 3), (3, 6)]), ([1, 1, 6], [(0, 3)]), ([500, 400], [(0, 1), (1, 2)])],
)
def test_where_nothing_is_summed_a_small_stage_is_one(
    sizes: list[float], expected: list[tuple[int, int]]
) -> None:
    for layout in (Layout(), Layout(pp=2, tp=4)):
        units = blocks_of_segments([int(size * 2**20) for size in sizes], layout)
        assert [(unit.start, unit.stop) for unit in units] == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # At least 4 MiB.
        ([3, 2, 2, 2, 2, 2, 30], [(0, 2), (2, 4), (4, 6), (6, 7)]),
        ([500, 400, 400, 500], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        # An eighth of a small model.
        ([1] * 8, [(index, index + 1) for index in range(8)]),
        ([1] * 16, [(index, index + 2) for index in range(0, 16, 2)]),
        ([7], [(0, 1)]),
    ],
)
def test_sharded_units_are_smaller(sizes: list[float], expected: list[tuple[int, int]]) -> None:
    units = blocks_of_segments([int(size * 2**20) for size in sizes], Layout(fsdp=2))
    assert [(unit.start, unit.stop) for unit in units] == expected
    assert SHARDED_SEGMENT_BYTES == 4 * 2**20
