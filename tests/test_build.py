"""Programs over segments, written from schedules over stages."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.build import Sharding, UnitUse, build, evaluation, expanded
from fourfold.errors import UserError
from fourfold.layer.schedules import gpipe, named_schedules, one_forward_one_backward, schedule
from fourfold.program import COMPUTE, Action, Kind, Program, check, clock
from fourfold.program.actions import SENDS
from fourfold.program.check import on_edges
from fourfold.program.clock import Times
from fourfold.specs import REPLICATED
from tests.layer.random_schedules import right_schedules
from tests.programs import (
    FSDP,
    REPLICAS,
    ZERO2,
    one_stage,
    own_units,
    parsed,
    units_with_users,
    written,
)


def text(program: Program) -> list[str]:
    return [written(program, rank) for rank in range(len(program.ranks))]


def schedule_of(*ranks: str, rank_of_segment: tuple[int, ...], microbatches: int) -> Program:
    return Program(
        ranks=tuple(parsed(actions) for actions in ranks),
        rank_of_segment=rank_of_segment,
        microbatches=microbatches,
        users=tuple((stage,) for stage in rank_of_segment),
    )


def test_forwards_go_up_and_backwards_down() -> None:
    program = expanded(one_forward_one_backward(ranks=1, microbatches=2), segments_of_stage=[3])
    assert text(program) == ["0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"]
    assert program.rank_of_segment == (0, 0, 0)
    assert program.microbatches == 2


def test_stages_of_unequal_size() -> None:
    """Stages of 1, 3 and 2 segments: segments are counted through, each on the rank of its stage.

    Nobody waits for the backward of the first stage, so it stays whole.
    """
    program = expanded(gpipe(ranks=3, microbatches=1), segments_of_stage=[1, 3, 2])
    assert text(program) == ["0F0 0B0", "1F0 2F0 3F0 3I0 2I0 1I0 3W0 2W0 1W0", "4F0 5F0 5I0 4I0 5W0 4W0"]
    assert program.rank_of_segment == (0, 1, 1, 1, 2, 2)
    check(program)


def test_halves_go_down_each_for_itself() -> None:
    """I of all the stage's segments, and then W of all: the stage below waits for the I alone."""
    order = schedule_of("0F0 0I0 0W0", rank_of_segment=(0,), microbatches=1)
    program = expanded(order, segments_of_stage=[3])
    assert text(program) == ["0F0 1F0 2F0 2I0 1I0 0I0 2W0 1W0 0W0"]


def test_input_gradients_go_first_where_another_rank_waits() -> None:
    """In a V the stage before the third is on the same rank: its backward stays whole."""
    order = schedule_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", rank_of_segment=(0, 1, 1, 0), microbatches=1)
    program = expanded(order, segments_of_stage=[1, 2, 2, 2])
    assert text(program) == [
        "0F0 5F0 6F0 6I0 5I0 6W0 5W0 0B0",
        "1F0 2F0 3F0 4F0 4B0 3B0 2I0 1I0 2W0 1W0",
    ]


def test_with_recomputation_only_the_last_backward_of_a_stage_is_in_halves() -> None:
    """Else what the weight gradients of all its segments need would be held at once."""
    program = expanded(gpipe(ranks=2, microbatches=1), segments_of_stage=[2, 3], recomputed=True)
    assert text(program) == ["0F0 1F0 1B0 0B0", "2F0 3F0 4F0 4B0 3B0 2I0 2W0"]
    order = schedule_of("0F0 0I0 0W0", rank_of_segment=(0,), microbatches=1)
    assert text(expanded(order, segments_of_stage=[2], recomputed=True)) == ["0F0 1F0 1I0 0I0 1W0 0W0"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("times", [Times(), Times(2, 3, 1), Times(1, 0.5, 1.5)])
def test_the_bubble_with_input_gradients_first(ranks: int, times: Times) -> None:
    """(P-1)(F+I)/v, where W <= F + I: a rank below waits for input gradients only."""
    one = times.forward + times.input_gradient
    for microbatches, chunks in product((ranks, 2 * ranks + 1), (1, 2, 3)):
        for name in (f"interleaved{chunks}", f"bfs{chunks}", *(("gpipe", "1f1b") if chunks == 1 else ())):
            order = schedule(name, ranks=ranks, microbatches=microbatches)
            program = build(
                order,
                segments_of_stage=[2] * order.num_segments,
                units=own_units(2 * order.num_segments),
                sharding=REPLICAS,
            )
            bubble = clock(program, times.of(program)).seconds - microbatches * (one + times.weight_gradient)
            assert bubble == pytest.approx((ranks - 1) * one / chunks, abs=1e-9), (name, microbatches)


def test_two_stages_on_a_rank() -> None:
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1, as in interleaved schedules."""
    order = schedule_of("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0", rank_of_segment=(0, 1, 0, 1), microbatches=1)
    program = build(order, segments_of_stage=[2, 1, 1, 2], units=own_units(6), sharding=REPLICAS)
    assert program.rank_of_segment == (0, 0, 1, 0, 1, 1)
    assert text(program) == [
        "0F0 3RECV_F0 1F0 1SEND_F0 3RECV_B0 3F0 3SEND_F0 LOSS 3I0 3SEND_B0 1RECV_B0 3W0 3REDUCE "
        "1B0 1REDUCE 0B0 0REDUCE UPDATE",
        "2RECV_F0 4RECV_F0 2F0 2SEND_F0 4F0 5F0 LOSS 5I0 4I0 4SEND_B0 2RECV_B0 5W0 5REDUCE 4W0 4REDUCE "
        "2I0 2SEND_B0 2W0 2REDUCE UPDATE",
    ]


def test_build_over_two_stages() -> None:
    """1F1B with two microbatches: both ranks take part in the loss, each stage reduces its own units.

    What is sent leaves right after it is made, and is received behind the action before it is needed.
    """
    program = build(
        one_forward_one_backward(ranks=2, microbatches=2),
        segments_of_stage=[2, 1],
        units=own_units(3),
        sharding=REPLICAS,
    )
    assert text(program) == [
        "0F0 1F0 1SEND_F0 0F1 1RECV_B0 1F1 1SEND_F1 LOSS 1B0 1RECV_B1 0B0 1B1 1REDUCE 0B1 0REDUCE UPDATE",
        "2RECV_F0 2F0 2RECV_F1 2I0 2SEND_B0 2W0 2F1 LOSS 2I1 2SEND_B1 2W1 2REDUCE UPDATE",
    ]


def test_a_tied_head_on_another_stage_is_reduced_on_both() -> None:
    program = build(
        one_forward_one_backward(ranks=2, microbatches=1),
        segments_of_stage=[2, 1],
        units=units_with_users((0, 2), (1,), (2,)),
        sharding=REPLICAS,
    )
    assert text(program) == [
        "0F0 1RECV_B0 1F0 1SEND_F0 LOSS 1B0 1REDUCE 0B0 0REDUCE UPDATE",
        "2RECV_F0 2F0 LOSS 2I0 2SEND_B0 2W0 2REDUCE 0REDUCE UPDATE",
    ]


def waiting_in(program: Program, collective: Action) -> list[Action]:
    """What ranks wait at for ever, where messages are buffered but this collective holds up who starts it."""
    position = [0] * len(program.ranks)
    sent: set[Action] = set()
    partners = [rank for rank, actions in enumerate(program.ranks) if collective in actions]
    come: set[int] = set()
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(program.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                receive = program.message_needed(action) if action.kind in COMPUTE else None
                if receive is not None and receive.other_end not in sent:
                    break
                if action == collective:
                    come.add(rank)
                    if len(come) < len(partners):
                        break
                if action.kind in SENDS:
                    sent.add(action)
                position[rank] += 1
                progress = True
    return [
        actions[position[rank]] for rank, actions in enumerate(program.ranks) if position[rank] < len(actions)
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b7", "interleaved2", "bfs2", "zb-h1", "zb-h2", "zbv"])
def test_collectives_of_pipeline_ranks_may_hold_up_their_ranks(name: str) -> None:
    """The loss, and the sum of a tied weight: nobody who waits there is waited for, as in debug mode."""
    for placement, kind in ((REPLICATED, Kind.REDUCE), (FSDP, Kind.ALL_REDUCE)):
        for ranks, microbatches in product((2, 3, 4), (1, 2, 3, 5, 8)):
            order = schedule(name, ranks=ranks, microbatches=microbatches)
            sizes = [2, *[1] * (order.num_segments - 2), 2]
            units = [UnitUse((0, sum(sizes) - 1), replicated=True)]
            units += [UnitUse((segment,)) for segment in range(1, sum(sizes) - 1)]
            sharding = Sharding(placement, keep=True)
            program = build(order, segments_of_stage=sizes, units=units, sharding=sharding)
            assert waiting_in(program, Action(Kind.LOSS)) == []
            assert waiting_in(program, Action(kind, 0)) == []
            holders = {order.rank_of_segment[0], order.rank_of_segment[-1]}
            for rank in holders if len(holders) > 1 else ():
                assert written(program, rank).endswith(f" {Action(kind, 0)} UPDATE")


def test_every_segment_of_every_size() -> None:
    """Up to 4 stages of 1 to 3 segments and 5 microbatches: every F and B once, I and W above the first
    stage, every unit reduced once, and a message each way between neighbours.
    """
    for generate in (gpipe, one_forward_one_backward):
        for sizes in ([1], [3], [1, 2], [3, 1], [2, 1, 3], [1, 1, 2, 3]):
            for microbatches in (1, 2, 5):
                program = build(
                    generate(ranks=len(sizes), microbatches=microbatches),
                    segments_of_stage=sizes,
                    units=own_units(sum(sizes)),
                    sharding=REPLICAS,
                )
                actions = [action for _, action in program.actions()]
                for kind, count in (
                    (Kind.FORWARD, sum(sizes) * microbatches),
                    (Kind.BACKWARD, sizes[0] * microbatches),
                    (Kind.INPUT_GRADIENT, sum(sizes[1:]) * microbatches),
                    (Kind.WEIGHT_GRADIENT, sum(sizes[1:]) * microbatches),
                    (Kind.REDUCE, sum(sizes)),
                    (Kind.SEND_ACTIVATION, (len(sizes) - 1) * microbatches),
                    (Kind.RECV_ACTIVATION, (len(sizes) - 1) * microbatches),
                    (Kind.SEND_GRADIENT, (len(sizes) - 1) * microbatches),
                    (Kind.RECV_GRADIENT, (len(sizes) - 1) * microbatches),
                    (Kind.LOSS, len(sizes)),
                    (Kind.UPDATE, len(sizes)),
                ):
                    assert sum(action.kind is kind for action in actions) == count
                # LOSS and UPDATE stand on every rank.
                assert len(set(actions)) == len(actions) - 2 * (len(sizes) - 1)


def test_build_refuses_a_schedule_that_cannot_run() -> None:
    backward_first = schedule_of("0B0 0F0", rank_of_segment=(0,), microbatches=1)
    with pytest.raises(UserError, match="0B0 on rank 0 can never start: it waits for 0F0"):
        build(backward_first, segments_of_stage=[2], units=own_units(2), sharding=REPLICAS)


def test_sizes_must_be_those_of_the_stages() -> None:
    for sizes in ([2], [2, 1, 1]):
        with pytest.raises((ValueError, IndexError)):
            expanded(gpipe(ranks=2, microbatches=1), segments_of_stage=sizes)


def test_evaluation_is_forwards_only() -> None:
    training = one_stage(3, 4)
    program = evaluation(training, microbatches=2, sharding=REPLICAS)
    assert text(program) == ["0F0 1F0 2F0 0F1 1F1 2F1"]
    assert program.rank_of_segment == (0, 0, 0)
    assert program.microbatches == 2
    assert program.users == training.users
    assert text(evaluation(training, microbatches=0, sharding=REPLICAS)) == [""]


def holds_as_an_evaluation(order: Program, microbatches: int) -> None:
    """Forwards end on the strictest transport, each stands once, and an edge has one order at both ends."""
    sizes = [1 + stage % 2 for stage in range(order.num_segments)]
    for sharding in (REPLICAS, Sharding(FSDP, prefetch=1)):
        training = build(order, segments_of_stage=sizes, units=own_units(sum(sizes)), sharding=sharding)
        program = evaluation(training, microbatches=microbatches, sharding=sharding)
        assert not clock(program, rendezvous=True).stuck
        computed = sorted((rank, action) for rank, action in program.actions() if action.kind in COMPUTE)
        places = product(enumerate(program.rank_of_segment), range(microbatches))
        assert computed == sorted((rank, Action(Kind.FORWARD, s, m)) for (s, rank), m in places)
        sent, received = on_edges(program)
        assert sent == received


@settings(max_examples=50, deadline=None)
@given(right_schedules(), st.integers(0, 9))
def test_evaluation_on_any_placement(order: Program, microbatches: int) -> None:
    # PP-16
    holds_as_an_evaluation(order, microbatches)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_evaluation_under_every_named_schedule(ranks: int) -> None:
    # PP-16
    for order in named_schedules(ranks=ranks, microbatches=2).values():
        for microbatches in (1, ranks, 2 * ranks + 1):
            holds_as_an_evaluation(order, microbatches)


def test_the_program_knows_where_things_live() -> None:
    """Frozen units, lookups and the placement reach the program, and the segments know their units."""
    program = one_stage(
        3,
        1,
        units=[UnitUse((0, 2)), UnitUse((1,), trained=False), UnitUse((1, 2))],
        sharding=Sharding(ZERO2),
        lookups=frozenset({0}),
    )
    assert program.users == ((0, 2), (1,), (1, 2))
    assert program.frozen == {1}
    assert program.placement == ZERO2
    assert program.units_of_segment == ((0,), (1, 2), (0, 2))
    assert program.units_on(0) == (0, 1, 2)
    assert program.trained_on(0) == (0, 2)
    reads = [str(a) for a in program.ranks[0] if a.kind in COMPUTE and program.reads_weights(a)]
    assert reads == ["0F0", "1F0", "2F0", "2B0", "1B0"]


def test_a_weight_gradient_reads_no_weights() -> None:
    program = replace(one_stage(1, 1), ranks=(parsed("0F0 0I0 0W0"),))
    assert [program.reads_weights(action) for action in program.ranks[0]] == [True, True, False]


def test_pieces_without_replicas_and_whole_optimizers_are_summed_once() -> None:
    """Only where optimizer state is cut is a sum over replicas a step of its own."""
    assert "ALLREDUCE" not in written(one_stage(2, 1, sharding=Sharding(REPLICATED), replicated=True))
    assert "ALLREDUCE" not in written(one_stage(2, 1, sharding=Sharding(FSDP)))
    assert written(one_stage(2, 1, sharding=Sharding(FSDP), replicated=True)).count("ALLREDUCE") == 2
    units = [UnitUse((0,)), UnitUse((1,), replicated=True), UnitUse((2,))]
    assert written(one_stage(3, 1, units=units, sharding=Sharding(ZERO2))).endswith(
        "2REDUCE 1B0 1REDUCE 0B0 0REDUCE 1ALLREDUCE UPDATE"
    )
