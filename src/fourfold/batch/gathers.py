"""The pass that writes gathers and frees of weights into a program.

[Note: gathered ahead, kept at the turn] Where optimizer state is sharded, a step starts with no unit's
weights present. Each use of a unit (the forward or the backward of a segment on a microbatch) needs them. Its
GATHER stands ``prefetch`` compute actions before it, so that it runs while those compute. Where weights are
sharded, FREE stands right after the use. So a rank holds the weights of ``prefetch + 1`` units at once.

(That is for the order of one stage, forwards up and backwards down, and units of one user; a tied embedding
comes on top.)

A unit that is needed again soon is kept instead: where no more than ``prefetch`` compute actions lie between
the FREE and the next GATHER, the places in that bound would stand empty. At the turn from forward to backward
this keeps the last segment and, with a prefetch of 1, the one before it; between two microbatches the first
ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fourfold.program.actions import COMPUTE, Action, Kind
from fourfold.program.program import Program


@dataclass
class _Stay:
    """The weights of a unit are present from before one action to after another, by position."""

    unit: int
    gather_at: int
    free_at: int


def with_gathers(program: Program, *, prefetch: int, keep: bool) -> Program:
    """Return ``program`` with GATHER before and FREE after the uses of each unit, as its placement says.

    Args:
        program: compute actions only.
        prefetch: so many compute actions before its use stands a gather.
        keep: hold weights from the first use of a step to the last, although they are sharded; where a
            pipeline's schedule takes all microbatches of a stage together, from the first use of that pass to
            its last.
    """
    if not program.placement.optimizer:
        return program
    frees = program.placement.weights
    ranks = []
    for actions in program.ranks:
        compute = [index for index, action in enumerate(actions) if action.kind in COMPUTE]
        stays: dict[int, list[_Stay]] = {}
        passes = _passes(program, actions) if keep and len(program.ranks) > 1 else None
        for order, index in enumerate(compute):
            action = actions[index]
            if not program.reads_weights(action):
                continue
            ahead = compute[max(order - prefetch, 0)]
            for unit in program.units_of_segment[action.segment]:
                known = stays.setdefault(unit, [])
                goes_on = keep and (not passes or (known and passes[known[-1].free_at] == passes[index]))
                if known and (goes_on or not frees or ahead <= known[-1].free_at + 1 + prefetch):
                    known[-1].free_at = index
                else:
                    known.append(_Stay(unit, ahead, index))
        ranks.append(_written(actions, stays, frees=frees))
    return replace(program, ranks=tuple(ranks))


def _passes(program: Program, actions: Sequence[Action]) -> dict[int, int] | None:
    """For each compute action of a breadth-first rank, by position, which pass over a stage it is in.

    None where a stage's microbatches do not all come together: then there is nothing to gain from passes.
    """
    stage_of = {segment: number for number, stage in enumerate(program.stages) for segment in stage}
    number: dict[int, int] = {}
    order: list[tuple[int, bool]] = []
    for index, action in enumerate(actions):
        if action.kind in COMPUTE:
            one = stage_of[action.segment], action.kind is Kind.FORWARD
            if not order or order[-1] != one:
                order.append(one)
            number[index] = len(order)
    return number if len(set(order)) == len(order) else None


def _written(actions: Sequence[Action], stays: dict[int, list[_Stay]], *, frees: bool) -> tuple[Action, ...]:
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    for unit, of_unit in stays.items():
        for turn, stay in enumerate(of_unit):
            before.setdefault(stay.gather_at, []).append(Action(Kind.GATHER, unit, turn))
            if frees:
                after.setdefault(stay.free_at, []).append(Action(Kind.FREE, unit, turn))
    return tuple(
        written
        for index, action in enumerate(actions)
        for written in (*before.get(index, ()), action, *after.get(index, ()))
    )
