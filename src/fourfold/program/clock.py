"""Simulate a program: when each action runs, what stands idle, how much is in flight.

Each rank has two lanes. Compute actions and the update run one after another in program order; a
collective starts when it is reached, runs on the communication lane, and holds back only what needs it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fourfold.program.actions import COMMUNICATION, COMPUTE, Action, Kind, Program


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

    @property
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


def clock(program: Program, seconds: Callable[[Action], float] = unit_seconds) -> Timeline:
    """Run ``program`` on paper.

    Args:
        program: what to simulate.
        seconds: the duration of an action, given or measured.

    Returns:
        The timeline. Where ranks wait for each other for ever, `Timeline.stuck` names their next actions.
    """
    ends: dict[tuple[int | None, Action], float] = {}
    position = [0] * len(program.ranks)
    compute_free = [0.0] * len(program.ranks)
    link_free = [0.0] * len(program.ranks)
    spans: list[Span] = []
    reduced = [0.0] * len(program.ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(program.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                keys = [_key(rank, need) for need in program.needs(rank, action)]
                if any(key not in ends for key in keys):
                    break
                lane = link_free if action.kind in COMMUNICATION else compute_free
                # The rank itself waits: see [Note: one reduction in flight], and to add up what it reduced.
                if action.kind is Kind.REDUCE and program.placement.optimizer:
                    compute_free[rank] = max(compute_free[rank], reduced[rank])
                elif action.kind is Kind.ALL_REDUCE:
                    compute_free[rank] = max([compute_free[rank], *(ends[key] for key in keys)])
                # An action is issued when its rank has worked through what stands before it.
                start = max([lane[rank], compute_free[rank], *(ends[key] for key in keys)])
                end = start + seconds(action)
                lane[rank] = end
                ends[_key(rank, action)] = end
                reduced[rank] = end if action.kind is Kind.REDUCE else reduced[rank]
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


def _key(rank: int, action: Action) -> tuple[int | None, Action]:
    """Identify an action across ranks: compute is one for all, everything else is each rank's own."""
    return (None if action.kind in COMPUTE else rank), action


def peak_in_flight(program: Program) -> list[int]:
    """For each rank, the most (segment, microbatch) activations that it holds at once.

    An activation lives from its forward to the end of its backward (B), or to its weight gradient (W).
    """
    peaks = []
    for actions in program.ranks:
        live: dict[tuple[int, int], None] = {}
        peak = 0
        for action in actions:
            if action.kind not in COMPUTE:
                continue
            key = (action.segment, action.microbatch)
            if action.kind is Kind.FORWARD:
                live[key] = None
                peak = max(peak, len(live))
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                live.pop(key, None)
        peaks.append(peak)
    return peaks
