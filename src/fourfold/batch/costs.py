"""The buffers of the Batch axis in numbers: their sizes, and what a rank holds of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.program.actions import TAKES_TAPE, Kind
from fourfold.program.program import Program


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
        over_tp: whether its gradient is summed over ranks of tp, too.
    """

    counts: tuple[int, ...]
    rank: int
    weight_dtype: str
    weight_bytes: int
    master_dtype: str
    master_bytes: int
    trained: bool = True
    over_tp: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return sum(self.counts)

    @property
    def piece(self) -> int:
        """Elements that this rank owns."""
        return self.counts[self.rank]


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


def held_bytes(program: Program, *, rank: int, units: Mapping[int, UnitSize], temporary: bool) -> Held:
    """What a rank holds for weights and gradients, between steps and at most during one.

    Args:
        program: of the step.
        rank: the pipeline rank.
        units: those that the rank holds, by their number in the program.
        temporary: count what a reduction needs while it is under way: the pieces that gloo receives and adds
            up, and the sum that is then added to earlier microbatches'.
    """
    placement = program.placement
    owned = rest = 0
    for unit in units.values():
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
        elif action.kind in TAKES_TAPE and placement.gradients:
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
