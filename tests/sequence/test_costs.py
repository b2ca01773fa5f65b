"""The closed formula of what attention sends is the mean over ranks of its messages, for long documents."""

import pytest

from fourfold.sequence.costs import SequenceCosts
from fourfold.traffic import heads_sent, sent_bytes


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("documents", [(1600,), (800, 800)])
def test_heads_sent(documents: tuple[int, ...], ring: int, ulysses: int, kv_heads: int) -> None:
    """Of 1600 tokens; both documents are cut where a rank's share is less than 800 tokens."""
    sent = 0.0
    for rank in range(ring * ulysses):
        costs = SequenceCosts(
            documents=[(documents,)],
            heads=8,
            kv_heads=kv_heads,
            head_dim=1,
            window=None,
            dtype="uint8",
            itemsize=1,
            ring=ring,
            ulysses=ulysses,
            rank=rank,
        )
        sent += sum(sent_bytes(event, ulysses) for event in (*costs.forward(0), *costs.backward(0)))
    in_the_ring = ring if documents == (1600,) or ring > 2 else 1  # else each group holds one document
    assert sent == pytest.approx(1600 * heads_sent(8, kv_heads, ring=in_the_ring, ulysses=ulysses))
