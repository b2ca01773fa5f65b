"""What really happened in a step, on all pipeline ranks: the same form as a simulation's."""

import torch

from fourfold.collectives import all_gather
from fourfold.parallel_model import ParallelModel
from fourfold.program.actions import Action, Kind
from fourfold.program.clock import Span, Timeline

_KINDS = list(Kind)


def measured_timeline(parallel: ParallelModel) -> Timeline:
    """The actions of the last training step, with the times at which they ran. All pipeline ranks call it.

    A RECV spans the time in which its rank waited for it; a SEND is not timed. Times are since the first rank
    began, by the ranks' clocks on the wall: across machines they are as exact as those agree. Empty on
    accelerators.
    """
    trace, axis = parallel.executor.trace, parallel.mesh.pp
    rows = [
        [
            _KINDS.index(span.action.kind),
            -1 if span.action.place is None else span.action.place,
            -1 if span.action.turn is None else span.action.turn,
            trace.began_at + span.start_seconds,
            trace.began_at + span.end_seconds,
        ]
        for span in trace.spans
    ]
    mine = torch.tensor(rows, dtype=torch.float64, device=parallel.mesh.device).view(-1, 5)
    began = all_gather(mine.new_tensor([trace.began_at]), axis).min()
    counts = all_gather(torch.tensor([len(rows)], device=mine.device), axis).tolist()
    table = all_gather(mine, axis, counts=counts)
    table[:, 3:] -= began
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    spans = []
    for rank, (kind, place, turn, start, end) in zip(ranks, table.tolist(), strict=True):
        action = Action(_KINDS[int(kind)], *(None if n < 0 else int(n) for n in (place, turn)))
        spans.append(Span(rank, action, start, end))
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_seconds, span.rank))), {}, axis.size)
