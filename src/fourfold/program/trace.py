"""Write a timeline as a trace for chrome://tracing or ui.perfetto.dev."""

import json
from pathlib import Path
from typing import Any

from fourfold.program.actions import COMMUNICATION, RECEIVES, Kind
from fourfold.program.clock import Span, Timeline


def write_trace(timeline: Timeline, path: Path, *, microseconds: float = 1e6) -> None:
    """Write a timeline, simulated or measured, in Chrome's trace format.

    Each rank is a process. What it computes is a track; what runs behind that, messages and collectives, are
    tracks of their own.

    Args:
        timeline: what to write.
        path: the file, ``.json``.
        microseconds: how many one unit of the timeline's time is shown as.
    """
    events: list[dict[str, Any]] = []
    for rank in range(timeline.num_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for number, span in enumerate(timeline.spans):
        events += _events(span, number, microseconds)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _events(span: Span, number: int, microseconds: float) -> list[dict[str, Any]]:
    kind = span.action.kind
    if kind in RECEIVES or kind is Kind.FREE:
        return []  # nothing runs
    start, end = span.start_seconds * microseconds, span.end_seconds * microseconds
    args = {"place": span.action.place, "turn": span.action.turn}
    if span.action.repeat:
        args["repeat"] = span.action.repeat
    event: dict[str, Any] = {"name": str(span.action), "cat": str(kind), "pid": span.rank, "tid": 0}
    event["args"] = args
    if kind not in COMMUNICATION:
        return [{**event, "ph": "X", "ts": start, "dur": end - start}]
    # What overlaps needs a begin and an end with a number of its own.
    event |= {"id": number}
    return [{**event, "ph": "b", "ts": start}, {**event, "ph": "e", "ts": end}]
