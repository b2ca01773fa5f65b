"""Which tokens of a row each rank of the cp axis holds: partitions, as data.

A rank holds *runs*: half-open intervals of the row's stream of tokens, in the order of the stream. How
many tokens a rank holds depends on the length of the row alone, so rows of different documents form a batch.

With causal attention late tokens attend to more than early ones. A long document is cut *zigzag*: into 2N
chunks, of which rank r holds chunks r and 2N - 1 - r, and all ranks have the same work (as in
ring-flash-attention). Short documents stay whole where they can: what one rank holds alone is never sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

Run = tuple[int, int]
"""A half-open interval of a row's tokens."""


@dataclass(frozen=True)
class Partition:
    """The tokens of one row on all ranks.

    Attributes:
        runs: of each rank, in the order of the stream.
    """

    runs: tuple[tuple[Run, ...], ...]

    def counts(self) -> list[int]:
        """How many tokens each rank holds."""
        return [sum(stop - start for start, stop in runs) for runs in self.runs]

    def columns(self, rank: int) -> tuple[range, ...]:
        """Where a rank's tokens stand in the row."""
        return tuple(range(start, stop) for start, stop in self.runs[rank])

    def work(self, documents: Sequence[int], window: int | None = None) -> list[int]:
        """The pairs of query and key that each rank computes with causal attention."""
        begins = [
            begin for begin, end in pairwise(accumulate(documents, initial=0)) for _ in range(begin, end)
        ]
        return [
            sum(min(i - begins[i] + 1, window or i + 1) for start, stop in runs for i in range(start, stop))
            for runs in self.runs
        ]


def tokens_of_ranks(length: int, ranks: int) -> list[int]:
    """How many tokens of a row each rank holds: equally many, or one more or less."""
    return [length * (rank + 1) // ranks - length * rank // ranks for rank in range(ranks)]


@lru_cache(maxsize=4096)
def partition_of(documents: tuple[int, ...], ring: int, ulysses: int = 1) -> Partition:
    """Return the partition of a row over ``ring * ulysses`` ranks, the same on all ranks.

    The row is dealt to the ranks of the ring so that their work is balanced, and what each gets is cut into
    equal parts in its order for the ranks of Ulysses, which bring it together before they attend. Rank
    ``ring_rank * ulysses + ulysses_rank`` of the axis holds the part.

    Args:
        documents: lengths of the row's documents.
        ring: ranks between which keys and values travel.
        ulysses: ranks that exchange tokens for heads.
    """
    length = sum(documents)
    counts = tokens_of_ranks(length, ring)
    owner = _owners(documents, ring)
    dealt = _runs(_exact(owner, counts), ring)
    return Partition(tuple(part for runs in dealt for part in _parts(runs, ulysses)))


def contiguous(length: int, ranks: int) -> Partition:
    """The partition in one run a rank."""
    bounds = [length * rank // ranks for rank in range(ranks + 1)]
    return Partition(tuple((run,) if run[0] < run[1] else () for run in pairwise(bounds)))


def _owners(documents: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """The stream as (tokens, rank) after tokens, balanced, without regard to how many each rank may hold."""
    length = sum(documents)
    is_long = [4 * ranks * size >= length for size in documents]
    rest = tokens_of_ranks(length, ranks)
    spans: dict[int, list[tuple[int, int]]] = {}
    for index, size in enumerate(documents):
        if is_long[index]:
            bounds = [size * i // (2 * ranks) for i in range(2 * ranks + 1)]
            chunks = [
                (stop - start, min(i, 2 * ranks - 1 - i)) for i, (start, stop) in enumerate(pairwise(bounds))
            ]
            for tokens, rank in chunks:
                rest[rank] -= tokens
            spans[index] = chunks
    for index in sorted(range(len(documents)), key=lambda index: -documents[index]):
        if not is_long[index]:
            rank = rest.index(max(rest))
            rest[rank] -= documents[index]
            spans[index] = [(documents[index], rank)]
    return [span for index in range(len(documents)) for span in spans[index]]


def _exact(spans: Sequence[tuple[int, int]], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Cut the ends off spans of ranks that hold too much, for ranks that hold too little."""
    held = [0] * len(counts)
    for tokens, rank in spans:
        held[rank] += tokens
    surplus = [have - want for have, want in zip(held, counts, strict=True)]
    written: list[tuple[int, int]] = []
    for tokens, rank in reversed(spans):
        moved: list[tuple[int, int]] = []
        while surplus[rank] > 0 and tokens > 0:
            taker = min(range(len(counts)), key=surplus.__getitem__)
            count = min(tokens, surplus[rank], -surplus[taker])
            moved.append((count, taker))
            surplus[rank] -= count
            surplus[taker] += count
            tokens -= count
        written += [*moved, (tokens, rank)]
    return written[::-1]


def _runs(spans: Sequence[tuple[int, int]], ranks: int) -> list[list[Run]]:
    """The runs of each rank, neighbours joined."""
    runs: list[list[Run]] = [[] for _ in range(ranks)]
    start = 0
    for tokens, rank in spans:
        stop = start + tokens
        if tokens and runs[rank] and runs[rank][-1][1] == start:
            runs[rank][-1] = (runs[rank][-1][0], stop)
        elif tokens:
            runs[rank].append((start, stop))
        start = stop
    return runs


def _parts(runs: Sequence[Run], parts: int) -> list[tuple[Run, ...]]:
    """Cut runs into equal parts in their order."""
    total = sum(stop - start for start, stop in runs)
    bounds = [total * i // parts for i in range(parts + 1)]
    found = []
    for low, high in pairwise(bounds):
        part = []
        first = 0
        for start, stop in runs:
            a, b = max(start, start + low - first), min(stop, start + high - first)
            if a < b:
                part.append((a, b))
            first += stop - start
        found.append(tuple(part))
    return found
