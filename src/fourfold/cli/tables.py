"""What commands print of steps: tables of columns, and what stands in several of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.explain import Traffic
    from fourfold.outline import Step


def title(step: "Step", name: str, why_cp: str = "") -> str:
    """What the step is, in two lines; more say how tp keeps the residual stream, and why cp is what it is."""
    ranks = step.layout.world_size
    notes = [note for note in (step.layout.stream(step.sequence_length), why_cp) if note]
    return (
        f"{name}: {step.spec.num_parameters:,} parameters on {ranks:,} {'ranks' if ranks > 1 else 'rank'}, "
        f"{step.layout.resolved(step.spec)}\n"
        f"a step of {step.batch:,} sequences of {step.sequence_length:,} tokens: on each rank "
        f"{step.microbatches} x {step.rows}, {step.dtype}, recompute {step.recompute}, {step.optimizer}"
        + "".join(f"\n{note}" for note in notes)
    )


def traffic(rows: "Sequence[Traffic]") -> str:
    """What is sent and received, in GiB, by op and axis."""
    if not rows:
        return "nothing"
    cells = [["op", "axis", "calls", "messages", "sent"]]
    cells += [
        [row.op, row.axis, f"{row.calls:,}", size(row.message_bytes), size(row.sent_bytes)] for row in rows
    ]
    return table(cells, left=2)


def table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns side by side, the first ``left`` of them aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column < left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """Bytes in GiB, with so many digits that a small number is not 0."""
    return f"{nbytes / 2**30:.2f}" if nbytes >= 2**30 / 10 or not nbytes else f"{nbytes / 2**30:.2g}"
