"""What the ranks of a ring need of each other for a batch whose rows hold different documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from fourfold.rectangle import Rectangle
from fourfold.sequence.partition import Run, partition_of
from fourfold.sequence.rectangles import keys_needed, rectangles

Documents = tuple[tuple[int, ...], ...]
"""Of each row of a batch, the lengths of its documents."""


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a batch that hold the same documents: they share messages and kernel calls.

    Attributes:
        start: the first of them, and ``stop`` the one after the last.
        documents: of each.
    """

    start: int
    stop: int
    documents: tuple[int, ...]

    @property
    def batch(self) -> slice:
        """Where they stand in a tensor of the batch."""
        return slice(self.start, self.stop)


@lru_cache(maxsize=4096)
def rows_alike(documents: Documents) -> tuple[Rows, ...]:
    """Return the runs of rows that hold the same documents."""
    found = []
    start = 0
    for lengths, rows in groupby(documents):
        stop = start + len(list(rows))
        found.append(Rows(start, stop, lengths))
        start = stop
    return tuple(found)


@dataclass(frozen=True)
class Needed:
    """Keys of a rank: some rows' of some of its tokens, which lie one after another in a message.

    Attributes:
        rows: the rows.
        runs: intervals of the rank's tokens, in order and apart.
    """

    rows: Rows
    runs: tuple[Run, ...]

    @property
    def tokens(self) -> int:
        """How many of a row."""
        return sum(stop - start for start, stop in self.runs)

    def places(self) -> Iterator[tuple[slice, slice]]:
        """For each run, where it stands among the rank's tokens, and where among these."""
        before = 0
        for start, stop in self.runs:
            yield slice(start, stop), slice(before, before + stop - start)
            before += stop - start

    def place(self, token: int) -> int:
        """Where one of the rank's tokens stands among these."""
        return next(
            there.start + token - here.start
            for here, there in self.places()
            if here.start <= token < here.stop
        )


@dataclass(frozen=True)
class Ring:
    """Who needs which keys of whom: a pure function of the documents, the same on all ranks.

    Attributes:
        ranks: of the ring.
        causal: whether a token sees only itself and those before it.
        window: how far back, None for all.
    """

    ranks: int
    causal: bool
    window: int | None

    def pieces(self, rows: Rows, q_rank: int, k_rank: int) -> tuple[Rectangle, ...]:
        """The rectangles of one rank's queries with one rank's keys."""
        partition = partition_of(rows.documents, self.ranks)
        return rectangles(partition, q_rank, k_rank, rows.documents, causal=self.causal, window=self.window)

    def needed(self, documents: Documents, q_rank: int, k_rank: int) -> tuple[Needed, ...]:
        """Of which rows one rank needs which of another's keys. Nothing where it needs none: no message."""
        return _needed(self, documents, q_rank, k_rank)

    def tokens(self, documents: Documents, q_rank: int, k_rank: int) -> int:
        """How many tokens' keys and values that is, over all rows."""
        return _tokens(self, documents, q_rank, k_rank)


@lru_cache(maxsize=4096)
def _tokens(ring: Ring, documents: Documents, q_rank: int, k_rank: int) -> int:
    needed = _needed(ring, documents, q_rank, k_rank)
    return sum((part.rows.stop - part.rows.start) * part.tokens for part in needed)


@lru_cache(maxsize=4096)
def _needed(ring: Ring, documents: Documents, q_rank: int, k_rank: int) -> tuple[Needed, ...]:
    """Every layer asks for the same."""
    found = []
    for rows in rows_alike(documents):
        partition = partition_of(rows.documents, ring.ranks)
        runs = keys_needed(partition, q_rank, k_rank, rows.documents, causal=ring.causal, window=ring.window)
        if runs:
            found.append(Needed(rows, runs))
    return tuple(found)
