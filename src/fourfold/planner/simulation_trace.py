"""A simulated step as a trace, beside the same step as it ran."""

from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.planner.simulated import Simulation
from fourfold.program.trace import named_ranks, run_events, trace_events, write_events


def write_simulation(simulation: Simulation, path: Path, *, measured: Path | None = None) -> None:
    """Write a simulated step in Chrome's trace format, with the names that a run's own trace has.

    Inside an action there is a slice for the time in which it waits for tp or cp.

    Args:
        simulation: of a step.
        path: the file, ``.json``.
        measured: the trace of a run of the same layout, its ``program.json``; each rank as it ran then stands
            below the rank as it was predicted.

    Raises:
        UserError: where that is no such trace.
    """
    ranks = simulation.timeline.num_ranks
    events = trace_events(simulation.timeline.spans)
    for waited in simulation.inside:
        start, end = waited.start_seconds * 1e6, waited.end_seconds * 1e6
        name = f"exposed {waited.lane}"
        events.append(
            {"name": name, "cat": "exposed", "pid": waited.rank, "tid": 0, "ph": "X", "ts": start,
             "dur": end - start, "args": {"action": str(waited.action)}}
        )  # fmt: skip
    if measured is None:
        write_events(named_ranks([f"rank {rank}, predicted" for rank in range(ranks)]) + events, path)
        return
    names = [f"rank {rank}, {what}" for rank in range(ranks) for what in ("predicted", "measured")]
    both = [{**event, "pid": 2 * event["pid"]} for event in events]
    for event in _actions_of(measured, ranks):
        moved = {**event, "pid": 2 * event["pid"] + 1}
        both.append(moved | {"id": f"measured {event['id']}"} if "id" in event else moved)
    write_events(named_ranks(names) + both, path)


def _actions_of(path: Path, ranks: int) -> list[dict[str, Any]]:
    """The events of a run's trace but for the names of its ranks."""
    found = run_events(path)
    last = max(event["pid"] for event in found)
    if last >= ranks:
        raise UserError(
            f"{path} has {last + 1} pipeline ranks and the layout {ranks}: simulate the layout of that run"
        )
    return found
