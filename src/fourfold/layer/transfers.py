"""The pass that writes sends and receives between pipeline ranks, and when a send is known to have arrived.

[Note: messages in order] What crosses from one rank to another is sent right after the action that computed
it. Its RECV stands before the compute action of the receiver that runs when the sender computes it, or
earlier where it is needed sooner: so a buffer waits only for what is on its way, and the message travels
behind compute. Which action runs when, a simulation decides in which a forward takes one unit of time and a
backward two. On each edge (from, to, kind) the RECVs stand in the order of the SENDs, as transports without
tags pair messages by order.

No rank waits for another in a circle, even where each SEND holds its rank until its RECV stands ready: in the
simulated time every RECV stands ready *before* the end of the action whose result is sent, so the order of
simulated time is an order in which everything can happen.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fourfold.program.actions import COMPUTE, SENDS, STARTS_FROM, Action, Kind
from fourfold.program.clock import Span, clock
from fourfold.program.program import Program


def with_transfers(program: Program) -> Program:
    """Return ``program`` with SEND and RECV for every value that another rank goes on with."""
    if len(program.ranks) == 1:
        return program
    sends = [_with_sends(program, actions) for actions in program.ranks]
    spans = {span.action: span for span in clock(program).spans if span.action.kind in COMPUTE}
    return replace(
        program, ranks=tuple(_with_receives(program, sends, rank, spans) for rank in range(len(sends)))
    )


def _with_sends(program: Program, actions: Sequence[Action]) -> tuple[Action, ...]:
    written: list[Action] = []
    for action in actions:
        written.append(action)
        if (send := _crossing(program, action, _ENDS_IN)) is not None:
            written.append(send)
    return tuple(written)


_ENDS_IN = {
    Kind.FORWARD: Kind.SEND_ACTIVATION,
    Kind.BACKWARD: Kind.SEND_GRADIENT,
    Kind.INPUT_GRADIENT: Kind.SEND_GRADIENT,
}
"""The kind of message that a compute action's result may be sent as."""


def _crossing(program: Program, action: Action, kinds: Mapping[Kind, Kind]) -> Action | None:
    """The message of one of ``kinds`` at a compute action, None where no other rank is at its other end."""
    if action.kind not in kinds:
        return None
    transfer = Action(kinds[action.kind], action.segment, action.microbatch)
    exists = 0 <= transfer.other_end.segment < program.num_segments
    here = program.rank_of_segment[action.segment]
    return transfer if exists and program.peer(transfer) != here else None


def _with_receives(
    program: Program, sends: Sequence[Sequence[Action]], rank: int, spans: Mapping[Action, Span]
) -> tuple[Action, ...]:
    actions = sends[rank]
    compute = [index for index, action in enumerate(actions) if action.kind in COMPUTE and action in spans]
    starts = [spans[actions[index]].start_seconds for index in compute]
    place: dict[Action, int] = {}  # of each RECV: the index that it stands before
    for order, index in enumerate(compute):
        action = actions[index]
        if (receive := _crossing(program, action, STARTS_FROM)) is not None:
            sent = spans[program.maker(receive.other_end)].end_seconds
            running = bisect_left(starts, sent) - 1  # the last that starts before that
            place[receive] = compute[max(min(order - 1, running), 0)]
    by_edge: dict[tuple[int, Kind], list[Action]] = {}
    for sender, others in enumerate(sends):
        for action in others:
            if action.kind in SENDS and program.peer(action) == rank:
                by_edge.setdefault((sender, action.kind), []).append(action.other_end)
    for messages in by_edge.values():  # see [Note: messages in order]
        for earlier, later in zip(messages[-2::-1], messages[:0:-1], strict=True):
            place[earlier] = min(place[earlier], place[later])
    before: dict[int, list[Action]] = {}
    for messages in by_edge.values():
        for receive in messages:
            before.setdefault(place[receive], []).append(receive)
    return tuple(
        written for index, action in enumerate(actions) for written in (*before.get(index, ()), action)
    )


def arrived(program: Program, rank: int) -> dict[Action, tuple[Action, ...]]:
    """For each compute action of ``rank``, the SENDs of the rank that have arrived once it has its message.

    [Note: sent and gone] What was sent must be kept until it has arrived, and waiting for that could hold a
    rank up. But a message that comes back tells: whatever its sender had computed with before, has arrived.
    Where nothing comes back for long (the forwards of GPipe, an evaluation), no more sends are under way on
    an edge than there are pipeline ranks and one: then the oldest is waited for, which cannot end in a circle
    by [Note: messages in order].
    """
    return arrivals(program)[rank]


def arrivals(program: Program) -> list[dict[Action, tuple[Action, ...]]]:
    """The same for all ranks."""
    found: list[dict[Action, tuple[Action, ...]]] = [{} for _ in program.ranks]
    for peer, actions in enumerate(program.ranks):
        consumed: dict[int, list[Action]] = {}  # by the rank that sent it
        for action in actions:
            receive = program.message_needed(action) if action.kind in STARTS_FROM else None
            if receive is not None and program.peer(receive) != peer:
                consumed.setdefault(program.peer(receive), []).append(receive.other_end)
            elif action.kind in SENDS and (rank := program.peer(action)) != peer:
                use = program.user(action.other_end)
                found[rank][use] = (*found[rank].get(use, ()), *consumed.pop(rank, ()))
    return found
