"""Which elements of a tensor a piece holds: runs of the flattened tensor, and where two pieces overlap."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stripes:
    """``count`` runs of ``length`` elements of a flattened tensor, ``stride`` apart, the first at ``start``.

    One run is a piece cut by rows or anywhere; columns of a matrix are a run of every row.
    """

    start: int
    length: int
    count: int = 1
    stride: int = 0


def stripes(runs: Iterable[tuple[int, int]]) -> list[Stripes]:
    """Return half-open intervals as few stripes, in their order."""
    found: list[Stripes] = []
    for start, stop in runs:
        length = stop - start
        last = found[-1] if found else None
        if last is not None and last.length == length:
            step = start - (last.start + (last.count - 1) * last.stride)
            if step > 0 and (last.count == 1 or step == last.stride):
                found[-1] = Stripes(last.start, length, last.count + 1, step)
                continue
        found.append(Stripes(start, length))
    return found


def numel(pieces: Sequence[Stripes]) -> int:
    """How many elements they are."""
    return sum(piece.length * piece.count for piece in pieces)


@dataclass(frozen=True)
class Runs:
    """Stripes as single runs, sorted by where they lie in the tensor.

    Attributes:
        start: of each in the flattened tensor.
        stop: its end.
        place: where its first element lies among the piece's own elements.
    """

    start: Indices
    stop: Indices
    place: Indices

    @classmethod
    def of(cls, pieces: Sequence[Stripes]) -> "Runs":
        """Return the runs of a piece that holds its elements in the order of the stripes."""
        if len(pieces) == 1 and pieces[0].count == 1:
            [piece] = pieces
            return cls(*np.array([[piece.start], [piece.start + piece.length], [0]], np.int64))
        counts = [piece.count for piece in pieces]
        start = np.concatenate(
            [piece.start + piece.stride * np.arange(piece.count, dtype=np.int64) for piece in pieces]
            or [np.empty(0, np.int64)]
        )
        length = np.repeat(np.array([piece.length for piece in pieces], np.int64), counts)
        place = np.cumsum(length) - length
        order = np.argsort(start, kind="stable")
        return cls(start[order], (start + length)[order], place[order])


@lru_cache(64)  # a parameter's weight and moments, one after another, are mostly in pieces alike
def overlap(wanted: tuple[Stripes, ...], there: tuple[Stripes, ...]) -> list[tuple[int, int, int]]:
    """Return what two pieces of a tensor have in common, as few copies.

    Of each copy: its place among the wanted elements, its place among those that are there, its length.
    """
    if len(wanted) == len(there) == 1 and wanted[0].count == there[0].count == 1:  # most are one run
        [one], [other] = wanted, there
        start = max(one.start, other.start)
        length = min(one.start + one.length, other.start + other.length) - start
        return [(start - one.start, start - other.start, length)] if length > 0 else []
    copies = _copies(Runs.of(wanted), Runs.of(there))
    return list(zip(*(numbers.tolist() for numbers in copies), strict=True))


def _copies(wanted: Runs, there: Runs) -> tuple[Indices, Indices, Indices]:
    first = np.searchsorted(there.stop, wanted.start, side="right")
    last = np.searchsorted(there.start, wanted.stop, side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(counts)), counts)
    theirs = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    start = np.maximum(wanted.start[mine], there.start[theirs])
    length = np.minimum(wanted.stop[mine], there.stop[theirs]) - start
    to = wanted.place[mine] + start - wanted.start[mine]
    source = there.place[theirs] + start - there.start[theirs]
    # What goes on in both is one copy.
    order = np.argsort(to, kind="stable")
    to, source, length = to[order], source[order], length[order]
    goes_on = (to[1:] == to[:-1] + length[:-1]) & (source[1:] == source[:-1] + length[:-1])
    heads = np.flatnonzero(np.concatenate([np.ones(min(len(to), 1), bool), ~goes_on]))
    totals = np.add.reduceat(length, heads) if len(heads) else length
    return to[heads], source[heads], totals
