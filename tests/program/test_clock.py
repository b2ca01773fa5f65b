import pytest

from fourfold.build import build
from fourfold.layer.schedules import one_forward_one_backward, schedule
from fourfold.program import Action, Kind, clock, peak_in_flight


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 24])
def test_the_bubble_is_the_published_formula(name: str, stages: int, microbatches: int) -> None:
    """Idle (P-1)(F+B) a rank on top of M(F+B)."""
    timeline = clock(schedule(name, stages=stages, microbatches=microbatches))
    assert timeline.seconds == (microbatches + stages - 1) * 3
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_peak_activations_are_the_published_ones() -> None:
    assert peak_in_flight(schedule("gpipe", stages=4, microbatches=8)) == [8, 8, 8, 8]
    assert peak_in_flight(schedule("1f1b", stages=4, microbatches=8)) == [4, 3, 2, 1]
    assert peak_in_flight(schedule("1f1b", stages=4, microbatches=2)) == [2, 2, 2, 1]


def test_accumulation_holds_the_activations_of_one_microbatch() -> None:
    """The peak does not grow with the number of microbatches: two segments, so two activations."""
    for microbatches in (1, 8):
        program = build(
            one_forward_one_backward(stages=1, microbatches=microbatches),
            segments_of_stage=[2],
            users=[(0,), (1,)],
        )
        assert peak_in_flight(program) == [2]


def test_reductions_run_behind_the_backward() -> None:
    """Three segments, backward 2 each; a reduction of 2 hides behind the next one, the last is exposed."""
    program = build(
        one_forward_one_backward(stages=1, microbatches=1),
        segments_of_stage=[3],
        users=[(0,), (1,), (2,)],
    )
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.REDUCE: 2.0, Kind.UPDATE: 1.0, Kind.LOSS: 0.5}
    timeline = clock(program, lambda action: seconds[action.kind])
    start = {span.action: span.start_seconds for span in timeline.spans}
    assert start[Action(Kind.REDUCE, 2)] == 5.0
    assert start[Action(Kind.REDUCE, 1)] == 7.0
    assert start[Action(Kind.REDUCE, 0)] == 9.0
    assert start[Action(Kind.UPDATE)] == 11.0
    assert timeline.seconds == 12.0


def test_reductions_queue_on_the_link() -> None:
    program = build(
        one_forward_one_backward(stages=1, microbatches=1), segments_of_stage=[2], users=[(0,), (1,)]
    )
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 1.0, Kind.REDUCE: 5.0, Kind.UPDATE: 0.0, Kind.LOSS: 0.0}
    timeline = clock(program, lambda action: seconds[action.kind])
    start = {span.action: span.start_seconds for span in timeline.spans}
    assert start[Action(Kind.REDUCE, 1)] == 3.0
    assert start[Action(Kind.REDUCE, 0)] == 8.0
    assert timeline.seconds == 13.0
