"""Partitions and rectangles: every pair exactly once, balanced work."""

import math
from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.sequence.partition import Partition, contiguous, partition_of, tokens_of_ranks
from fourfold.sequence.rectangles import keys_needed, rectangles

documents_of_a_row = st.lists(st.integers(1, 24), min_size=1, max_size=8).map(tuple)


def stream(partition: Partition, rank: int) -> list[int]:
    return [token for columns in partition.columns(rank) for token in columns]


@given(documents_of_a_row, st.integers(1, 5), st.integers(1, 4))
def test_every_token_is_on_one_rank_and_ranks_hold_equally_many(
    documents: tuple[int, ...], ring: int, ulysses: int
) -> None:
    partition = partition_of(documents, ring, ulysses)
    held = [stream(partition, rank) for rank in range(ring * ulysses)]
    assert sorted(token for tokens in held for token in tokens) == list(range(sum(documents)))
    assert all(tokens == sorted(tokens) for tokens in held)
    together = [sum(partition.counts()[r * ulysses : (r + 1) * ulysses]) for r in range(ring)]
    assert together == tokens_of_ranks(sum(documents), ring)
    assert max(partition.counts()) - min(partition.counts()) <= 2
    others = partition_of((sum(documents),), ring, ulysses)
    assert partition.counts() == others.counts()  # by the length alone


@settings(max_examples=300)
@given(
    documents_of_a_row,
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([None, 1, 2, 3, 7, 20]),
    st.booleans(),
)
def test_every_allowed_pair_is_covered_once(
    documents: tuple[int, ...], ranks: int, in_one_run: bool, window: int | None, causal: bool
) -> None:
    window = window if causal else None
    length = sum(documents)
    partition = contiguous(length, ranks) if in_one_run else partition_of(documents, ranks)
    begins = [sum(documents[:i]) for i, size in enumerate(documents) for _ in range(size)]
    covered: Counter[tuple[int, int]] = Counter()
    for q_rank in range(ranks):
        queries = stream(partition, q_rank)
        for k_rank in range(ranks):
            keys = stream(partition, k_rank)
            needed = keys_needed(partition, q_rank, k_rank, documents, causal=causal, window=window)
            used: set[int] = set()
            for piece in rectangles(partition, q_rank, k_rank, documents, causal=causal, window=window):
                used.update(range(piece.k_start, piece.k_stop))
                assert any(start <= piece.k_start < piece.k_stop <= stop for start, stop in needed)
                pairs = 0
                for i, q in enumerate(queries[piece.q_start : piece.q_stop]):
                    seen = 0
                    for j, k in enumerate(keys[piece.k_start : piece.k_stop]):
                        apart = piece.ahead + i - j
                        if (not piece.causal or apart >= 0) and (
                            piece.window is None or apart < piece.window
                        ):
                            covered[q, k] += 1
                            seen += 1
                    assert seen, "a row without keys"
                    pairs += seen
                assert pairs == piece.pairs
            assert [token for start, stop in needed for token in range(start, stop)] == sorted(used)
            assert all(left[1] < right[0] for left, right in pairwise(needed))
    allowed = {
        (q, k)
        for q in range(length)
        for k in range(length)
        if begins[q] == begins[k] and (not causal or 0 <= q - k < (window or length))
    }
    assert set(covered) == allowed
    assert set(covered.values()) <= {1}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_one_document_is_zigzag_and_balanced(ranks: int) -> None:
    length = 2 * ranks * 5
    partition = partition_of((length,), ranks)
    chunk = 5
    assert partition.runs[0] == ((0, chunk), (length - chunk, length))
    assert len(set(partition.work((length,)))) == 1
    assert max(contiguous(length, ranks).work((length,))) > 1.4 * length * (length + 1) / 2 / ranks


def test_packed_documents_are_balanced() -> None:
    """Documents of 4 and 12 tokens on 2 ranks: 88 pairs, 44 each."""
    # CP-18
    assert partition_of((4, 12), 2).work((4, 12)) == [44, 44]


def test_short_documents_stay_whole() -> None:
    """Nothing is sent for them. Long ones among them are dealt to all."""
    documents = (3, 3, 200, 3, 3, 3, 3, 200, 3, 3)
    partition = partition_of(documents, 4)
    work = partition.work(documents)
    assert max(work) / (sum(work) / 4) < 1.05
    pieces = [len(rectangles(partition, 0, rank, documents)) for rank in range(4)]
    assert max(pieces) <= 8


def test_a_row_shorter_than_the_ranks() -> None:
    partition = partition_of((2, 1), 4)
    assert sorted(partition.counts()) == [0, 1, 1, 1]


@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=60).map(tuple),
    st.integers(1, 8),
    st.sampled_from([None, 1, 7, 100]),
)
def test_work_is_counted_as_token_by_token(
    documents: tuple[int, ...], ranks: int, window: int | None
) -> None:
    partition = partition_of(documents, ranks)
    seen = [min(i + 1, window or i + 1) for size in documents for i in range(size)]
    expected = [sum(seen[token] for token in stream(partition, rank)) for rank in range(ranks)]
    assert partition.work(documents, window) == expected


@given(st.lists(st.floats(0, 9), min_size=1, max_size=80), st.sampled_from([2, 3, 4, 8]))
def test_any_pack_is_balanced(logarithms: list[float], ranks: int) -> None:
    """Documents of 1 to 8000 tokens, at least 512 tokens a rank: at most 1.05 times the mean work."""
    documents = tuple(int(math.exp(logarithm)) for logarithm in logarithms)
    short = 512 * ranks - sum(documents)
    documents += (short,) if short > 0 else ()
    work = partition_of(documents, ranks).work(documents)
    assert ranks * max(work) <= 1.05 * sum(work)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("documents", [(4096,) * 8, (1024,) * 32])
def test_what_fits_whole_is_not_cut(documents: tuple[int, ...], ranks: int) -> None:
    """Equal documents, one or more a rank: no rank needs a key of another."""
    partition = partition_of(documents, ranks)
    for q_rank, k_rank in product(range(ranks), repeat=2):
        needed = keys_needed(partition, q_rank, k_rank, documents, causal=True, window=None)
        assert bool(needed) == (q_rank == k_rank)
