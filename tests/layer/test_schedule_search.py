import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.layer.schedule_search import quickest, step_seconds
from fourfold.layer.schedules import named_schedules, schedule
from fourfold.layer.transfers import with_transfers
from fourfold.program import check, clock
from fourfold.program.clock import Times, peak_activations

TIMES = [Times(), Times(1, 1.2, 0.8, 0.2), Times(1, 0.5, 1.5, 0.05)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (3, 2), (4, 8), (5, 7)])
def test_the_seconds_of_a_step_are_the_clocks(times: Times, ranks: int, microbatches: int) -> None:
    for name, program in named_schedules(ranks=ranks, microbatches=microbatches).items():
        with_messages = with_transfers(program)
        expected = clock(with_messages, times.of(program)).seconds
        assert step_seconds(program, times) == pytest.approx(expected), name


DURATIONS = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


@settings(max_examples=60, deadline=None)
@given(
    st.builds(Times, st.floats(0.01, 10.0), DURATIONS, DURATIONS, DURATIONS),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([None, 1, 2, 3]),
)
def test_auto_is_never_worse_than_a_named_schedule(
    times: Times, ranks: int, microbatches: int, cap: int | None, most_chunks: int | None
) -> None:
    name = "auto" if cap is None else f"auto{cap}"
    most_stages = None if most_chunks is None else most_chunks * ranks
    found = schedule(name, ranks=ranks, microbatches=microbatches, times=times, most_stages=most_stages)
    check(with_transfers(found))
    assert cap is None or max(peak_activations(found)) <= cap
    seconds = step_seconds(found, times)
    for other, program in named_schedules(ranks=ranks, microbatches=microbatches, depth=cap).items():
        if (cap is None or max(peak_activations(program)) <= cap) and (
            most_stages is None or program.num_segments <= most_stages
        ):
            assert seconds <= step_seconds(program, times) * (1 + 1e-9), other


def test_auto_finds_more_than_the_names_know() -> None:
    """With the memory of ZBV, half of its bubble; also where times are unequal and messages cost."""
    times = Times(1, 1.2, 0.8, 0.02)
    named = named_schedules(ranks=4, microbatches=12)
    best = min(step_seconds(program, times) for program in named.values())
    assert step_seconds(schedule("auto", ranks=4, microbatches=12, times=times), times) < best
    equal = Times()
    four = schedule("auto4", ranks=4, microbatches=12)
    assert step_seconds(four, equal) - 36 == pytest.approx(0.75)
    assert step_seconds(named["zbv"], equal) - 36 == 1.5


def test_auto_gives_the_same_every_time() -> None:
    times = Times(1, 1.3, 0.7, 0.1)
    first, second = (schedule("auto5", ranks=4, microbatches=6, times=times) for _ in range(2))
    assert first.ranks == second.ranks


@pytest.mark.parametrize("most_stages", [4, 7, 8, 11])
def test_auto_makes_no_more_stages_than_there_are_layers(most_stages: int) -> None:
    found = schedule("auto", ranks=4, microbatches=8, most_stages=most_stages)
    assert found.num_segments <= most_stages


def test_of_equally_quick_ones_auto_takes_what_holds_less() -> None:
    found = schedule("auto", ranks=1, microbatches=4)
    assert peak_activations(found) == [1]


def test_room_for_less_than_one_microbatch_is_refused() -> None:
    with pytest.raises(UserError, match=r"0\.5 activations a rank are too few for any schedule"):
        quickest({}, ranks=2, microbatches=2, times=Times(), most_activations=0.5)
