"""The pass that writes gradient reductions into a program, and what they send.

[Note: one reduction a step] A unit's gradient is summed over the Batch axis once a step, right after its last
contribution on this rank: the earlier microbatches only add into the local buffer. So accumulation saves
communication, and the reductions of the last layers run behind the backward of the first ones.
"""

from collections.abc import Sequence
from dataclasses import replace

from fourfold.program.actions import Action, Kind, Program
from fourfold.specs import BATCH_AXES, Layout
from fourfold.traffic import Event

UNIT_BYTES = 8 * 2**20
"""A unit has at least so many bytes of gradients, or a quarter of the model's where that is less.

Each reduction costs a latency, so small ones are joined; but what the backward finishes last has nothing to
hide behind, so they are not joined to one.
"""


def segments_of_units(segment_bytes: Sequence[int]) -> list[range]:
    """Join neighbouring segments to units, in the order of the backward: the last segments come first.

    Args:
        segment_bytes: of the gradients of each segment's parameters, in the order of the forward.

    Returns:
        The segments of each unit, in the order of the forward.
    """
    enough = min(UNIT_BYTES, sum(segment_bytes) / 4)
    units: list[range] = []
    stop = len(segment_bytes)
    for start in reversed(range(len(segment_bytes))):
        if start == 0 or sum(segment_bytes[start:stop]) >= enough:
            units.insert(0, range(start, stop))
            stop = start
    return units


def with_reductions(program: Program) -> Program:
    """Return ``program`` with LOSS and each REDUCE right after the last of what they sum, then UPDATE."""
    ranks = []
    for rank, actions in enumerate(program.ranks):
        last: dict[Action, list[Action]] = {}
        position = {action: index for index, action in enumerate(actions)}
        for collective in program.communication_of(rank):
            contribution = max(program.needs(rank, collective), key=position.__getitem__)
            last.setdefault(contribution, []).append(collective)
        written: list[Action] = []
        for action in actions:
            written += [action, *last.get(action, ())]
        ranks.append((*written, Action(Kind.UPDATE)))
    return replace(program, ranks=tuple(ranks))


LOSS_DTYPE, LOSS_BYTES = "float64", 8
"""The loss is summed over ranks as one float64."""


def reduction_events(
    actions: Sequence[Action], *, layout: Layout, unit_numels: Sequence[int], dtype: str, itemsize: int
) -> list[Event]:
    """The collectives that a rank performs in one step, in order.

    Args:
        actions: what the rank does in one step.
        layout: gives the joint axis of the Batch axis, dp x fsdp x cp.
        unit_numels: gradient elements of each unit.
        dtype: the dtype of gradient reduction, as in ``float32``.
        itemsize: bytes of one element of ``dtype``.
    """
    if layout.size(*BATCH_AXES) == 1:
        return []
    axis = layout.axis_name(*BATCH_AXES)
    events = []
    for action in actions:
        if action.kind is Kind.LOSS:
            events.append(Event("all_reduce", axis, LOSS_BYTES, LOSS_DTYPE))
        elif action.kind is Kind.REDUCE and action.segment is not None:
            events.append(Event("all_reduce", axis, unit_numels[action.segment] * itemsize, dtype))
    return events
