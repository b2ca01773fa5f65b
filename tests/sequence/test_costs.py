"""The closed formula of what attention sends is the mean over ranks of its messages, for long documents."""

import pytest

from fourfold.sequence.costs import SequenceCosts
from fourfold.traffic import heads_sent, sent_bytes


def sent(documents: tuple[int, ...], ring: int, ulysses: int, kv_heads: int, window: int | None) -> float:
    """What all ranks send of 8 query heads of one channel and byte."""
    total = 0.0
    for rank in range(ring * ulysses):
        costs = SequenceCosts(
            documents=[(documents,)],
            heads=8,
            kv_heads=kv_heads,
            head_dim=1,
            window=window,
            dtype="uint8",
            itemsize=1,
            ring=ring,
            ulysses=ulysses,
            rank=rank,
        )
        total += sum(sent_bytes(event, ulysses) for event in (*costs.forward(0), *costs.backward(0)))
    return total


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("documents", [(1600,), (800, 800)])
def test_heads_sent(documents: tuple[int, ...], ring: int, ulysses: int, kv_heads: int) -> None:
    """Of 1600 tokens; both documents are cut where a rank's share is less than 800 tokens."""
    in_the_ring = ring if documents == (1600,) or ring > 2 else 1  # else each group holds one document
    expected = heads_sent(8, kv_heads, ring=in_the_ring, ulysses=ulysses)
    assert sent(documents, ring, ulysses, kv_heads, None) == pytest.approx(1600 * expected)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (8, 1), (2, 2)])
@pytest.mark.parametrize("window", [1, 51, 101, 301, 701, 1601])
def test_heads_sent_of_a_window(window: int, ring: int, ulysses: int) -> None:
    """A token sees itself, which is not sent, and ``window - 1`` before it."""
    expected = heads_sent(8, 2, ring=ring, ulysses=ulysses, window=(window - 1) / 1600)
    assert sent((1600,), ring, ulysses, 2, window) == pytest.approx(1600 * expected)
