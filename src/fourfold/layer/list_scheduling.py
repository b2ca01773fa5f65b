"""List scheduling: each rank starts the most urgent of what it can start, as soon as it can.

A rule says what is urgent, and memory has a bound. The order that comes out is a schedule, a `Program` over
stages, with every backward in halves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from fourfold.program.actions import Action, Kind
from fourfold.program.clock import Times
from fourfold.program.program import Program


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage where stages go round the ranks: s % P."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int) -> tuple[int, ...]:
    """The rank of each of 2P stages: down the ranks and up again."""
    return (*range(ranks), *reversed(range(ranks)))


def over_stages(orders: Sequence[Sequence[Action]], placement: tuple[int, ...], microbatches: int) -> Program:
    """The program of a schedule: what each rank computes, in order, and the rank of each stage."""
    return Program(
        ranks=tuple(tuple(actions) for actions in orders),
        rank_of_segment=placement,
        microbatches=microbatches,
        users=tuple((stage,) for stage in range(len(placement))),
    )


@dataclass(frozen=True)
class Rule:
    """What a rank starts first.

    Attributes:
        first: ``turns``: a forward after a backward and a backward after a forward, where both could start;
            ``backward``: backwards; ``forward``: forwards. Weight gradients come last, where nothing else
            could start.
        patience: no weight gradient is started where something else can start within this part of its time.
    """

    first: Literal["turns", "backward", "forward"] = "turns"
    patience: float = 0.0


@dataclass(frozen=True)
class Listed:
    """What list scheduling found: the order, and when its last action ends with the times it was made for."""

    orders: tuple[tuple[tuple[Kind, int, int], ...], ...]
    placement: tuple[int, ...]
    microbatches: int
    seconds: float

    def program(self) -> Program:
        """The schedule as a program."""
        orders = [[Action(*entry) for entry in order] for order in self.orders]
        return over_stages(orders, self.placement, self.microbatches)


def list_schedule(
    placement: tuple[int, ...],
    *,
    microbatches: int,
    most_in_flight: int,
    times: Times,
    rule: Rule = Rule(),
    limit_seconds: float = float("inf"),
) -> Listed | None:
    """Make a schedule by list scheduling.

    Args:
        placement: the rank of each stage.
        microbatches: how many pass through the stages.
        most_in_flight: the most (stage, microbatch) activations that a rank may hold, at least its stages.
        times: of one rank's share of the model.
        rule: what is started first.
        limit_seconds: give up, and return None, as soon as the step must take longer.
    """
    state = _Ranks(placement, microbatches, most_in_flight, times, rule)
    while state.waiting:
        start, rank, version = heappop(state.waiting)
        if version != state.versions[rank]:
            continue
        if start + state.work[rank] > limit_seconds:
            return None
        state.start(rank, start)
    assert all(done == microbatches for done in state.weights), "[Note: room for the oldest]"
    orders = tuple(tuple(order) for order in state.orders)
    return Listed(orders, placement, microbatches, max(state.free))


class _Ranks:
    """All ranks in the middle of a step.

    [Note: room for the oldest] A rank takes a microbatch into a stage only while it keeps room for one
    activation of each of its later stages. So the oldest microbatch can always go on.
    """

    def __init__(
        self, placement: tuple[int, ...], microbatches: int, most_in_flight: int, times: Times, rule: Rule
    ):
        ranks, stages = max(placement) + 1, len(placement)
        self.placement, self.microbatches, self.rule = placement, microbatches, rule
        self.lasts = times.by_kind(ranks / stages)
        self.send = times.send
        of_one = self.lasts[Kind.FORWARD] + self.lasts[Kind.BACKWARD]
        self.work = [of_one * microbatches * placement.count(rank) for rank in range(ranks)]
        self.stages_of = [[s for s in range(stages) if placement[s] == rank] for rank in range(ranks)]
        # A stage's inputs and gradients arrive in the order of microbatches: when, by stage.
        self.inputs: list[list[float]] = [[] for _ in range(stages)]
        self.inputs[0] = [0.0] * microbatches
        self.gradients: list[list[float]] = [[] for _ in range(stages)]
        self.forwards, self.backwards, self.weights = [0] * stages, [0] * stages, [0] * stages
        self.room = [most_in_flight] * ranks
        self.free = [0.0] * ranks
        self.edge_free: dict[tuple[int, int, Kind], float] = {}
        self.last = [Kind.INPUT_GRADIENT] * ranks
        self.orders: list[list[tuple[Kind, int, int]]] = [[] for _ in range(ranks)]
        self.chosen: list[tuple[Kind, int]] = [(Kind.FORWARD, 0)] * ranks
        self.versions = [0] * ranks
        self.waiting: list[tuple[float, int, int]] = []
        for rank in range(ranks):
            self.choose(rank)

    def choose(self, rank: int) -> None:
        """Find what ``rank`` starts next, as far as is known now, and when."""
        self.versions[rank] += 1
        found = self._could_start(rank)
        if not found:
            return
        start = max(self.free[rank], min(found)[0])
        ready = [entry for entry in found if entry[0] <= start]
        urgent = min(ready, key=lambda entry: entry[1:])
        if urgent[1] == _LAST and self.rule.patience:
            limit = start + self.rule.patience * self.lasts[Kind.WEIGHT_GRADIENT]
            soon = [entry for entry in found if entry[1] != _LAST and entry[0] <= limit]
            urgent = min([*soon, urgent], key=lambda entry: entry[1:])
            start = max(start, urgent[0])
        self.chosen[rank] = urgent[4], urgent[5]
        heappush(self.waiting, (start, rank, self.versions[rank]))

    def _could_start(self, rank: int) -> list[tuple[float, int, int, int, Kind, int]]:
        """(earliest start, urgency as three numbers, kind, stage) of what has all it needs, or will have."""
        found = []
        stages = self.stages_of[rank]
        urgency = _URGENCY[self.rule.first, self.last[rank]]
        for later, stage in enumerate(reversed(stages)):
            m = self.forwards[stage]
            if m < len(self.inputs[stage]) and self.room[rank] > later:
                found.append((self.inputs[stage][m], urgency[0], -stage, m, Kind.FORWARD, stage))
            m = self.backwards[stage]
            if m < len(self.gradients[stage]):
                found.append((self.gradients[stage][m], urgency[1], m, -stage, Kind.INPUT_GRADIENT, stage))
            m = self.weights[stage]
            if m < self.backwards[stage]:
                found.append((0.0, _LAST, m, -stage, Kind.WEIGHT_GRADIENT, stage))
        return found

    def start(self, rank: int, start: float) -> None:
        """Run what ``rank`` has chosen."""
        kind, stage = self.chosen[rank]
        self.free[rank] = end = start + self.lasts[kind]
        self.work[rank] -= self.lasts[kind]
        if kind is Kind.FORWARD:
            m = self.forwards[stage]
            self.forwards[stage] += 1
            self.room[rank] -= 1
            self.last[rank] = kind
            if stage + 1 == len(self.placement):
                self.gradients[stage].append(end)
            else:
                self._pass_on(self.inputs[stage + 1], kind, stage, stage + 1, end)
        elif kind is Kind.WEIGHT_GRADIENT:
            m = self.weights[stage]
            self.weights[stage] += 1
            self.room[rank] += 1
        else:
            m = self.backwards[stage]
            self.backwards[stage] += 1
            self.last[rank] = kind
            if stage:
                self._pass_on(self.gradients[stage - 1], kind, stage, stage - 1, end)
        self.orders[rank].append((kind, stage, m))
        self.choose(rank)

    def _pass_on(self, arrivals: list[float], kind: Kind, stage: int, following: int, end: float) -> None:
        """Let a result arrive at another stage; messages between two ranks go one after another."""
        here, there = self.placement[stage], self.placement[following]
        if here != there:
            edge = here, there, kind
            end = max(end, self.edge_free.get(edge, 0.0)) + self.send
            self.edge_free[edge] = end
        arrivals.append(end)
        if here != there:
            self.choose(there)


_LAST = 2
_URGENCY = {
    ("turns", Kind.FORWARD): (1, 0),
    ("turns", Kind.INPUT_GRADIENT): (0, 1),
    ("backward", Kind.FORWARD): (1, 0),
    ("backward", Kind.INPUT_GRADIENT): (1, 0),
    ("forward", Kind.FORWARD): (0, 1),
    ("forward", Kind.INPUT_GRADIENT): (0, 1),
}
"""Of a forward and a backward, by the rule and what the rank did last: the smaller goes first."""
