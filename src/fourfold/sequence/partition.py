"""Which tokens of a row each rank of the cp axis holds: partitions, as data.

A rank holds *runs*: half-open intervals of the row's stream of tokens, in the order of the stream. How
many tokens a rank holds depends on the length of the row alone, so rows of different documents form a batch.

With causal attention late tokens attend to more than early ones. A long document is cut *zigzag*: into 2N
chunks, of which rank r holds chunks r and 2N - 1 - r, and all ranks have the same work (as in
ring-flash-attention). Short documents stay whole where they can: what one rank holds alone is never sent.

[Note: whole unless it unbalances] At first only documents that are longer than a rank's share of the row are
cut. While the busiest rank has more than 1.05 times the mean work, those of half that length are cut as well,
and so on. So what is cut, and sent, is as little as balance allows.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

MOST_IMBALANCE = 1.05
"""The busiest rank's pairs over the mean, where fewer cuts are worth it."""

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
        return list(self._counts)

    @cached_property
    def _counts(self) -> list[int]:
        return [sum(stop - start for start, stop in runs) for runs in self.runs]

    def columns(self, rank: int) -> tuple[range, ...]:
        """Where a rank's tokens stand in the row."""
        return tuple(range(start, stop) for start, stop in self.runs[rank])

    def work(self, documents: Sequence[int], window: int | None = None) -> list[int]:
        """The pairs of query and key that each rank computes with causal attention."""
        bounds = list(accumulate(documents, initial=0))
        found = []
        for runs in self.runs:
            pairs = 0
            for start, stop in runs:
                document = bisect_right(bounds, start) - 1
                while start < stop:
                    begin, end = bounds[document], min(bounds[document + 1], stop)
                    pairs += _pairs(end - begin, window) - _pairs(start - begin, window)
                    start, document = end, document + 1
            found.append(pairs)
        return found


def _pairs(tokens: int, window: int | None) -> int:
    """What the first tokens of a document see."""
    within = min(tokens, window or tokens)
    return within * (within + 1) // 2 + (tokens - within) * within


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
    dealt = _balanced(documents, ring).runs
    return Partition(tuple(part for runs in dealt for part in _parts(runs, ulysses)))


def _balanced(documents: tuple[int, ...], ranks: int) -> Partition:
    """Deal a row to ranks; see [Note: whole unless it unbalances]."""
    length = sum(documents)
    counts = tokens_of_ranks(length, ranks)
    longest = max(counts)
    best = _dealt(documents, counts, longest)
    work = best.work(documents)
    while ranks * max(work) > MOST_IMBALANCE * sum(work) and longest > 1:
        longest //= 2
        other = _dealt(documents, counts, longest)
        if max(other.work(documents)) < max(work):
            best, work = other, other.work(documents)
    return best


def _dealt(documents: Sequence[int], counts: Sequence[int], longest: int) -> Partition:
    """Deal so many tokens to each rank; documents of more than ``longest`` are cut zigzag."""
    owners = _owners(documents, counts, longest)
    return Partition(tuple(map(tuple, _runs(_exact(owners, counts), len(counts)))))


def contiguous(length: int, ranks: int) -> Partition:
    """The partition in one run a rank."""
    bounds = [length * rank // ranks for rank in range(ranks + 1)]
    return Partition(tuple((run,) if run[0] < run[1] else () for run in pairwise(bounds)))


def _owners(documents: Sequence[int], counts: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """The stream as (tokens, rank) after tokens, without regard to how many each rank may hold.

    Documents of more than ``longest`` tokens are cut zigzag. The others stay whole, each on the rank that has
    most room left, the longest first.
    """
    ranks = len(counts)
    is_long = [size > longest for size in documents]
    rest = list(counts)
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
