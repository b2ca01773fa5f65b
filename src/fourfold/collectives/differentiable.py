"""Collectives through which gradients flow, in conjugate pairs.

[Note: gradient convention] One scalar is differentiated: the loss of the whole program, counted once, which
all ranks of the axis compute together. On an axis a tensor x is one of

- replicated: every rank holds x and does the same with it. Every rank's gradient is dL/dx.
- shared: every rank holds x and does its own with it. A rank's gradient is a part of dL/dx; they add up.
- sharded: each rank holds a part of x. Its gradient is dL/d(part).
- partial: every rank holds a summand of x. Every rank's gradient is dL/dx, since d(sum)/d(summand) = 1.

So replicated and sharded tensors have gradients of their own kind, and shared and partial are each other's.
A loss that every rank holds is replicated: each calls backward with gradient 1, and it counts once, not once
a rank. Every function here takes x from one kind to another, and its backward takes the gradient back:

| function | x | becomes | backward |
|---|---|---|---|
| copy_to | replicated | shared | all-reduce: reduce_from |
| reduce_from | partial | replicated | nothing: copy_to |
| gather_from | sharded | replicated | own part: split_to |
| split_to | replicated | sharded | gather: gather_from |
| all_gather | sharded | shared | reduce_scatter |
| reduce_scatter | partial | sharded | all_gather |
| all_to_all | sharded along one dim | sharded along another | all_to_all back |

all_gather is copy_to(gather_from(x)) and reduce_scatter is split_to(reduce_from(x)), each for half the bytes.

The pairs are Megatron's f and g (Shoeybi et al. 2019; with sequences sharded, Korthikanti et al. 2022).
"""

from typing import Any

import torch
from torch import Tensor

from fourfold.collectives import moves, reductions
from fourfold.kept import GATHER, SUM, dear
from fourfold.mesh import Axis


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Let every rank do its own with a replicated tensor: backward sums the gradients over the ranks."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum a partial tensor over the ranks; the result is replicated, its gradient goes back as it is."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Join equal shards along ``dim``; the result is replicated, backward keeps this rank's part."""
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim % x.dim())


def split_to(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Keep this rank's equal part of a replicated tensor along ``dim``; backward gathers the parts."""
    return x if axis.size == 1 else _SplitTo.apply(x, axis, _checked("split_to", x, axis, dim))


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Join equal shards along ``dim`` for every rank to do its own with; backward is a reduce-scatter."""
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim % x.dim())


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Sum a partial tensor over the ranks and keep this rank's equal part along ``dim``; backward gathers."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, _checked("reduce_scatter", x, axis, dim))


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, join_dim: int) -> Tensor:
    """Turn a tensor that is sharded along ``join_dim`` into one that is sharded along ``split_dim``.

    What this rank holds is cut along ``split_dim`` into a part for each rank; the parts that come in are
    joined along ``join_dim``.
    """
    if axis.size == 1:
        return x
    return _AllToAll.apply(x, axis, _checked("all_to_all", x, axis, split_dim), join_dim % x.dim())


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_from(gradient, ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return dear(SUM, lambda: reductions.all_reduce_(x.clone(memory_format=torch.contiguous_format), axis))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return copy_to(gradient, ctx.axis), None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gathered(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return split_to(gradient, ctx.axis, dim=ctx.dim), None, None


class _SplitTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gather_from(gradient, ctx.axis, dim=ctx.dim), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return dear(GATHER, lambda: _gathered(x, axis, dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter(gradient, ctx.axis, dim=ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return dear(SUM, lambda: reductions.reduce_scatter(_parts_first(x, axis, dim), axis).squeeze(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather(gradient, ctx.axis, dim=ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
        ctx.axis, ctx.split_dim, ctx.join_dim = axis, split_dim, join_dim
        return _joined(moves.all_to_all(_parts_first(x, axis, split_dim), axis), join_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = all_to_all(gradient, ctx.axis, split_dim=ctx.join_dim, join_dim=ctx.split_dim)
        return back, None, None, None


def _gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return _joined(moves.all_gather(x.unsqueeze(0), axis), dim)


def _parts_first(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Cut ``x`` along ``dim`` into a part for each rank, stacked along a new dim 0."""
    return x.unflatten(dim, (axis.size, -1)).movedim(dim, 0)


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Join parts that are stacked along dim 0 along ``dim``: the inverse of ``_parts_first``."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _checked(name: str, x: Tensor, axis: Axis, dim: int) -> int:
    """Return ``dim`` counted from the front; refuse a size that the ranks do not divide."""
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"{name} on axis {axis.name}: {axis.size} ranks do not divide dim {dim} of {tuple(x.shape)}"
        )
    return dim % x.dim()
