from itertools import product

import pytest

from fourfold.layer.list_scheduling import Listed, Rule, list_schedule, loop_placement, v_placement
from fourfold.layer.schedule_search import RULES
from fourfold.layer.transfers import with_transfers
from fourfold.program import Kind, check, clock, peak_in_flight
from fourfold.program.clock import Times

TIMES = Times(1, 1.25, 0.75, send=0.125)


def listed(
    placement: tuple[int, ...],
    *,
    microbatches: int,
    most_in_flight: int,
    times: Times = TIMES,
    rule: Rule = Rule(),  # noqa: B008
    limit_seconds: float = float("inf"),
) -> Listed:
    found = list_schedule(
        placement,
        microbatches=microbatches,
        most_in_flight=most_in_flight,
        times=times,
        rule=rule,
        limit_seconds=limit_seconds,
    )
    assert found is not None
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "placement", [loop_placement(3, 1), loop_placement(3, 3), v_placement(3), (0, 0, 1, 2, 1), (0,)]
)
def test_its_times_are_the_clocks_and_its_bound_is_kept(placement: tuple[int, ...], rule: Rule) -> None:
    most_stages = max(placement.count(rank) for rank in set(placement))
    for microbatches, room in product((1, 2, 5), (0, 1, 4, 20)):
        found = listed(placement, microbatches=microbatches, most_in_flight=most_stages + room, rule=rule)
        program = with_transfers(found.program())
        check(program)
        assert found.seconds == pytest.approx(clock(program, TIMES.of(program)).seconds)
        assert max(peak_in_flight(program)) <= most_stages + room


def test_a_patient_rank_waits_for_what_is_about_to_come() -> None:
    """At 6 rank 0 could start a weight gradient of 4; at 7 comes the next gradient from above."""
    times = Times(1, 1, 4, send=1)
    finished = {}
    for patience in (0.0, 0.5):
        found = listed(
            loop_placement(2, 1), microbatches=2, most_in_flight=2, times=times, rule=Rule(patience=patience)
        )
        finished[patience] = " ".join(
            f"{kind}{m}" for kind, _, m in found.orders[0] if kind is not Kind.FORWARD
        )
    assert finished == {0.0: "I0 W0 I1 W1", 0.5: "I0 I1 W0 W1"}


def test_it_gives_up_beyond_the_limit() -> None:
    arguments = {"microbatches": 4, "most_in_flight": 8, "times": TIMES}
    seconds = list_schedule(v_placement(4), **arguments).seconds
    assert list_schedule(v_placement(4), **arguments, limit_seconds=seconds - 0.01) is None
    assert list_schedule(v_placement(4), **arguments, limit_seconds=seconds).seconds == seconds
