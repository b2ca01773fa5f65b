"""What a step sends, predicted from its program."""

import pytest

from fourfold.batch.costs import UnitSize
from fourfold.build import Sharding, UnitUse, build
from fourfold.events import step_events
from fourfold.layer.schedules import one_forward_one_backward
from fourfold.program import Program
from fourfold.specs import Layout
from fourfold.traffic import Event
from tests.programs import FSDP, ZERO1, one_stage, written


def size(*counts: int, rank: int = 0, dtype: str = "float32", nbytes: int = 4) -> UnitSize:
    return UnitSize(counts, rank, dtype, nbytes, "float32", 4)


def events_of(program: Program, layout: str, *units: UnitSize, rank: int = 0) -> list[Event]:
    """With units by their number, and microbatches of 100, 200... bytes."""
    return step_events(
        program,
        rank=rank,
        layout=Layout.parse(layout),
        units=dict(enumerate(units)),
        activation_bytes=[100 * (m + 1) for m in range(program.microbatches)],
    )


@pytest.mark.parametrize("layout", ["dp4", "dp2,cp2", "cp4"])
def test_the_events_are_on_the_gradient_group_of_the_batch_axis(layout: str) -> None:
    """dp x fsdp x cp, also when dp is 1: a rank must not keep the gradient of its own sequence shard."""
    events = events_of(one_stage(2, 1, replicated=True), layout, size(10), size(7))
    axis = Layout.parse(layout).axis_name("dp", "fsdp", "cp")
    assert events == [
        Event("all_reduce", axis, 16, "float64"),
        Event("all_reduce", axis, 28, "float32"),
        Event("all_reduce", axis, 40, "float32"),
    ]


def test_the_events_of_replicas_of_pieces() -> None:
    """Weights in bfloat16 are gathered, gradients in float32 scattered, own pieces summed over replicas.

    The ranks of cp own pieces too.
    """
    units = [size(*counts, rank=1, dtype="bfloat16", nbytes=2) for counts in ((1, 4, 2, 3), (2, 3, 3, 0))]
    sharding = Sharding(FSDP, prefetch=0)
    program = one_stage(2, 1, sharding=sharding, lookups=frozenset({0}), replicated=True)
    assert written(program) == (
        "0GATHER0 0F0 0FREE0 1GATHER0 1F0 LOSS 1B0 1REDUCE 1FREE0 0B0 0REDUCE 1ALLREDUCE 0ALLREDUCE UPDATE"
    )
    assert events_of(program, "dp3,fsdp2,cp2", *units) == [
        Event("all_gather", "fsdp,cp", 20, "bfloat16"),
        Event("all_gather", "fsdp,cp", 16, "bfloat16"),
        Event("all_reduce", "dp,fsdp,cp", 16, "float64"),
        Event("reduce_scatter", "fsdp,cp", 32, "float32"),
        Event("reduce_scatter", "fsdp,cp", 40, "float32"),
        Event("all_reduce", "dp", 12, "float32"),
        Event("all_reduce", "dp", 16, "float32"),
        Event("all_reduce", "fsdp,cp", 8, "float64"),
    ]


def test_with_whole_gradients_pieces_are_still_what_is_summed() -> None:
    """ZeRO-1 scatters as FSDP does: an owner needs its own piece alone."""
    program = one_stage(1, 4, sharding=Sharding(ZERO1))
    assert events_of(program, "fsdp2", size(6, 6)) == [
        Event("all_gather", "fsdp", 48, "float32"),
        Event("all_reduce", "fsdp", 16, "float64"),
        Event("reduce_scatter", "fsdp", 48, "float32"),
        Event("all_reduce", "fsdp", 8, "float64"),
    ]


def test_one_rank_sends_nothing() -> None:
    assert events_of(one_stage(1, 1), "dp1", size(5)) == []


def test_the_events_of_a_pipeline_with_a_tied_head() -> None:
    """Messages have the bytes of their microbatch; the tied unit is summed over its holders and dp, the norm
    over pp.
    """
    program = build(
        one_forward_one_backward(ranks=2, microbatches=2),
        segments_of_stage=[2, 1],
        units=[UnitUse((0, 2), replicated=True), UnitUse((1,), replicated=True)],
        sharding=Sharding(),
    )
    assert written(program, 1) == (
        "2RECV_F0 2F0 2RECV_F1 2I0 2SEND_B0 2W0 2F1 LOSS 2I1 2SEND_B1 2W1 0REDUCE UPDATE"
    )
    assert events_of(program, "pp2,dp2", size(10), rank=1) == [
        Event("recv", "pp", 100, "float32"),
        Event("recv", "pp", 200, "float32"),
        Event("send", "pp", 100, "float32"),
        Event("all_reduce", "pp,dp", 16, "float64"),
        Event("send", "pp", 200, "float32"),
        Event("all_reduce", "pp,dp", 40, "float32"),
        Event("all_reduce", "pp", 8, "float64"),
    ]
    [*_, layer, tied, _norm] = events_of(program, "pp2,dp2", size(10), size(7), rank=0)
    assert layer == Event("all_reduce", "dp", 28, "float32")
    assert tied == Event("all_reduce", "pp,dp", 40, "float32")
