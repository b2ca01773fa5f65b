"""Who owns what: how the flat buffer of each unit is cut into one piece a rank.

[Note: a piece is a run of the buffer] A unit's parameters lie in one flat buffer, and rank r of the fsdp axis
owns one run of it. So gathering puts pieces one after another, and every parameter is a view of the result,
whatever was cut. Three ways to cut differ only in the order of the parameters and in where a cut may fall:

- ``matrices``: between parameters; they are sorted by owner. Each matrix lives whole on one rank.
- ``rows``: between rows of a parameter, as near to equal pieces as they allow.
- ``flat``: anywhere; the pieces are equal, and the buffer ends with up to ranks - 1 elements that are unused.

Matrices lie before vectors (norms, biases) in every piece, so what decays is the first part of a piece.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

Shape = tuple[int, ...]
BALANCED = 1.1
"""The heaviest rank may own so many times the mean before matrices are cut by rows."""


@dataclass(frozen=True)
class Pieces:
    """How a unit's flat buffer is laid out.

    Attributes:
        order: the names of its parameters, in the order of the buffer.
        counts: how many elements each rank owns, in rank order. Their sum may exceed the parameters'.
    """

    order: tuple[str, ...]
    counts: tuple[int, ...]


def cut(units: Sequence[Mapping[str, Shape]], *, ranks: int, how: str) -> list[Pieces]:
    """Cut the flat buffer of every unit into ``ranks`` pieces.

    Args:
        units: the parameters of each unit with their shapes, in model order.
        ranks: of the fsdp axis.
        how: ``matrices``, ``rows`` or ``flat``; ``blocks``: matrices whole, but units that are mostly one
            matrix by rows (embedding, head); ``auto``: as ``blocks`` where that balances, else all by rows.
    """
    if how == "flat" or ranks == 1:
        return [_flat(shapes, ranks) for shapes in units]
    if how == "rows":
        return [_rows(shapes, ranks) for shapes in units]
    if how == "matrices":
        return _matrices(units, ranks)
    whole = [
        index
        for index, shapes in enumerate(units)
        if 2 * max(map(math.prod, shapes.values())) <= _numel(shapes)
    ]
    by_rows = [_rows(shapes, ranks) for shapes in units]
    pieces = list(by_rows)
    for index, chosen in zip(whole, _matrices([units[i] for i in whole], ranks), strict=True):
        pieces[index] = chosen
    if how == "blocks" or balance(pieces) <= BALANCED:
        return pieces
    return by_rows


def cut_apart(
    units: Sequence[Mapping[str, Shape]], kinds: Sequence[Hashable], *, ranks: int, how: str
) -> list[Pieces]:
    """Cut units as `cut` does, those of each kind by themselves.

    Ranks of tp may hold unequal parts (of a vocabulary). What they hold alike is dealt apart from those, so
    that all of them cut it alike.

    Args:
        units: as of `cut`.
        kinds: of each unit.
        ranks: of the fsdp axis.
        how: as of `cut`.
    """
    found: dict[int, Pieces] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        found.update(zip(numbers, cut([units[n] for n in numbers], ranks=ranks, how=how), strict=True))
    return [found[number] for number in range(len(units))]


def balance(pieces: Iterable[Pieces]) -> float:
    """The elements of the rank that owns most, over the mean of all ranks."""
    loads = [sum(counts) for counts in zip(*(piece.counts for piece in pieces), strict=True)]
    return max(loads) * len(loads) / (sum(loads) or 1)


def _numel(shapes: Mapping[str, Shape]) -> int:
    return sum(map(math.prod, shapes.values()))


def _matrices_first(names: Iterable[str], shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: len(shapes[name]) < 2))


def _flat(shapes: Mapping[str, Shape], ranks: int) -> Pieces:
    return Pieces(_matrices_first(shapes, shapes), (-(-_numel(shapes) // ranks),) * ranks)


def _rows(shapes: Mapping[str, Shape], ranks: int) -> Pieces:
    order = _matrices_first(shapes, shapes)
    return Pieces(order, _counts_of_rows(tuple(shapes[name] for name in order), ranks))


@cache  # layers are alike
def _counts_of_rows(shapes: tuple[Shape, ...], ranks: int) -> tuple[int, ...]:
    total = sum(map(math.prod, shapes))
    cuts = [0]
    start, rank = 0, 1
    for shape in shapes:
        numel = math.prod(shape)
        row = math.prod(shape[1:])
        while rank < ranks and start + numel >= total * rank / ranks:
            rows = min(round(max(total * rank / ranks - start, 0) / (row or 1)), shape[0])
            cuts.append(start + rows * row)
            rank += 1
        start += numel
    cuts += [total] * (ranks + 1 - len(cuts))
    return tuple(stop - start for start, stop in pairwise(cuts))


def _matrices(units: Sequence[Mapping[str, Shape]], ranks: int) -> list[Pieces]:
    """Give each parameter, the largest of a unit first, to the rank that owns least so far.

    Unit by unit, so that the ranks share every unit and not only the model evenly.
    """
    loads = [0] * ranks
    pieces = []
    for shapes in units:
        owned: list[list[str]] = [[] for _ in range(ranks)]
        for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):
            owner = loads.index(min(loads))
            owned[owner].append(name)
            loads[owner] += math.prod(shapes[name])
        order = [name for names in owned for name in _matrices_first(names, shapes)]
        counts = [sum(math.prod(shapes[name]) for name in names) for names in owned]
        pieces.append(Pieces(tuple(order), tuple(counts)))
    return pieces
