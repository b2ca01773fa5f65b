"""What a step sends on the Batch axis, and what a rank holds for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.program.actions import Kind, Program
from fourfold.specs import BATCH_AXES, Layout
from fourfold.traffic import Event

SCALAR_DTYPE, SCALAR_BYTES = "float64", 8
"""The loss, and the square of the gradient norm, are summed over ranks as one float64 each."""


@dataclass(frozen=True)
class UnitSize:
    """A unit's flat buffer as one rank sees it.

    Attributes:
        counts: how many elements each rank of the fsdp axis owns.
        rank: of the fsdp axis.
        weight_dtype: what computation reads, as in ``bfloat16``.
        weight_bytes: of one element of it.
        master_dtype: of master weights, gradients and reductions.
        master_bytes: of one element of it.
        trained: False for a unit of frozen parameters.
    """

    counts: tuple[int, ...]
    rank: int
    weight_dtype: str
    weight_bytes: int
    master_dtype: str
    master_bytes: int
    trained: bool = True

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return sum(self.counts)

    @property
    def piece(self) -> int:
        """Elements that this rank owns."""
        return self.counts[self.rank]


def batch_events(program: Program, *, rank: int, layout: Layout, units: Sequence[UnitSize]) -> list[Event]:
    """The collectives that a rank performs in one step, in order.

    Args:
        program: of the step.
        rank: the pipeline rank.
        layout: gives the axes.
        units: of the program, as this rank sees them.
    """
    shards, replicas = layout.axis_name("fsdp"), layout.axis_name("dp", "cp")
    events: list[Event] = []

    def add(op: str, axis: str, numel: int, unit: UnitSize) -> None:
        gather = op == "all_gather"
        dtype = unit.weight_dtype if gather else unit.master_dtype
        itemsize = unit.weight_bytes if gather else unit.master_bytes
        events.append(Event(op, axis, numel * itemsize, dtype))

    for action in program.ranks[rank]:
        if action.kind is Kind.LOSS and layout.size(*BATCH_AXES) > 1:
            events.append(Event("all_reduce", layout.axis_name(*BATCH_AXES), SCALAR_BYTES, SCALAR_DTYPE))
        elif action.kind is Kind.UPDATE and layout.fsdp > 1:
            events.append(Event("all_reduce", shards, SCALAR_BYTES, SCALAR_DTYPE))
        elif action.kind is Kind.GATHER:
            add("all_gather", shards, units[action.unit].numel, units[action.unit])
        elif action.kind is Kind.REDUCE and layout.fsdp > 1:
            add("reduce_scatter", shards, units[action.unit].numel, units[action.unit])
        elif action.kind in (Kind.REDUCE, Kind.ALL_REDUCE) and layout.size("dp", "cp") > 1:
            add("all_reduce", replicas, units[action.unit].piece, units[action.unit])
    return events


@dataclass(frozen=True)
class Held:
    """Bytes of weights and gradients on one rank. AdamW's two moments are twice ``owned`` beside them.

    Attributes:
        owned: the master weights of the rank's trained pieces.
        rest: between steps, master weights, weights and gradients.
        peak: at most during a step.
    """

    owned: int
    rest: int
    peak: int


def held_bytes(program: Program, *, rank: int, units: Sequence[UnitSize], temporary: bool) -> Held:
    """What a rank holds for weights and gradients, between steps and at most during one.

    Args:
        program: of the step.
        rank: the pipeline rank.
        units: of the program, as this rank sees them.
        temporary: count what a reduction needs while it is under way: the pieces that gloo receives and adds
            up, and the sum that is then added to earlier microbatches'.
    """
    placement = program.placement
    owned = rest = 0
    for unit in units:
        owned += unit.piece * unit.master_bytes if unit.trained else 0
        masters_apart = placement.weights or unit.weight_bytes != unit.master_bytes
        rest += unit.piece * unit.master_bytes if masters_apart else 0
        rest += 0 if placement.weights else unit.numel * unit.weight_bytes
        if unit.trained:
            rest += (unit.piece if placement.gradients else unit.numel) * unit.master_bytes
    weights: dict[int, int] = {}
    gradients: dict[int, int] = {}
    reducing: dict[int, int] = {}
    reduced: set[int] = set()
    peak = rest
    for action in program.ranks[rank]:
        if action.kind is Kind.GATHER and placement.weights:
            unit = units[action.unit]
            weights[action.unit] = unit.numel * unit.weight_bytes
        elif action.kind is Kind.FREE:
            weights.pop(action.unit)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and placement.gradients:
            for index in program.units_of_segment[action.segment]:
                if units[index].trained:
                    gradients.setdefault(index, units[index].numel * units[index].master_bytes)
        elif action.kind is Kind.REDUCE and placement.optimizer:
            reducing.clear()
            unit = units[action.unit]
            reducing[action.unit] = gradients.pop(action.unit, 0)
            if temporary:
                copies = len(unit.counts) + (placement.gradients and action.unit in reduced)
                reducing[action.unit] += copies * unit.piece * unit.master_bytes
            reduced.add(action.unit)
        peak = max(peak, rest + sum(weights.values()) + sum(gradients.values()) + sum(reducing.values()))
    return Held(owned, rest, peak)
