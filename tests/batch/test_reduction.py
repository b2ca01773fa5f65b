import pytest

from fourfold.batch.reduction import UNIT_BYTES, reduction_events, segments_of_units, with_reductions
from fourfold.build import expanded
from fourfold.layer.schedules import one_forward_one_backward
from fourfold.program import Program
from fourfold.specs import Layout
from fourfold.traffic import Event


def compute_only(users: list[tuple[int, ...]], microbatches: int) -> Program:
    return expanded(
        one_forward_one_backward(stages=1, microbatches=microbatches),
        segments_of_stage=[len(users)],
        users=users,
    )


def text(program: Program) -> str:
    return " ".join(map(str, program.ranks[0]))


def test_a_reduction_follows_the_last_contribution() -> None:
    assert text(with_reductions(compute_only([(0,), (1,), (2,)], 2))) == (
        "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 LOSS 2B1 2REDUCE 1B1 1REDUCE 0B1 0REDUCE UPDATE"
    )


def test_a_tied_unit_waits_for_both_users() -> None:
    assert text(with_reductions(compute_only([(0, 2), (1,), (2,)], 1))) == (
        "0F0 1F0 2F0 LOSS 2B0 2REDUCE 1B0 1REDUCE 0B0 0REDUCE UPDATE"
    )


@pytest.mark.parametrize("layout", ["dp4", "dp2,cp2", "cp4"])
def test_the_events_are_on_the_gradient_group_of_the_batch_axis(layout: str) -> None:
    """dp x fsdp x cp, also when dp is 1: a rank must not keep the gradient of its own sequence shard."""
    program = with_reductions(compute_only([(0,), (1,)], 1))
    parsed = Layout.parse(layout)
    events = reduction_events(
        program.ranks[0], layout=parsed, unit_numels=[10, 7], dtype="float32", itemsize=4
    )
    axis = parsed.axis_name("dp", "fsdp", "cp")
    assert events == [
        Event("all_reduce", axis, 8, "float64"),
        Event("all_reduce", axis, 28, "float32"),
        Event("all_reduce", axis, 40, "float32"),
    ]


def test_one_rank_sends_nothing() -> None:
    program = with_reductions(compute_only([(0,)], 1))
    assert (
        reduction_events(program.ranks[0], layout=Layout(tp=4), unit_numels=[5], dtype="float32", itemsize=4)
        == []
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # At least 8 MiB, filled from the end of the model, which the backward finishes first.
        ([4, 3, 3, 3, 3, 3, 3, 3, 3, 4], [(0, 1), (1, 4), (4, 7), (7, 10)]),
        ([500, 400, 400, 500], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        # A quarter of a small model.
        ([1, 1, 1, 1], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([0.5, 0.5, 1, 1, 0.25, 0.75], [(0, 2), (2, 3), (3, 4), (4, 6)]),
        ([7], [(0, 1)]),
    ],
)
def test_units_are_large_enough_and_several(sizes: list[float], expected: list[tuple[int, int]]) -> None:
    units = segments_of_units([int(size * 2**20) for size in sizes])
    assert [(unit.start, unit.stop) for unit in units] == expected
    assert UNIT_BYTES == 8 * 2**20
