"""Write a timeline as a trace for chrome://tracing or ui.perfetto.dev, and read what a run wrote."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fourfold.errors import UserError
from fourfold.program.actions import COMMUNICATION, RECEIVES, Kind
from fourfold.program.clock import Span, Timeline, Times


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


def run_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run's trace, its ``program.json``, but for the names of its ranks.

    Raises:
        UserError: where that is no such trace.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "traceEvents" not in content:
            raise ValueError("it has no 'traceEvents'")
        events = content["traceEvents"]
        found = [event for event in events if event["ph"] != "M"]
        if not found or not all(isinstance(event["pid"], int) for event in found):
            raise ValueError("no actions of ranks")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}: use the program.json of a run's folder"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no trace of a run ({error}): use the program.json of its folder"
        ) from None
    return found


_PARTS = {
    Kind.FORWARD: {"forward": 1.0},
    Kind.INPUT_GRADIENT: {"input_gradient": 1.0},
    Kind.WEIGHT_GRADIENT: {"weight_gradient": 1.0},
    Kind.BACKWARD: {"input_gradient": 0.5, "weight_gradient": 0.5},
}
"""What the time of an action is counted as: of a whole backward a trace does not tell its halves apart."""


def measured_times(path: Path) -> Times:
    """How long a microbatch took on a rank of a run, in milliseconds; messages are not timed, and take 0.

    Each time is the median over ranks and microbatches, of what a rank computed for one in all its segments.

    Args:
        path: the trace of the run, its ``program.json``.

    Raises:
        UserError: where that is none, or holds no forward and no backward.
    """
    spent: dict[str, dict[tuple[int, int], float]] = {part: {} for of in _PARTS.values() for part in of}
    try:
        for event in run_events(path):
            for part, share in _PARTS.get(event["cat"], {}).items():
                key = event["pid"], event["args"]["turn"]
                spent[part][key] = spent[part].get(key, 0.0) + share * event["dur"] / 1e3
        return Times(**{part: median(found.values()) for part, found in spent.items()})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} holds no forwards and backwards of a step ({error}): use the program.json of a run"
        ) from None
