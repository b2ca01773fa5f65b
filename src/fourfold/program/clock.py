"""Simulate a program: when each action runs, what stands idle, how much is in flight.

Each rank computes in one lane: compute actions and the update run one after another in program order. A
collective starts when it is reached, runs on a lane for collectives, and holds back only what needs it. So
does a message between pipeline ranks; each pair of ranks, direction and kind has a lane of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fourfold.program.actions import (
    COMMUNICATION,
    COMPUTE,
    FORWARDS,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
)
from fourfold.program.liveness import left_behind
from fourfold.program.program import Program


@dataclass(frozen=True, slots=True)
class Span:
    """One action on a timeline."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        spans: every action that ran, in the order in which it started.
        stuck: for each rank that could not finish, the action it waits at.
        num_ranks: how many pipeline ranks the program has.
    """

    spans: tuple[Span, ...]
    stuck: dict[int, Action]
    num_ranks: int

    @cached_property
    def seconds(self) -> float:
        """When the last action of any rank ends."""
        return max((span.end_seconds for span in self.spans), default=0.0)

    def busy_seconds(self, rank: int) -> float:
        """The time in which ``rank`` computes."""
        return sum(
            span.end_seconds - span.start_seconds
            for span in self.spans
            if span.rank == rank and span.action.kind not in COMMUNICATION
        )

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time: 1 - busy / (ranks x step)."""
        if not self.seconds:
            return 0.0
        busy = sum(self.busy_seconds(rank) for rank in range(self.num_ranks))
        return 1.0 - busy / (self.num_ranks * self.seconds)


def unit_seconds(action: Action) -> float:
    """Durations in units of one forward: a backward is two, its halves one each, the rest is free."""
    if action.kind is Kind.BACKWARD:
        return 2.0
    return 1.0 if action.kind in COMPUTE else 0.0


@dataclass(frozen=True)
class Times:
    """Durations on one microbatch of what one rank holds of the model, and of a message, in any one unit.

    Where a rank holds several stages, each takes its share.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    send: float = 0.0

    def of(self, schedule: Program) -> Callable[[Action], float]:
        """The duration of the actions of a schedule over stages."""
        durations = self.by_kind(len(schedule.ranks) / schedule.num_segments)
        return lambda action: durations[action.kind]

    def by_kind(self, share: float) -> dict[Kind, float]:
        """The duration of each kind of action on a stage that is so much of what a rank holds."""
        durations = dict.fromkeys(Kind, 0.0) | dict.fromkeys(SENDS, self.send)
        durations |= dict.fromkeys(FORWARDS, self.forward * share)
        durations[Kind.BACKWARD] = (self.input_gradient + self.weight_gradient) * share
        durations[Kind.INPUT_GRADIENT] = self.input_gradient * share
        durations[Kind.WEIGHT_GRADIENT] = self.weight_gradient * share
        return durations


def clock(
    program: Program, seconds: Callable[[Action], float] = unit_seconds, *, rendezvous: bool = False
) -> Timeline:
    """Run ``program`` on paper.

    Args:
        program: what to simulate.
        seconds: the duration of an action, given or measured.
        rendezvous: a SEND holds its rank until the message has arrived, and a message leaves when its RECV
            stands ready: the strictest transport. Without, a SEND runs behind what follows.

    Returns:
        The timeline. Where ranks wait for each other for ever, `Timeline.stuck` names their next actions.
    """
    ends: dict[tuple[int | None, Action], float] = {}
    lanes = _Lanes(program, rendezvous)
    position = [0] * len(program.ranks)
    waited_for: list[tuple[int | None, Action] | None] = [None] * len(program.ranks)
    spans: list[Span] = []
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(program.ranks):
            if waited_for[rank] is not None and waited_for[rank] not in ends:
                continue
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needs = program.needs(rank, action)
                if rendezvous and action.kind in SENDS:
                    needs = [*needs, action.other_end]
                keys = [_key(rank, need) for need in needs]
                waited_for[rank] = next((key for key in keys if key not in ends), None)
                if waited_for[rank] is not None:
                    break
                ready = max([0.0, *[ends[key] for key in keys]])
                start, end = lanes.take(rank, action, ready=ready, seconds=seconds(action))
                ends[_key(rank, action)] = end
                spans.append(Span(rank, action, start, end))
                position[rank] += 1
                progress = True
    stuck = {
        rank: actions[position[rank]]
        for rank, actions in enumerate(program.ranks)
        if position[rank] < len(actions)
    }
    ordered = tuple(sorted(spans, key=lambda span: (span.start_seconds, span.rank)))
    return Timeline(ordered, stuck, len(program.ranks))


class _Lanes:
    """Until when the lanes of a program's ranks are taken."""

    def __init__(self, program: Program, rendezvous: bool):
        self._program = program
        self._rendezvous = rendezvous
        self._compute = [0.0] * len(program.ranks)
        self._collectives = [0.0] * len(program.ranks)
        self._edges: dict[tuple[int, int, Kind], float] = {}
        self._reduced = [0.0] * len(program.ranks)

    def take(self, rank: int, action: Action, *, ready: float, seconds: float) -> tuple[float, float]:
        """Put an action, whose needs end at ``ready``, on its lane; return when it starts and ends."""
        # The rank itself waits: see [Note: one reduction in flight], and to add up what it reduced.
        if action.kind is Kind.REDUCE and self._program.placement.optimizer:
            self._compute[rank] = max(self._compute[rank], self._reduced[rank])
        elif action.kind is Kind.ALL_REDUCE:
            self._compute[rank] = max(self._compute[rank], ready)
        # An action is issued when its rank has worked through what stands before it.
        start = max(self._compute[rank], ready)
        if action.kind in RECEIVES:
            return start, start
        if action.kind in SENDS:
            edge = rank, self._program.peer(action), action.kind
            start = max(start, self._edges.get(edge, 0.0))
            self._edges[edge] = end = start + seconds
            if self._rendezvous:
                self._compute[rank] = end
            return start, end
        lane = self._collectives if action.kind in COMMUNICATION else self._compute
        start = max(start, lane[rank])
        lane[rank] = end = start + seconds
        if action.kind is Kind.REDUCE:
            self._reduced[rank] = end
        return start, end


def _key(rank: int, action: Action) -> tuple[int | None, Action]:
    """Identify an action across ranks: compute and messages are one for all, the rest is each rank's own."""
    return (None if action.kind in COMPUTE or action.kind in TRANSFERS else rank), action


def peak_in_flight(program: Program) -> list[int]:
    """For each rank, the most (segment, microbatch) activations that it holds at once."""
    return [max((held for _, held in in_flight_after(actions)), default=0) for actions in program.ranks]


def in_flight_after(actions: Sequence[Action]) -> Iterator[tuple[Action, int]]:
    """Each compute action of a rank, and how many (segment, microbatch) activations the rank then holds.

    An activation lives from the forward that leaves it (F, or R) to the end of its backward (B), or to its
    weight gradient (W).
    """
    tapes = left_behind(actions).tapes
    live: set[tuple[int, int]] = set()
    for action in actions:
        if action.kind not in COMPUTE:
            continue
        place = action.segment, action.microbatch
        if action in tapes:
            live.add(place)
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            live.discard(place)
        yield action, len(live)


def peak_activations(schedule: Program) -> list[float]:
    """For each rank, the most activations that it holds at once, in microbatches of its share of the model.

    Of a schedule over stages of equal size: what one of a rank's v stages holds counts 1 / v.
    """
    share = len(schedule.ranks) / schedule.num_segments
    return [peak * share for peak in peak_in_flight(schedule)]
