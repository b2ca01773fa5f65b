"""The seconds of a block as a rank of cp and tp computes it, from what a calibration measured."""

from fourfold.outline import Step
from fourfold.planner.calibration import shape_of_block
from fourfold.planner.machine import Machine
from fourfold.program.actions import Kind


def measured_seconds(step: Step, machine: Machine, block: str, kind: Kind) -> float | None:
    """The time of an action on ``embed``, ``layer`` or ``head``; None where it was not measured.

    A part of a row was measured as a row of its own, whose tokens see only themselves. Attention is put
    right: over all tokens with a part of the heads, which is as much work as a ring's. Ranks that share a
    core take that much longer, as with the formulas.
    """
    table, layout = machine.block_table, step.layout
    sequence = max(1, step.sequence_length // layout.cp)
    shape = shape_of_block(step.spec, block, tp=layout.tp)
    seconds = table.block_seconds(
        block, str(kind), shape, rows=step.rows, sequence=sequence, dtype=step.dtype
    )
    if seconds is None:
        return None
    if block == "layer" and layout.cp > 1 and kind is not Kind.WEIGHT_GRADIENT:
        heads = step.sizes.heads
        whole, own = (
            table.attention_seconds(
                rows=step.rows,
                sequence=length,
                heads=count,
                head_dim=step.spec.head_dim,
                dtype=step.dtype,
                backward=kind is not Kind.FORWARD,
            )
            for length, count in ((step.sequence_length, heads / layout.cp), (sequence, heads))
        )
        seconds += 0.0 if whole is None or own is None else whole - own
    return seconds * machine.ranks_per_device
