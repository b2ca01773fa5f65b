"""Every schedule by name: its order, its bubble and memory in closed form, and that it can run."""

import random
from itertools import product

import pytest

from fourfold.errors import UserError
from fourfold.layer import schedules
from fourfold.layer.schedules import most_activations, named_schedules, schedule, schedule_of
from fourfold.layer.transfers import with_transfers
from fourfold.program import Program, check, clock, peak_in_flight
from fourfold.program.clock import Times, peak_activations
from fourfold.specs import Layout, ScheduleName

EQUAL = Times()
UNEQUAL = [Times(1, 1.25, 0.75), Times(2, 3, 1), Times(3, 2, 1), Times(1, 1, 0.5), EQUAL]
"""With W <= F and W <= I."""


def orders(name: str, *, ranks: int, microbatches: int) -> list[str]:
    program = schedule(name, ranks=ranks, microbatches=microbatches)
    return [" ".join(map(str, actions)) for actions in program.ranks]


def bubble(program: Program, times: Times) -> float:
    """The time of a step beyond the work of a rank."""
    one = times.forward + times.input_gradient + times.weight_gradient
    program = with_transfers(program) if times.send else program
    return clock(program, times.of(program)).seconds - program.microbatches * one


def window(program: Program, times: Times) -> float:
    """The most that a rank stands idle between its own first and its own last action."""
    one = times.forward + times.input_gradient + times.weight_gradient
    spans = clock(program, times.of(program)).spans
    return (
        max(
            max(span.end_seconds for span in spans if span.rank == rank)
            - min(span.start_seconds for span in spans if span.rank == rank)
            for rank in range(len(program.ranks))
        )
        - program.microbatches * one
    )


# Orders


def test_gpipe_runs_all_forwards_first() -> None:
    assert orders("gpipe", ranks=2, microbatches=2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_1f1b_warms_up_then_alternates() -> None:
    assert orders("1f1b", ranks=3, microbatches=4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_another_depth() -> None:
    assert orders("1f1b3", ranks=2, microbatches=4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert orders("1f1b1", ranks=2, microbatches=2) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]


def test_accumulation_is_1f1b_on_one_rank() -> None:
    assert orders("1f1b", ranks=1, microbatches=3) == ["0F0 0B0 0F1 0B1 0F2 0B2"]


def test_interleaved_takes_a_group_through_each_stage() -> None:
    assert orders("interleaved2", ranks=2, microbatches=4) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_breadth_first_takes_all_through_each_stage() -> None:
    assert orders("bfs2", ranks=1, microbatches=2) == ["0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"]


def test_zero_bubble_defers_weight_gradients() -> None:
    assert orders("zb-h1", ranks=2, microbatches=3) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert orders("zb-h2", ranks=2, microbatches=4) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


def test_a_v_goes_down_the_ranks_and_up_again() -> None:
    for name in ("zbv", "dualpipev"):
        assert schedule(name, ranks=3, microbatches=8).rank_of_segment == (0, 1, 2, 2, 1, 0)
    assert orders("zbv", ranks=2, microbatches=3) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    assert orders("dualpipev", ranks=1, microbatches=3) == [
        "0F0 1F0 0F1 1B0 1F1 0B0 0F2 1B1 1F2 0B1 1B2 0I2 0W2"
    ]


# Closed forms


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("times", [EQUAL, Times(2, 3, 1), Times(1, 0.5, 2)])
def test_the_bubbles_of_whole_backwards(ranks: int, times: Times) -> None:
    """(P-1)(F+B)/v; with fewer microbatches than ranks the later stages of a rank wait for the first, too."""
    backward = times.input_gradient + times.weight_gradient
    for microbatches, chunks in product((1, 3, 7, 8, 13), (1, 2, 3)):
        short = max(0, ranks - microbatches) * (chunks - 1)
        expected = (ranks - 1 + short) * (times.forward + backward) / chunks
        for name in (f"interleaved{chunks}", f"bfs{chunks}", *(("gpipe", "1f1b") if chunks == 1 else ())):
            program = schedule(name, ranks=ranks, microbatches=microbatches)
            assert bubble(program, times) == pytest.approx(expected, abs=1e-9), (name, microbatches)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_the_depth_of_1f1b(ranks: int) -> None:
    """More than P changes nothing where messages take no time; with 1 nothing runs at the same time."""
    times = Times(1, 1.25, 0.75)
    found = [
        bubble(schedule(f"1f1b{depth}", ranks=ranks, microbatches=12), times)
        for depth in range(1, 2 * ranks + 2)
    ]
    assert found[0] == 12 * (ranks - 1) * 3
    assert min(found[: ranks - 1]) > (ranks - 1) * 3
    assert found[ranks - 1 :] == [(ranks - 1) * 3] * (ranks + 2)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 13])
def test_the_price_of_messages(ranks: int, microbatches: int) -> None:
    """Up and down once under GPipe; under 1F1B again for every P/(P-1) microbatches, unless it runs ahead."""
    times = Times(1, 1.25, 0.75, send=0.125)
    once = 2 * (ranks - 1) * times.send
    again = 2 * ((microbatches - 1) * (ranks - 1) // ranks) * times.send
    for name, price in (("gpipe", once), (f"1f1b{2 * ranks - 1}", once), (f"1f1b{ranks}", once + again)):
        program = schedule(name, ranks=ranks, microbatches=microbatches)
        assert bubble(program, times) == pytest.approx((ranks - 1) * 4 + price - (ranks - 1)), name


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("times", UNEQUAL)
def test_the_bubbles_of_zero_bubble_schedules(ranks: int, times: Times) -> None:
    f, i, w = times.forward, times.input_gradient, times.weight_gradient
    for more in (0, 1, 2, 9):
        program = schedule("zb-h1", ranks=ranks, microbatches=ranks + more)
        assert bubble(program, times) == pytest.approx((ranks - 1) * (f + i - w))
        program = schedule("zb-h2", ranks=ranks, microbatches=2 * ranks - 1 + more)
        assert bubble(program, times) == pytest.approx((ranks - 1) * max(f, f + i - 2 * w))
        assert window(program, times) == pytest.approx((ranks - 1) * max(0, f + i - 2 * w))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_bubbles_of_v_schedules(ranks: int) -> None:
    """(P-1)F/2 where F = I = W; under ZBV all of it because ranks begin one after another."""
    for microbatches in (ranks, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 3 * ranks + 2):
        program = schedule("zbv", ranks=ranks, microbatches=microbatches)
        assert bubble(program, EQUAL) == (ranks - 1) / 2
        assert microbatches < 2 * ranks - 1 or window(program, EQUAL) == 0
        program = schedule("dualpipev", ranks=ranks, microbatches=microbatches)
        assert bubble(program, EQUAL) == (ranks - 1) / 2


def test_the_published_comparison() -> None:
    """8 ranks, 24 microbatches, F = 1, I = 1.2, W = 0.8: the idle part of the step."""
    published = {
        "gpipe": 22.6, "1f1b": 22.6, "interleaved2": 12.7, "bfs2": 12.7, "zb-h1": 12.0, "zb-h2": 8.9,
        "zbv": 5.5, "dualpipev": 6.6,
    }  # fmt: skip
    times = Times(1, 1.2, 0.8)
    for name, percent in published.items():
        program = schedule(name, ranks=8, microbatches=24)
        assert round(100 * clock(program, times.of(program)).bubble, 1) == percent, name


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_activations_of_every_schedule(ranks: int) -> None:
    microbatches = 3 * ranks
    held = {
        "gpipe": [microbatches] * ranks,
        "1f1b": list(range(ranks, 0, -1)),
        f"1f1b{2 * ranks - 1}": list(range(2 * ranks - 1, 0, -2)),
        "1f1b1": [1] * ranks,
        "bfs3": [microbatches] * ranks,
        "zb-h1": [ranks] * ranks,
        "zb-h2": [2 * ranks - 1] * ranks,
        "zbv": [ranks] * ranks,
        "dualpipev": [ranks + 0.5] * ranks,
    }
    for chunks in (2, 3, 4):
        first = ranks + (ranks - 1) / chunks
        held[f"interleaved{chunks}"] = [first - 2 * rank / chunks for rank in range(ranks)]
    for name, expected in held.items():
        program = schedule(name, ranks=ranks, microbatches=microbatches)
        assert peak_activations(program) == pytest.approx(expected), name
    assert peak_in_flight(schedule("zbv", ranks=ranks, microbatches=microbatches)) == [2 * ranks] * ranks


PROMISES = ["1f1b", "1f1b1", "1f1b3", "1f1b9", "interleaved2", "interleaved3", "zb-h1", "zb-h2", "zbv"]


@pytest.mark.parametrize("name", [*PROMISES, "dualpipev", "auto3"])
def test_no_rank_holds_more_than_was_promised(name: str) -> None:
    """And some rank holds as much, but where the search found something better."""
    for ranks, microbatches in product((2, 3, 4, 8), (1, 2, 3, 5, 8, 19) if name != "auto3" else (2, 5)):
        held = max(peak_activations(schedule(name, ranks=ranks, microbatches=microbatches)))
        most = most_activations(ScheduleName.parse(name), ranks=ranks, microbatches=microbatches)
        assert most is not None
        assert held <= most
        assert held == pytest.approx(most) or name == "auto3", f"{ranks} ranks, {microbatches} microbatches"


def test_a_broken_promise_is_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        schedules, "one_forward_one_backward", lambda depth, **sizes: schedules.gpipe(**sizes)
    )
    with pytest.raises(AssertionError, match="schedule 1f1b breaks its promise: 0F4 on rank 0"):
        schedule_of(Layout.parse("pp4"), microbatches=8, layers=4)


@pytest.mark.parametrize("name", ["gpipe", "bfs2", "auto", "mine.csv"])
def test_some_promise_nothing(name: str) -> None:
    assert most_activations(ScheduleName.parse(name), ranks=4, microbatches=8) is None


def test_the_first_rank_holds_the_depth() -> None:
    for depth in range(1, 10):
        program = schedule(f"1f1b{depth}", ranks=5, microbatches=12)
        held = peak_in_flight(program)
        assert held[0] == depth
        assert held == sorted(held, reverse=True)


# Every schedule can run


def names(ranks: int) -> list[str]:
    depths = {1, (ranks + 1) // 2, ranks + 1}
    return [*named_schedules(ranks=ranks, microbatches=1), *(f"1f1b{depth}" for depth in sorted(depths))]


EVERY = [
    (name, ranks, microbatches)
    for ranks, microbatches in product(range(1, 9), range(1, 17))
    for name in names(ranks)
]


@pytest.mark.parametrize("part", range(8))
def test_no_schedule_deadlocks(part: int) -> None:
    """Neither where messages are buffered nor where each holds its rank until it has come."""
    # PP-02, PP-16
    sample = random.Random(part).sample(EVERY, 20)
    sample += [(name, 2 + part % 7, m) for name in ("interleaved2", "bfs3", "zbv") for m in (1, 2 * part + 2)]
    for name, ranks, microbatches in sample:
        program = with_transfers(schedule(name, ranks=ranks, microbatches=microbatches))
        try:
            check(program)
        except UserError as error:
            pytest.fail(f"{name} on {ranks} ranks, {microbatches} microbatches: {error}")


def test_fewer_microbatches_than_ranks() -> None:
    # PP-02
    for name, microbatches in product(("gpipe", "1f1b", "interleaved2"), (1, 2, 3, 4, 5)):
        check(with_transfers(schedule(name, ranks=4, microbatches=microbatches)))


# Mistakes


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(UserError) as error:
        schedule("1f1bb", ranks=0, microbatches=-1)
    name, *sizes = error.value.messages
    assert name.startswith("there is no schedule '1f1bb'. Did you mean '1f1b'?")
    assert sizes == ["ranks=0: must be at least 1", "microbatches=-1: must be at least 1"]


def test_more_stages_than_layers_are_refused() -> None:
    schedule("interleaved3", ranks=2, microbatches=4, most_stages=6)
    message = (
        "schedule interleaved3 cuts the model into 6 stages on 2 ranks, but there are layers for 5: use one "
        "of 2 stages a rank or fewer, or 6 layers or more"
    )
    with pytest.raises(UserError, match=message):
        schedule("interleaved3", ranks=2, microbatches=4, most_stages=5)
