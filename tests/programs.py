"""Programs of small steps, for tests."""

from collections.abc import Sequence
from dataclasses import replace

from fourfold.build import Sharding, UnitUse, build
from fourfold.layer.schedules import one_forward_one_backward
from fourfold.program import Action, Program
from fourfold.specs import PLACEMENTS, REPLICATED

REPLICAS = Sharding(REPLICATED)
FSDP = PLACEMENTS[None]
ZERO1 = PLACEMENTS["zero1"]
ZERO2 = PLACEMENTS["zero2"]


def own_units(segments: int) -> list[UnitUse]:
    """A unit for each segment."""
    return [UnitUse((segment,)) for segment in range(segments)]


def units_with_users(*users: tuple[int, ...]) -> list[UnitUse]:
    """Trained units that these segments use."""
    return [UnitUse(segments) for segments in users]


def one_stage(
    segments: int,
    microbatches: int,
    *,
    units: Sequence[UnitUse] | None = None,
    sharding: Sharding = REPLICAS,
    lookups: frozenset[int] = frozenset(),
    replicated: bool = False,
) -> Program:
    """The checked program of a step on one pipeline rank, with a unit for each segment.

    With ``replicated``, other ranks hold the pieces of every unit as well.
    """
    units = own_units(segments) if units is None else units
    return build(
        one_forward_one_backward(ranks=1, microbatches=microbatches),
        segments_of_stage=[segments],
        units=[replace(unit, replicated=replicated or unit.replicated) for unit in units],
        sharding=sharding,
        lookups=lookups,
    )


def parsed(text: str) -> tuple[Action, ...]:
    """The actions of a rank, written with spaces between."""
    return tuple(Action.parse(word) for word in text.split())


def written(program: Program, rank: int = 0) -> str:
    """The actions of a rank as text."""
    return " ".join(map(str, program.ranks[rank]))
