"""The pipeline for many sets of durations at once says what the clock says of each."""

import numpy as np
import pytest

from fourfold.layer.transfers import with_transfers
from fourfold.planner.pipeline import (
    StageSeconds,
    in_flight,
    pipeline,
    pipeline_seconds,
    stages_of_ranks,
)
from fourfold.program.actions import SENDS, Action, Kind
from fourfold.program.clock import clock, peak_activations
from fourfold.specs import ScheduleName

CASES = [
    ("gpipe", 4, 9),
    ("1f1b", 4, 8),
    ("1f1b", 8, 20),
    ("1f1b6", 4, 11),
    ("interleaved2", 4, 16),
    ("interleaved3", 4, 13),
    ("bfs2", 4, 10),
    ("zb-h1", 6, 20),
    ("zb-h2", 4, 12),
    ("zbv", 4, 12),
    ("dualpipev", 4, 12),
]


def durations(stages: int, seed: int) -> StageSeconds:
    random = np.random.default_rng(seed)
    forward = 1 + 0.3 * random.random((stages, 1))
    backward = 2 * forward + 0.3 * random.random((stages, 1))
    return StageSeconds(forward, backward, backward * 0.45)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), CASES)
def test_it_is_the_clock(name: str, ranks: int, microbatches: int) -> None:
    found = pipeline(name, ranks, microbatches, layers=40)
    sets = [durations(found.order.num_segments, seed) for seed in range(2)]
    sends = [0.0, 0.07]
    together = StageSeconds(
        *(np.hstack([getattr(one, part) for one in sets]) for part in ("forward", "backward", "weights"))
    )
    seconds = found.seconds(together, np.array(sends))
    program = with_transfers(found.order)
    for index, (times, send) in enumerate(zip(sets, sends, strict=True)):

        def of(action: Action, times: StageSeconds = times, send: float = send) -> float:
            if action.kind in SENDS:
                return send
            return (
                0.0
                if action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
                else float(times.of(action.kind, action.segment)[0])
            )

        assert seconds[index] == pytest.approx(clock(program, of).seconds, rel=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "interleaved2", "zb-h1", "zbv"])
def test_many_microbatches_go_on_as_few_do(name: str) -> None:
    stages = pipeline(name, 4, 8, layers=40).order.num_segments
    times, send = durations(stages, 3), np.array([0.05])
    whole = pipeline(name, 4, 67, layers=40).seconds(times, send)
    assert pipeline_seconds(name, 4, 67, 40, times, send) == pytest.approx(whole, rel=0.004)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), CASES)
def test_what_is_in_flight_is_known_without_the_schedule(name: str, ranks: int, microbatches: int) -> None:
    order = pipeline(name, ranks, microbatches, layers=40).order
    counted = peak_activations(order)
    known = in_flight(ScheduleName.parse(name), ranks, microbatches)
    assert max(known) == pytest.approx(max(counted))
    assert all(one >= other - 0.5 for one, other in zip(known, counted, strict=True))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), CASES)
def test_which_stages_a_rank_has_is_known_without_the_schedule(
    name: str, ranks: int, microbatches: int
) -> None:
    order = pipeline(name, ranks, microbatches, layers=40).order
    for rank, own in enumerate(stages_of_ranks(ScheduleName.parse(name), ranks, 40)):
        assert [order.rank_of_segment[stage] for stage in own] == [rank] * len(own)
