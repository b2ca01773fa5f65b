"""Which queries attend to which keys, as rectangles without masks.

[Note: no mask tensor] Runs of different ranks are disjoint intervals of the stream, so all keys of a run come
before all queries of another or after them. With causal attention such a pair is all or nothing, and only the
one document that lies across both can have any of it: at most one rectangle. Only a run with itself has
diagonal pieces, one square for each document. A sliding window trims a rectangle to the rows and columns that
see each other, and what is left of it is a band. No row of a piece is empty: the kernels and the merge of
their results could not bear one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from fourfold.rectangle import Rectangle
from fourfold.sequence.partition import Partition, Run


@lru_cache(maxsize=4096)
def rectangles(
    partition: Partition,
    q_rank: int,
    k_rank: int,
    documents: tuple[int, ...],
    *,
    causal: bool = True,
    window: int | None = None,
) -> tuple[Rectangle, ...]:
    """Return what the queries of one rank compute with the keys of one rank, pieces on the diagonal first.

    Args:
        partition: of the row.
        q_rank: the rank of the queries, and ``k_rank`` of the keys.
        documents: lengths of the row's documents; no document sees another.
        causal: whether a token sees only itself and those before it.
        window: how many tokens back it sees, itself included. Only with ``causal``.
    """
    bounds = [0, *accumulate(documents)]
    k_runs = partition.runs[k_rank]
    k_starts, k_stops = ([run[end] for run in k_runs] for end in (0, 1))
    k_firsts = [0, *accumulate(stop - start for start, stop in k_runs)]
    found: list[Rectangle] = []
    q_first = 0
    for q_run in partition.runs[q_rank]:
        start, stop = _reach(q_run, bounds, causal, window)
        for index in range(bisect_right(k_stops, start), bisect_left(k_starts, stop)):
            k_run, k_first = k_runs[index], k_firsts[index]
            for piece in _pieces(q_run, k_run, bounds, causal):
                if trimmed := _trimmed(piece, window):
                    found += [
                        _placed(block, q_first - q_run[0], k_first - k_run[0]) for block in _blocks(trimmed)
                    ]
        q_first += q_run[1] - q_run[0]
    return tuple(sorted(_joined(found), key=lambda piece: not piece.causal))


def _reach(q_run: Run, bounds: Sequence[int], causal: bool, window: int | None) -> Run:
    """Between which tokens all keys of a run's queries lie: in a pack few runs are among these."""
    start = bounds[bisect_right(bounds, q_run[0]) - 1]
    start = start if window is None else max(start, q_run[0] - window + 1)
    return start, q_run[1] if causal else bounds[bisect_right(bounds, q_run[1] - 1)]


def _pieces(q_run: Run, k_run: Run, bounds: Sequence[int], causal: bool) -> Iterator[Rectangle]:
    """The pieces of two runs, by their places in the stream."""
    (q_start, q_stop), (k_start, k_stop) = q_run, k_run
    if q_run == k_run:
        first = bisect_right(bounds, q_start) - 1
        while first < len(bounds) - 1 and bounds[first] < q_stop:
            start, stop = max(bounds[first], q_start), min(bounds[first + 1], q_stop)
            yield Rectangle(start, stop, start, stop, 0, causal)
            first += 1
    elif k_stop <= q_start:
        document = bisect_right(bounds, k_stop - 1) - 1
        start, stop = max(bounds[document], k_start), min(bounds[document + 1], q_stop)
        if stop > q_start:
            yield Rectangle(q_start, stop, start, k_stop, q_start - start)
    elif not causal:
        document = bisect_right(bounds, q_stop - 1) - 1
        start, stop = max(bounds[document], q_start), min(bounds[document + 1], k_stop)
        if stop > k_start:
            yield Rectangle(start, q_stop, k_start, stop, start - k_start)


def _trimmed(piece: Rectangle, window: int | None) -> Rectangle | None:
    """Leave out the rows and columns that see nothing; say if a window still cuts what is left."""
    if window is None:
        return piece
    q_stop = min(piece.q_stop, piece.k_stop + window - 1)
    k_start = piece.k_start if piece.causal else max(piece.k_start, piece.q_start - window + 1)
    if q_stop <= piece.q_start or k_start >= piece.k_stop:
        return None
    is_cut = q_stop - 1 - k_start >= window
    ahead = piece.q_start - k_start
    return replace(piece, q_stop=q_stop, k_start=k_start, ahead=ahead, window=window if is_cut else None)


def _blocks(piece: Rectangle) -> Iterator[Rectangle]:
    """Cut a band on the diagonal into blocks of ``window`` queries: work and masks grow with S * window."""
    if not piece.causal or piece.window is None:
        yield piece
        return
    for start in range(piece.q_start, piece.q_stop, piece.window):
        stop, first = min(start + piece.window, piece.q_stop), max(piece.k_start, start - piece.window + 1)
        window = None if first == start else piece.window
        yield Rectangle(start, stop, first, stop, start - first, True, window)


def _placed(piece: Rectangle, q_shift: int, k_shift: int) -> Rectangle:
    return replace(
        piece,
        q_start=piece.q_start + q_shift,
        q_stop=piece.q_stop + q_shift,
        k_start=piece.k_start + k_shift,
        k_stop=piece.k_stop + k_shift,
    )


def _joined(pieces: Sequence[Rectangle]) -> list[Rectangle]:
    """Join full rectangles of the same queries whose keys lie side by side: one kernel call, not two."""
    found: list[Rectangle] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.q_start, last.q_stop, last.k_stop) == (piece.q_start, piece.q_stop, piece.k_start)
            and not (last.causal or piece.causal or last.window or piece.window)
        ):
            found[-1] = replace(last, k_stop=piece.k_stop)
        else:
            found.append(piece)
    return found


def keys_needed(
    partition: Partition,
    q_rank: int,
    k_rank: int,
    documents: tuple[int, ...],
    *,
    causal: bool,
    window: int | None,
) -> tuple[Run, ...]:
    """Return those of a rank's keys that another rank needs, as intervals in its order, apart."""
    pieces = rectangles(partition, q_rank, k_rank, documents, causal=causal, window=window)
    found: list[Run] = []
    for start, stop in sorted({(piece.k_start, piece.k_stop) for piece in pieces}):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)
