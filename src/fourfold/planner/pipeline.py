"""The time of a pipeline's schedule for many sets of durations at once.

It says what `fourfold.program.clock` says of the same schedule with its messages, which a test holds it to.
There an action is an object and a schedule takes its one set of times; here the graph of what waits for what
is made once for a schedule and walked once for as many sets of times as there are, as columns of an array.
(Messages on one edge do not wait for each other here: they do only where one takes longer than what computes
between them.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from fourfold.errors import UserError
from fourfold.layer.schedules import named, schedule
from fourfold.program.actions import Action, Kind
from fourfold.program.program import Program
from fourfold.specs import Layout, ScheduleName

if TYPE_CHECKING:  # numpy takes a while to load, and plans without a pipeline do without
    import numpy as np
    from numpy.typing import NDArray

    Columns = NDArray[np.float64]

IN_A_V = ("zbv", "dualpipev")
"""Schedules whose stages go down the ranks and up again."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage on one microbatch: forward, backward, and of that the weight gradients."""

    forward: "Columns"
    backward: "Columns"
    weights: "Columns"

    def of(self, kind: Kind, stage: int) -> "Columns":
        """Of an action on a stage."""
        if kind is Kind.FORWARD:
            return self.forward[stage]
        if kind is Kind.BACKWARD:
            return self.backward[stage]
        if kind is Kind.WEIGHT_GRADIENT:
            return self.weights[stage]
        return self.backward[stage] - self.weights[stage]


@dataclass(frozen=True)
class _Node:
    """A compute action: which, what it waits for, and whether each of that comes as a message."""

    kind: Kind
    stage: int
    needs: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class Pipeline:
    """A schedule, its microbatches as they are."""

    order: Program

    @cached_property
    def _nodes(self) -> list[_Node]:
        """Every action after all that it waits for."""
        order = self.order
        rank_of, last = order.rank_of_segment, order.num_segments - 1
        number: dict[Action, int] = {}
        nodes: list[_Node] = []
        position, before = [0] * len(order.ranks), [-1] * len(order.ranks)
        progress = True
        while progress:
            progress = False
            for rank, actions in enumerate(order.ranks):
                while position[rank] < len(actions):
                    action = actions[position[rank]]
                    needs = _needs(action, last, number)
                    if needs is None:
                        break
                    waits = [(found, rank_of[nodes[found].stage] != rank) for found in needs]
                    if before[rank] >= 0:
                        waits.append((before[rank], False))
                    before[rank] = number[action] = len(nodes)
                    nodes.append(_Node(action.kind, action.segment, tuple(waits)))
                    position[rank] += 1
                    progress = True
        assert len(nodes) == sum(map(len, order.ranks)), "the schedule is stuck"
        return nodes

    def seconds(self, times: StageSeconds, send: "Columns", *, steps_overlap: bool = False) -> "Columns":
        """When the last action ends, for each set of durations; ``send`` is of a message, a value a set.

        With ``steps_overlap`` a rank goes on to its next step while others are at this one: then a step takes
        what the rank that is longest at it needs from its first action to its last.
        """
        import numpy as np

        nodes, rank_of = self._nodes, self.order.rank_of_segment
        ends: list[Columns] = []
        first: dict[int, Columns | float] = {}
        spans: dict[int, Columns] = {}
        for node in nodes:
            start: Columns | float = 0.0
            for need, is_sent in node.needs:
                start = np.maximum(start, ends[need] + send if is_sent else ends[need])
            ends.append(start + times.of(node.kind, node.stage))
            rank = rank_of[node.stage]
            spans[rank] = ends[-1] - first.setdefault(rank, start)
        return np.max(list(spans.values()) if steps_overlap else ends, axis=0)


def _needs(action: Action, last: int, number: dict[Action, int]) -> list[int] | None:
    """The actions whose results an action takes, None where one has not run yet."""
    stage, microbatch = action.segment, action.microbatch
    found: list[int] = []
    if action.kind is Kind.FORWARD:
        if stage > 0:
            found.append(number.get(Action(Kind.FORWARD, stage - 1, microbatch), -1))
    elif action.kind is Kind.WEIGHT_GRADIENT:
        found.append(number.get(Action(Kind.INPUT_GRADIENT, stage, microbatch), -1))
    else:
        found.append(number.get(Action(Kind.FORWARD, stage, microbatch), -1))
        if stage < last:
            whole = number.get(Action(Kind.BACKWARD, stage + 1, microbatch), -1)
            half = number.get(Action(Kind.INPUT_GRADIENT, stage + 1, microbatch), -1)
            found.append(max(whole, half))
    return None if -1 in found else found


def stages_of_ranks(name: ScheduleName, ranks: int, layers: int) -> list[list[int]]:
    """The stages of each rank under a schedule. Raises `UserError` where there are more than layers."""
    chunks = name.stages_per_rank
    assert chunks is not None, "a file and a search have their own stages"
    if ranks * chunks > layers:
        raise UserError(f"schedule {name} cuts {layers} layers into {ranks * chunks} stages")
    if name.name in IN_A_V:
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [[chunk * ranks + rank for chunk in range(chunks)] for rank in range(ranks)]


def in_flight(name: ScheduleName, ranks: int, microbatches: int) -> list[float]:
    """The most microbatches of its share of the model that each rank keeps activations of.

    A bound that is reached by most; `fourfold.program.clock.peak_activations` counts.
    """
    behind = range(ranks - 1, -1, -1)
    match name.name:
        case "1f1b":
            depth = name.number or ranks
            most = [1 + after * (depth - 1) / max(ranks - 1, 1) for after in behind]
        case "interleaved":
            chunks = name.number or 1
            longest = -(-microbatches // max(microbatches // ranks, 1))
            most = [(2 * after + (chunks - 1) * longest + 1) / chunks for after in behind]
        case "zb-h1" | "zbv":
            most = [float(ranks)] * ranks
        case "zb-h2":
            most = [2.0 * ranks - 1] * ranks
        case "dualpipev":
            most = [ranks + 0.5] * ranks
        case _:
            most = [float(microbatches)] * ranks
    return [min(each, microbatches) for each in most]


@lru_cache(maxsize=256)
def pipeline(name: str, ranks: int, microbatches: int, layers: int) -> Pipeline:
    """Return a schedule by name. Raises `UserError` where it does not fit."""
    found = ScheduleName.parse(name)
    if found.is_file or found.name == "auto":
        return Pipeline(schedule(found, ranks=ranks, microbatches=microbatches, most_stages=layers))
    stages_of_ranks(found, ranks, layers)
    return Pipeline(named(found, ranks, microbatches))


def stages_on_ranks(layout: Layout, microbatches: int, layers: int) -> list[list[int]]:
    """The stages of each pipeline rank of a layout, of any schedule."""
    if layout.schedule.stages_per_rank is not None:
        return stages_of_ranks(layout.schedule, layout.pp, layers)
    order = pipeline(str(layout.schedule), layout.pp, microbatches, layers).order
    found: list[list[int]] = [[] for _ in order.ranks]
    for stage, rank in enumerate(order.rank_of_segment):
        found[rank].append(stage)
    return found


def sizes(ranks: int, microbatches: int) -> tuple[int, int]:
    """Two numbers of microbatches from whose times those of ``microbatches`` follow on a line.

    A schedule goes on alike once its pipeline is full. Both are the same where there is nothing to save.
    """
    if microbatches <= 3 * ranks + 2:
        return microbatches, microbatches
    first = 2 * ranks + microbatches % ranks
    return first, first + ranks


def pipeline_seconds(
    name: str,
    ranks: int,
    microbatches: int,
    layers: int,
    times: StageSeconds,
    send: "Columns",
    *,
    steps_overlap: bool = False,
) -> "Columns":
    """The time of a schedule of so many microbatches, for each set of durations."""

    def of(count: int) -> "Columns":
        return pipeline(name, ranks, count, layers).seconds(times, send, steps_overlap=steps_overlap)

    few, more = sizes(ranks, microbatches)
    seconds = of(more)
    if few == more:
        return seconds
    return seconds + (seconds - of(few)) / (more - few) * (microbatches - more)


def stage_array(values: Sequence[Sequence[float]]) -> "Columns":
    """Columns of one set of durations each."""
    import numpy as np

    return np.asarray(values, dtype=np.float64).T
