"""Which part of a parameter each rank of the tp axis holds, and whose gradients of it add up.

[Note: gradients on the Channel axis] A parameter is cut, or every rank of tp holds all of it, or (key/value
heads, where they are fewer than ranks) neighbouring ranks hold the same part: *copies*. Copies that compute
with different tokens or for different heads have different gradients, which add up; copies that compute the
same have the same gradient, bit for bit. `Cut.adds_up` says which, and it follows from where the parameter is
used, never from its name:

- inside a branch (attention, MLP) each rank computes its own heads or channels: copies add up;
- outside of branches ranks compute on their own tokens with sequence parallelism, and all the same without:
  copies add up exactly with it.

A bias behind a row-wise matrix is added after the sum over ranks, so it counts as outside.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

Run = tuple[int, int]
"""A half-open interval of indices."""


@dataclass(frozen=True)
class Cut:
    """A parameter on the tp axis.

    Attributes:
        shape: of the whole parameter.
        dim: along which it is cut.
        runs: for each rank the indices along ``dim`` that it holds, in the order in which it holds them. A
            matrix that is several fused ones has one run of each.
        adds_up: whether the gradients of ranks that hold the same part add up.
    """

    shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[Run, ...], ...]
    adds_up: bool = False

    @property
    def copies(self) -> int:
        """How many neighbouring ranks hold the same part."""
        return next(len(list(ranks)) for _, ranks in groupby(self.runs))

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of the parameter."""
        return self.copies == len(self.runs)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what a rank holds."""
        if self.is_whole:
            return self.shape
        held = sum(stop - start for start, stop in self.runs[rank])
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def global_runs(self, rank: int, first: int, count: int) -> Iterator[Run]:
        """Where elements ``first`` to ``first + count`` of a rank's flattened part lie in the whole one.

        As half-open intervals, in the part's order.
        """
        inner = math.prod(self.shape[self.dim + 1 :])
        width = math.prod(self.shape[self.dim :])
        spans = [(start * inner, stop * inner) for start, stop in self.runs[rank]]
        held = sum(stop - start for start, stop in spans)
        if held == width and len(spans) == 1:
            yield first, first + count
            return
        position, end = first, first + count
        while position < end:
            row, within = divmod(position, held)
            for start, stop in spans:
                if within < stop - start:
                    taken = min(stop - start - within, end - position)
                    yield row * width + start + within, row * width + start + within + taken
                    position += taken
                    break
                within -= stop - start


def whole(shape: Sequence[int], ranks: int, *, adds_up: bool) -> Cut:
    """The cut of a parameter that every rank holds whole; it may be a single number, of no dimension."""
    return Cut(tuple(shape), 0, (((0, math.prod(shape[:1])),),) * ranks, adds_up)


def in_parts(
    shape: Sequence[int],
    dim: int,
    ranks: int,
    *,
    groups: int | None = None,
    copied: bool = False,
    fused: int = 1,
) -> Cut:
    """The cut of a parameter in equal parts.

    Args:
        shape: of the whole parameter.
        dim: along which it is cut.
        ranks: of the tp axis.
        groups: how many indivisible groups (heads) lie along ``dim`` in each of the fused matrices; None
            where every index may go anywhere.
        copied: whether fewer groups than ranks are copied, each to equally many neighbouring ranks, whose
            gradients add up.
        fused: how many matrices lie one after another along ``dim``, each cut alike.

    Raises ValueError where the matrices or the groups are not of equal size, or the ranks do not divide the
    groups; nor, with ``copied``, the groups the ranks.
    """
    size, rest = divmod(shape[dim], fused)
    if rest:
        raise ValueError(f"its {shape[dim]} channels are not {fused} matrices of equal size")
    if groups is not None and size % groups:
        raise ValueError(f"{size} channels are not {groups} groups of equal size")
    what = f"{size} channels" if groups is None else f"{groups} groups"
    groups = groups or size
    if groups % ranks and not (copied and ranks % groups == 0):
        rule = f"neither divides {what} nor is a multiple of them" if copied else f"does not divide {what}"
        raise ValueError(f"tp={ranks} {rule}")
    copies = max(1, ranks // groups)
    part = size // (ranks // copies)
    runs = tuple(
        tuple(
            (matrix * size + r // copies * part, matrix * size + (r // copies + 1) * part)
            for matrix in range(fused)
        )
        for r in range(ranks)
    )
    return Cut(tuple(shape), dim, runs, adds_up=copies > 1)


def vocabulary(shape: Sequence[int], ranks: int) -> Cut:
    """The cut of an embedding or a head by tokens of the vocabulary, of any size: no padding is needed.

    Raises ValueError where there are more ranks than tokens.
    """
    size = shape[0]
    if size < ranks:
        raise ValueError(f"tp={ranks} is more than the {size} tokens of the vocabulary")
    runs = tuple(((size * r // ranks, size * (r + 1) // ranks),) for r in range(ranks))
    return Cut(tuple(shape), 0, runs)
