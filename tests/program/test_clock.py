import pytest

from fourfold.build import Sharding
from fourfold.layer.schedules import schedule
from fourfold.layer.transfers import with_transfers
from fourfold.program import Action, Kind, Program, clock, peak_in_flight
from fourfold.program.clock import Times, peak_activations
from tests.programs import FSDP, one_stage


def test_a_bubble_is_the_idle_part_of_all_ranks_time() -> None:
    timeline = clock(schedule("1f1b", ranks=4, microbatches=8))
    assert timeline.seconds == (8 + 3) * 3
    assert [timeline.busy_seconds(rank) for rank in range(4)] == [24] * 4
    assert timeline.bubble == pytest.approx(3 / 11)


def test_times_are_of_a_ranks_share() -> None:
    """Where a rank holds several stages each takes its part."""
    times = Times(1, 2, 3, send=0.5)
    for name, share in (("zb-h1", 1), ("zbv", 2)):
        program = schedule(name, ranks=3, microbatches=6)
        seconds = times.of(program)
        found = {
            text: seconds(Action.parse(text)) for text in ("0F0", "0B0", "0I0", "0W0", "0SEND_F0", "0RECV_B0")
        }
        assert found == {
            "0F0": 1 / share,
            "0B0": 5 / share,
            "0I0": 2 / share,
            "0W0": 3 / share,
            "0SEND_F0": 0.5,
            "0RECV_B0": 0,
        }


def message_times(rendezvous: bool) -> dict[str, tuple[float, float]]:
    """Two microbatches through two ranks: F = B = 1, a message 3."""
    program = with_transfers(schedule("1f1b", ranks=2, microbatches=2))
    seconds = {Kind.SEND_ACTIVATION: 3.0, Kind.SEND_GRADIENT: 3.0, Kind.FORWARD: 1.0, Kind.BACKWARD: 1.0}
    timeline = clock(program, lambda action: seconds.get(action.kind, 0.0), rendezvous=rendezvous)
    return {str(span.action): (span.start_seconds, span.end_seconds) for span in timeline.spans}


def test_messages_run_behind_compute_one_after_another() -> None:
    found = message_times(rendezvous=False)
    assert found["0F1"] == (1, 2), "behind the first message"
    assert (found["0SEND_F0"], found["0SEND_F1"]) == ((1, 4), (4, 7)), "the second waits for the first"
    assert (found["1F0"], found["1B0"], found["1F1"]) == ((4, 5), (5, 6), (7, 8))
    assert (found["1SEND_B0"], found["0B0"]) == ((6, 9), (9, 10)), "the other way is another lane"


def test_a_rendezvous_holds_the_sender() -> None:
    found = message_times(rendezvous=True)
    assert (found["0SEND_F0"], found["0F1"]) == ((1, 4), (4, 5))
    assert (found["0SEND_F1"], found["1F0"]) == ((5, 8), (4, 5))


def test_peak_activations_are_the_published_ones() -> None:
    assert peak_in_flight(schedule("gpipe", ranks=4, microbatches=8)) == [8, 8, 8, 8]
    assert peak_in_flight(schedule("1f1b", ranks=4, microbatches=8)) == [4, 3, 2, 1]
    assert peak_in_flight(schedule("1f1b", ranks=4, microbatches=2)) == [2, 2, 2, 1]
    interleaved = schedule("interleaved2", ranks=4, microbatches=8)
    assert peak_in_flight(interleaved) == [11, 9, 7, 5]
    assert peak_activations(interleaved) == [5.5, 4.5, 3.5, 2.5]


def test_accumulation_holds_the_activations_of_one_microbatch() -> None:
    """The peak does not grow with the number of microbatches: two segments, so two activations."""
    for microbatches in (1, 8):
        assert peak_in_flight(one_stage(2, microbatches)) == [2]
        assert peak_in_flight(one_stage(2, microbatches, sharding=Sharding(FSDP), replicated=True)) == [2]


def test_reductions_run_behind_the_backward() -> None:
    """Three segments, backward 2 each; a reduction of 2 hides behind the next one, the last is exposed."""
    program = one_stage(3, 1)
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.REDUCE: 2.0, Kind.UPDATE: 1.0, Kind.LOSS: 0.5}
    timeline = clock(program, lambda action: seconds[action.kind])
    start = {span.action: span.start_seconds for span in timeline.spans}
    assert start[Action(Kind.REDUCE, 2)] == 5.0
    assert start[Action(Kind.REDUCE, 1)] == 7.0
    assert start[Action(Kind.REDUCE, 0)] == 9.0
    assert start[Action(Kind.UPDATE)] == 11.0
    assert timeline.seconds == 12.0


def test_reductions_queue_on_the_link() -> None:
    program = one_stage(2, 1)
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 1.0, Kind.REDUCE: 5.0, Kind.UPDATE: 0.0, Kind.LOSS: 0.0}
    timeline = clock(program, lambda action: seconds[action.kind])
    start = {span.action: span.start_seconds for span in timeline.spans}
    assert start[Action(Kind.REDUCE, 1)] == 3.0
    assert start[Action(Kind.REDUCE, 0)] == 8.0
    assert timeline.seconds == 13.0


def starts(program: Program) -> tuple[dict[str, float], float]:
    """When each action starts, and when the step ends: a forward takes 1, a backward 2, a collective 1."""
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.FREE: 0.0, Kind.LOSS: 0.0}
    timeline = clock(program, lambda action: seconds.get(action.kind, 1.0))
    assert not timeline.stuck
    assert len(timeline.spans) == len(program.ranks[0])
    return {str(span.action): span.start_seconds for span in timeline.spans}, timeline.seconds


def test_a_forward_waits_for_its_weights() -> None:
    """Without prefetch every gather is exposed, also behind the reduction that the link is busy with."""
    start, seconds = starts(one_stage(3, 1, sharding=Sharding(FSDP, prefetch=0), lookups=frozenset({0})))
    assert [start[f"{unit}GATHER0"] for unit in range(3)] == [0, 2, 4]
    assert [start[f"{segment}F0"] for segment in range(3)] == [1, 3, 5]
    assert (start["2B0"], start["2REDUCE"], start["1GATHER1"], start["1B0"]) == (6, 8, 9, 10)
    assert (start["1REDUCE"], start["0B0"], start["0REDUCE"], start["UPDATE"]) == (12, 12, 14, 15)
    assert seconds == 16


def test_gathers_run_behind_the_segment_before() -> None:
    """With a prefetch of 1 only the first gather and the last reduction are exposed."""
    start, seconds = starts(one_stage(3, 1, sharding=Sharding(FSDP, prefetch=1), lookups=frozenset({0})))
    assert [start[f"{unit}GATHER0"] for unit in range(3)] == [0, 1, 2]
    assert [start[f"{segment}F0"] for segment in range(3)] == [1, 2, 3]
    assert [start[f"{segment}B0"] for segment in range(3)] == [8, 6, 4]
    assert [start[f"{unit}REDUCE"] for unit in range(3)] == [10, 8, 6]
    assert [start[f"{unit}FREE0"] for unit in range(3)] == [2, 8, 6]
    assert seconds == 12


def test_sums_over_replicas_follow_the_next_reduction() -> None:
    start, seconds = starts(
        one_stage(3, 1, sharding=Sharding(FSDP, prefetch=1), replicated=True, lookups=frozenset({0}))
    )
    assert [start[f"{unit}REDUCE"] for unit in range(3)] == [10, 8, 6]
    assert [start[f"{unit}ALLREDUCE"] for unit in range(3)] == [12, 11, 9]
    assert (start["UPDATE"], seconds) == (13, 14)


def test_sharded_gradients_are_reduced_one_after_another() -> None:
    """Each waits for the one before it, and the rank waits with it: reductions of 5, the rest 1."""
    program = one_stage(2, 2, sharding=Sharding(FSDP, prefetch=9), lookups=frozenset({0}))
    seconds = {Kind.REDUCE: 5.0, Kind.FORWARD: 1.0, Kind.BACKWARD: 1.0}
    timeline = clock(program, lambda action: seconds.get(action.kind, 0.0))
    reductions = [span for span in timeline.spans if span.action.kind is Kind.REDUCE]
    assert [str(span.action) for span in reductions] == ["1REDUCE0", "0REDUCE0", "1REDUCE1", "0REDUCE1"]
    assert [span.start_seconds for span in reductions] == [3, 8, 13, 18]
    start = {str(span.action): span.start_seconds for span in timeline.spans}
    assert (start["0B0"], start["0F1"], start["1F1"], start["1B1"]) == (3, 8, 9, 10)
    assert (start["0B1"], start["UPDATE"]) == (13, 23)
    # Replicated gradients stay where they are: nothing computes later because of them.
    replicated = clock(one_stage(2, 2), lambda action: seconds.get(action.kind, 0.0))
    start = {str(span.action): span.start_seconds for span in replicated.spans}
    assert [start[f"{unit}REDUCE"] for unit in (1, 0)] == [7, 12]
    assert (start["0B1"], replicated.seconds) == (7, 17)


def test_uses_wait_for_the_gather_and_the_free_for_the_uses() -> None:
    program = one_stage(1, 1, sharding=Sharding(FSDP))
    gather, forward = program.ranks[0][:2]
    assert gather in program.needs(0, forward)
    free = next(action for action in program.ranks[0] if action.kind is Kind.FREE)
    assert program.needs(0, free) == [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]
