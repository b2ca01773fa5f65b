"""When the actions of a step really ran, in the same form as a simulation's, and where the time went."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fourfold.collectives import Pending, Wait, all_gather
from fourfold.mesh import Axis
from fourfold.program.actions import COMPUTE, Action, Kind
from fourfold.program.clock import Span, Timeline


class Trace:
    """When each action of a step ran, in seconds since the step began.

    The end of a collective is seen after the action during which it ended, or when it is waited for. On an
    accelerator the host runs ahead of the device and its clock says nothing of actions: there are no spans.

    Args:
        device: where the step runs.
        rank: the pipeline rank that it is of.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        self.on_host = device.type == "cpu"
        """Whether times are known."""
        self._rank = rank
        self.began = time.perf_counter()
        """By the clock of `Wait`."""
        self.began_at = time.time()
        """By the clock on the wall, which ranks share."""
        self._open: list[tuple[Action, float, Pending]] = []
        self.spans: list[Span] = []

    def now(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.began

    def add(self, action: Action, start: float) -> None:
        """Note an action that ends now."""
        if self.on_host:
            self.spans.append(Span(self._rank, action, start, self.now()))
            self._close([entry for entry in self._open if entry[2].is_done()])

    def started(self, action: Action, start: float, pending: Pending) -> None:
        """Note a collective that runs on."""
        if self.on_host:
            self._open.append((action, start, pending))

    def waited(self, pending: Pending) -> None:
        """Note that a collective has been waited for."""
        self._close([entry for entry in self._open if entry[2] is pending])

    def _close(self, entries: list[tuple[Action, float, Pending]]) -> None:
        for entry in entries:
            self._open.remove(entry)
            self.spans.append(Span(self._rank, entry[0], entry[1], self.now()))


def measured_timeline(trace: Trace, axis: Axis) -> Timeline:
    """The actions of a step on all pipeline ranks, with the times at which they ran. All of them call it.

    A RECV spans the time in which its rank waited for it; a SEND is not timed. Times are since the first rank
    began, by the ranks' clocks on the wall: across machines they are as exact as those agree. Empty on
    accelerators.

    Args:
        trace: of this rank.
        axis: the pipeline ranks.
    """
    rows = [
        [
            _KINDS.index(span.action.kind),
            -1 if span.action.place is None else span.action.place,
            -1 if span.action.turn is None else span.action.turn,
            span.action.repeat,
            trace.began_at + span.start_seconds,
            trace.began_at + span.end_seconds,
        ]
        for span in trace.spans
    ]
    mine = torch.tensor(rows, dtype=torch.float64, device=trace.device).view(-1, 6)
    began = all_gather(mine.new_tensor([trace.began_at]), axis).min()
    counts = all_gather(torch.tensor([len(rows)], device=trace.device), axis).tolist()
    table = all_gather(mine, axis, counts=counts)
    table[:, 4:] -= began
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    spans = []
    for rank, (kind, place, turn, repeat, start, end) in zip(ranks, table.tolist(), strict=True):
        where = [None if n < 0 else int(n) for n in (place, turn)]
        action = Action(_KINDS[int(kind)], where[0], where[1], int(repeat))
        spans.append(Span(rank, action, start, end))
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_seconds, span.rank))), {}, axis.size)


_KINDS = list(Kind)


@dataclass(frozen=True)
class TimeSpent:
    """Where the seconds of one rank's step went. The parts are disjoint and add up to the step.

    What a rank waits for within an action is no part of the action.

    Attributes:
        compute: forwards and backwards.
        recompute: forwards that ran again.
        exposed: communication that nothing hid, by axis: starting collectives and waiting for them. Waiting
            for a slower rank looks the same.
        bubble: waiting for what other pipeline ranks compute, or add to a sum, with the time of the message.
        optimizer: the update, with its norm.
        data: making the batch.
        other: the rest: what the host does between actions.
    """

    compute: float = 0.0
    recompute: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    bubble: float = 0.0
    optimizer: float = 0.0
    data: float = 0.0
    other: float = 0.0

    def parts(self) -> dict[str, float]:
        """Every part by name, in the order in which they are printed; ``exposed tp`` for an axis."""
        return {
            "compute": self.compute,
            "recompute": self.recompute,
            **{f"exposed {axis}": seconds for axis, seconds in sorted(self.exposed.items())},
            "bubble": self.bubble,
            "optimizer": self.optimizer,
            "data": self.data,
            "other": self.other,
        }


def time_spent(
    trace: Trace, waits: Sequence[Wait], *, seconds: float, data_seconds: float
) -> TimeSpent | None:
    """Return where a step's time went; None on an accelerator, where the host's clock does not tell.

    Args:
        trace: of the step.
        waits: those of the step, in order.
        seconds: of the whole step.
        data_seconds: of making the batch, before the program ran.
    """
    if not trace.on_host:
        return None
    found = dict.fromkeys(_PART_OF.values(), 0.0)
    exposed: dict[str, float] = {}
    bubble, position = 0.0, 0
    for wait in waits:
        if "pp" in wait.axis.split(",") and wait.op != "send":
            bubble += wait.ended - wait.began
        else:
            exposed[wait.axis] = exposed.get(wait.axis, 0.0) + wait.ended - wait.began
    for span in trace.spans:
        part = _PART_OF.get(span.action.kind)
        if part is None:
            continue
        start, end = span.start_seconds + trace.began, span.end_seconds + trace.began
        busy = end - start
        while position < len(waits) and waits[position].began < end:
            if waits[position].began >= start:
                busy -= waits[position].ended - waits[position].began
            position += 1
        found[part] += busy
    other = seconds - data_seconds - bubble - sum(found.values()) - sum(exposed.values())
    return TimeSpent(exposed=exposed, bubble=bubble, data=data_seconds, other=other, **found)


_PART_OF = {
    **dict.fromkeys(COMPUTE, "compute"),
    Kind.RECOMPUTE: "recompute",
    Kind.UPDATE: "optimizer",
}


@dataclass
class Waited:
    """The collectives of one op on one axis in a step, of one rank.

    Attributes:
        exposed_seconds: in which the rank did nothing else.
        behind_seconds: in which they were under way behind other work. They may have ended before it did: it
            is the most that was hidden.
    """

    exposed_seconds: float = 0.0
    behind_seconds: float = 0.0


def by_op(waits: Sequence[Wait]) -> dict[tuple[str, str], Waited]:
    """Add up waits by (op, axis)."""
    found: dict[tuple[str, str], Waited] = {}
    for wait in waits:
        waited = found.setdefault((wait.op, wait.axis), Waited())
        waited.exposed_seconds += wait.ended - wait.began
        waited.behind_seconds += wait.behind_seconds
    return found


def gathered(values: Mapping[str, Any], axis: Axis, device: torch.device) -> list[dict[str, Any]]:
    """Return the named values of all ranks, by rank: what JSON can hold. All call it; names may differ."""
    text = torch.tensor(list(json.dumps(dict(values)).encode()), dtype=torch.uint8, device=device)
    counts = all_gather(torch.tensor([len(text)], device=device), axis).tolist()
    return [json.loads(bytes(part.tolist())) for part in all_gather(text, axis, counts=counts).split(counts)]
