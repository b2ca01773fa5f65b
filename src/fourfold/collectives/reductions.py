"""Collectives that add up: all_reduce_, reduce_scatter, reduce_."""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from fourfold.collectives import backend
from fourfold.collectives.pending import Pending
from fourfold.collectives.perform import check_rank, finished, in_place, packed, perform, result_buffer
from fourfold.mesh import Axis

ReduceOp = Literal["sum", "max", "min"]


@overload
def all_reduce_(
    tensor: Tensor, axis: Axis, *, op: ReduceOp = "sum", blocking: Literal[True] = True
) -> Tensor: ...
@overload
def all_reduce_(tensor: Tensor, axis: Axis, *, op: ReduceOp = "sum", blocking: Literal[False]) -> Pending: ...
def all_reduce_(
    tensor: Tensor, axis: Axis, *, op: ReduceOp = "sum", blocking: bool = True
) -> Tensor | Pending:
    """Replace ``tensor`` on every rank by its sum (or largest, or smallest) over the ranks.

    All ranks get the same bits. A sum is made in the tensor's own type or a higher one: what must add up
    in float32 is given in float32.
    """
    if op not in ("sum", "max", "min"):
        raise ValueError(f"all_reduce on axis {axis.name}: op={op!r} is not sum, max or min")
    if axis.size == 1:
        return finished("all_reduce", axis, tensor, blocking=blocking)
    return perform(
        "all_reduce",
        axis,
        lambda: in_place(tensor, lambda buffer: backend.all_reduce(buffer, axis, op, blocking=blocking)),
        message=tensor,
        result=tensor,
        blocking=blocking,
        details=f"op={op}",
    )


@overload
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
    blocking: Literal[True] = True,
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
    blocking: Literal[False],
) -> Pending: ...
def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
    blocking: bool = True,
) -> Tensor | Pending:
    """Sum ``tensor`` over the ranks and return this rank's rows of the sum.

    The rows (dim 0) are dealt in rank order: equally, or ``counts[rank]`` to each. ``out`` takes the result;
    it may be this rank's rows of ``tensor`` themselves. Elsewhere ``tensor`` is left as it is. 16-bit floats
    are added in float32 and rounded once (on CUDA with equal counts: as NCCL does).
    """
    rows = _rows_by_rank("reduce_scatter", tensor, axis, counts)
    result = result_buffer("reduce_scatter", out, tensor, (rows[axis.rank], *tensor.shape[1:]))
    if axis.size == 1:
        if result.data_ptr() != tensor.data_ptr():
            result.detach().copy_(tensor)
        return finished("reduce_scatter", axis, result, blocking=blocking)
    given = None if counts is None else rows
    source = packed(tensor)
    return perform(
        "reduce_scatter",
        axis,
        lambda: in_place(result, lambda buffer: backend.reduce_scatter(source, axis, buffer, given)),
        message=tensor,
        result=result,
        blocking=blocking,
        details="" if counts is None else f"counts={rows}",
    )


@overload
def reduce_(tensor: Tensor, axis: Axis, *, destination: int, blocking: Literal[True] = True) -> Tensor: ...
@overload
def reduce_(tensor: Tensor, axis: Axis, *, destination: int, blocking: Literal[False]) -> Pending: ...
def reduce_(tensor: Tensor, axis: Axis, *, destination: int, blocking: bool = True) -> Tensor | Pending:
    """Replace ``tensor`` on the rank ``destination`` of the axis by its sum over the ranks.

    The other ranks keep theirs as it is. 16-bit floats are summed as in ``all_reduce_``.
    """
    check_rank("reduce", axis, destination)
    if axis.size == 1:
        return finished("reduce", axis, tensor, blocking=blocking)
    return perform(
        "reduce",
        axis,
        lambda: in_place(tensor, lambda buffer: backend.reduce(buffer, axis, destination)),
        message=tensor,
        result=tensor,
        blocking=blocking,
        details=f"destination={destination}",
    )


def _rows_by_rank(name: str, tensor: Tensor, axis: Axis, counts: Sequence[int] | None) -> list[int]:
    """Return how many rows of ``tensor`` each rank gets, and refuse counts that do not add up."""
    total = tensor.shape[0] if tensor.dim() else 0
    if counts is None:
        if not tensor.dim() or total % axis.size:
            raise ValueError(
                f"{name} on axis {axis.name}: {axis.size} ranks do not divide dim 0 of {tuple(tensor.shape)}"
            )
        return [total // axis.size] * axis.size
    if len(counts) != axis.size or sum(counts) != total or min(counts) < 0:
        raise ValueError(
            f"{name} on axis {axis.name}: counts {list(counts)} do not deal the {total} rows to "
            f"{axis.size} ranks"
        )
    return list(counts)
