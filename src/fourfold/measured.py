"""When the actions of a step really ran: in the same form as a simulation's."""

import time

import torch

from fourfold.collectives import Pending, all_gather
from fourfold.mesh import Axis
from fourfold.program.actions import Action, Kind
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
        self._on_host = device.type == "cpu"
        self._rank = rank
        self._began = time.perf_counter()
        self.began_at = time.time()
        """By the clock on the wall, which ranks share."""
        self._open: list[tuple[Action, float, Pending]] = []
        self.spans: list[Span] = []

    def now(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began

    def add(self, action: Action, start: float) -> None:
        """Note an action that ends now."""
        if self._on_host:
            self.spans.append(Span(self._rank, action, start, self.now()))
            self._close([entry for entry in self._open if entry[2].is_done()])

    def started(self, action: Action, start: float, pending: Pending) -> None:
        """Note a collective that runs on."""
        if self._on_host:
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
