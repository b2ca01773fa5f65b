"""What the actions of a step take on a machine, and the step simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log

from fourfold.events import RankEvents
from fourfold.explain import segment_costs
from fourfold.outline import Outline, Step
from fourfold.planner.compute import BlockTime, Part, block_times, collective
from fourfold.planner.machine import Machine
from fourfold.planner.measured_blocks import measured_seconds
from fourfold.planner.practice import OURS, Practice
from fourfold.planner.simulated import COMPUTING, Devices, Phase, Simulation
from fourfold.planner.simulation import simulate
from fourfold.planner.step_time import OPTIMIZER_BYTES
from fourfold.program.actions import COMPUTE, Action, Kind
from fourfold.traffic import Event


@dataclass(frozen=True)
class Knobs:
    """What is worse than it should be.

    Attributes:
        slow: by pipeline rank, by how much its computation takes longer: 1.1 for a slow host. One slow rank
            of a stage is enough: the others wait for it at the next sum.
        links: by axis, by how much what it sends takes longer.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)


AS_PLANNED = Knobs()


def simulate_step(
    found: Outline, machine: Machine, *, practice: Practice = OURS, knobs: Knobs = AS_PLANNED
) -> Simulation:
    """Simulate a step on a machine; ``found`` is its outline."""
    step = found.step
    world = step.layout.world_size
    shares_cores = any(row.busy for row in machine.collectives)
    devices = Devices(
        interference=machine.interference,
        cores=world / machine.ranks_per_device
        if shares_cores or machine.ranks_per_device > 1
        else float("inf"),
        ranks=world // step.layout.pp,
    )
    return simulate(found.program, Loads(found, machine, practice, knobs), devices)


class Loads:
    """From a pipeline rank and an action to its phases.

    Of a block that was measured, those times stand in place of the formula's. Ranks that share a core are
    slowed down by the simulation, so here each has one of its own.
    """

    def __init__(
        self, found: Outline, machine: Machine, practice: Practice = OURS, knobs: Knobs = AS_PLANNED
    ):
        self._outline, self._knobs = found, knobs
        self._machine = replace(machine, ranks_per_device=1.0)
        step = found.step
        times = block_times(step, self._machine, practice)
        self._parts = {
            (kind, block): part
            for block in ("embed", "layer", "head")
            for kind, part in _parts(step, self._machine, block, times.of(block)).items()
        }
        inside = segment_costs(step, found.blocks)
        self._shards = [found.heaviest_shard(rank) for rank in range(step.layout.pp)]
        self._units = [found.units_on(rank, shard) for rank, shard in enumerate(self._shards)]
        self._events = [
            RankEvents(found.program, step.layout, units, [step.sizes.stream] * step.microbatches, inside)
            for units in self._units
        ]
        self._blocks = [tuple(name.partition(".")[0] for name in names) for names in found.blocks]
        self._known: dict[object, tuple[Phase, ...]] = {}

    def __call__(self, rank: int, action: Action) -> tuple[Phase, ...]:
        """The phases of an action."""
        kind = action.kind
        if kind in COMPUTE:
            key: object = (rank in self._knobs.slow and rank, kind, self._blocks[action.segment])
        else:
            key = (rank, kind, action.place if kind in (Kind.GATHER, Kind.REDUCE, Kind.ALL_REDUCE) else None)
        if key not in self._known:
            self._known[key] = self._phases(rank, action)
        return self._known[key]

    def _phases(self, rank: int, action: Action) -> tuple[Phase, ...]:
        events = self._events[rank].of(action)
        slower = self._knobs.slow.get(rank, 1.0)
        if action.kind in COMPUTE:
            blocks = self._blocks[action.segment]
            part = sum((self._parts[action.kind, block] for block in blocks), Part())
            sent = {
                axis: Phase(axis, seconds * self._knobs.links.get(axis, 1.0), self._busy(events, axis))
                for axis, seconds in (("tp", part.tp), ("cp", part.cp))
                if seconds
            }
            return (Phase(COMPUTING, (part.compute + part.launch) * slower, 1.0), *sent.values())
        sending = tuple(self._phase(event) for event in events)
        if action.kind is not Kind.UPDATE:
            return sending
        owned = sum(unit.piece for unit in self._units[rank].values())
        seconds = self._machine.block_table.update_seconds(owned)
        if seconds is None:
            seconds = self._machine.memory_seconds(owned * OPTIMIZER_BYTES)
        return (*sending, Phase(COMPUTING, seconds * slower, 1.0))

    def _phase(self, event: Event) -> Phase:
        step = self._outline.step
        slower = max(self._knobs.links.get(axis, 1.0) for axis in event.axis.split(","))
        return Phase(event.axis, collective(event, step, self._machine) * slower, self._busy([event]))

    def _busy(self, events: Sequence[Event], axis: str | None = None) -> float:
        """The share of a core that a rank needs while it sends these, one after another."""
        if not self._busy_shares:
            return 0.0
        step = self._outline.step
        seconds = cores = 0.0
        for event in events:
            if axis is not None and event.axis != axis:
                continue
            ranks = step.taking_part(event)
            rows = self._busy_shares.get((event.op, ranks), [(1, 0.0)])
            took = collective(event, step, self._machine)
            seconds += took
            cores += took * min(rows, key=lambda row: abs(log(row[0] / max(event.bytes, 1))))[1]
        return cores / seconds if seconds else 0.0

    @cached_property
    def _busy_shares(self) -> dict[tuple[str, int], list[tuple[int, float]]]:
        found: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for row in self._machine.collectives:
            if row.busy:
                found.setdefault((row.op, row.ranks), []).append((row.bytes, row.busy))
        return found


def _parts(step: Step, machine: Machine, block: str, times: BlockTime) -> dict[Kind, Part]:
    """What each kind of action takes on a block."""
    found = {
        Kind.FORWARD: times.forward,
        Kind.RECOMPUTE: times.again,
        Kind.BACKWARD: times.backward,
        Kind.INPUT_GRADIENT: times.backward + times.weights * -1.0,
        Kind.WEIGHT_GRADIENT: times.weights,
    }
    half = measured_seconds(step, machine, block, Kind.INPUT_GRADIENT)
    if half is not None:  # the halves take more than the whole
        found[Kind.INPUT_GRADIENT] = replace(times.backward, compute=half, launch=0.0)
    return found
