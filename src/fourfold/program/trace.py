"""Write a timeline as a trace for chrome://tracing or ui.perfetto.dev."""

import json
from collections.abc import Mapping, Sequence
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
    events = named_ranks([f"rank {rank}" for rank in range(timeline.num_ranks)])
    events += trace_events(timeline.spans, microseconds=microseconds)
    write_events(events, path)


def write_events(events: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a trace of these events."""
    path.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}) + "\n")


def named_ranks(names: Sequence[str]) -> list[dict[str, Any]]:
    """The events that name the processes of a trace, and put them in this order."""
    events: list[dict[str, Any]] = []
    for rank, name in enumerate(names):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    return events


def trace_events(spans: Sequence[Span], *, microseconds: float = 1e6) -> list[dict[str, Any]]:
    """The events of spans, each in the process of its rank."""
    return [event for number, span in enumerate(spans) for event in _events(span, number, microseconds)]


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
