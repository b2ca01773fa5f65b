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

from fourfold.program.actions import COMPUTE, SENDS, Action, Kind, Program
from fourfold.program.clock import Span, clock


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
        if (send := _send_after(program, action)) is not None:
            written.append(send)
    return tuple(written)


def _send_after(program: Program, action: Action) -> Action | None:
    """The SEND of what an action computed, None where it stays on the rank."""
    if action.kind is Kind.FORWARD:
        kind, following = Kind.SEND_ACTIVATION, action.segment + 1
    elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        kind, following = Kind.SEND_GRADIENT, action.segment - 1
    else:
        return None
    if not 0 <= following < program.num_segments:
        return None
    here, there = program.rank_of_segment[action.segment], program.rank_of_segment[following]
    return None if here == there else Action(kind, action.segment, action.microbatch)


def _with_receives(
    program: Program, sends: Sequence[Sequence[Action]], rank: int, spans: Mapping[Action, Span]
) -> tuple[Action, ...]:
    actions = sends[rank]
    compute = [index for index, action in enumerate(actions) if action.kind in COMPUTE and action in spans]
    starts = [spans[actions[index]].start_seconds for index in compute]
    place: dict[Action, int] = {}  # of each RECV: the index that it stands before
    for order, index in enumerate(compute):
        action = actions[index]
        if (receive := _receive_before(program, action)) is not None:
            sent = spans[program.maker(program.sender(receive))].end_seconds
            running = bisect_left(starts, sent) - 1  # the last that starts before that
            place[receive] = compute[max(min(order - 1, running), 0)]
    by_edge: dict[tuple[int, Kind], list[Action]] = {}
    for sender, others in enumerate(sends):
        for action in others:
            if action.kind in SENDS and program.peer(action) == rank:
                by_edge.setdefault((sender, action.kind), []).append(program.receiver(action))
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


def _receive_before(program: Program, action: Action) -> Action | None:
    """The RECV of what an action starts from, None where that is made on the rank."""
    if action.kind is Kind.FORWARD:
        receive = Action(Kind.RECV_ACTIVATION, action.segment, action.microbatch)
    elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        receive = Action(Kind.RECV_GRADIENT, action.segment, action.microbatch)
    else:
        return None
    source = program.sender(receive).segment
    if not 0 <= source < program.num_segments:
        return None
    here, there = program.rank_of_segment[action.segment], program.rank_of_segment[source]
    return None if here == there else receive


def arrived(program: Program, rank: int) -> dict[Action, tuple[Action, ...]]:
    """For each compute action of ``rank``, the SENDs of the rank that have arrived once it has its message.

    [Note: sent and gone] What was sent must be kept until it has arrived, and waiting for that could hold a
    rank up. But a message that comes back tells: whatever its sender had computed with before, has arrived.
    Where nothing comes back for long (the forwards of GPipe, an evaluation), no more sends are under way on
    an edge than there are pipeline ranks and one: then the oldest is waited for, which cannot end in a circle
    by [Note: messages in order].
    """
    found: dict[Action, tuple[Action, ...]] = {}
    for peer, actions in enumerate(program.ranks):
        consumed: list[Action] = []
        for action in actions if peer != rank else ():
            receive = program.message_needed(action) if action.kind in COMPUTE else None
            if receive is not None and program.peer(receive) == rank:
                consumed.append(program.sender(receive))
            elif action.kind in SENDS and program.peer(action) == rank:
                use = _use(program, program.receiver(action))
                found[use] = (*found.get(use, ()), *consumed)
                consumed = []
    return found


def _use(program: Program, receive: Action) -> Action:
    """The compute action that needs a message."""
    if receive.kind is Kind.RECV_ACTIVATION:
        return Action(Kind.FORWARD, receive.segment, receive.microbatch)
    split = (receive.segment, receive.microbatch) in program.split_backwards
    kind = Kind.INPUT_GRADIENT if split else Kind.BACKWARD
    return Action(kind, receive.segment, receive.microbatch)
