"""Attention over tokens that are spread over ranks: Ulysses around a ring.

With a ring of one it is Ulysses, with one rank of Ulysses it is ring attention. With both, each group of
Ulysses' ranks exchanges tokens for heads, and a ring goes through the ranks with the same heads.
"""

from torch import Tensor

from fourfold.collectives import barrier
from fourfold.mesh import Axis
from fourfold.sequence.ops import Place, context_attention
from fourfold.sequence.partition import partition_of
from fourfold.sequence.rows import Documents


class ContextAttention:
    """In place of `fourfold.models.attention.attention`, for this rank's tokens.

    Args:
        ring: the ranks between which keys and values travel.
        ulysses: the ranks that exchange tokens for heads. Rank r of the ring and u of these holds part
            ``r * ulysses.size + u`` of every row's partition.
        causal: whether a token sees only itself and those before it.
    """

    def __init__(self, *, ring: Axis, ulysses: Axis, causal: bool = True):
        self.place = Place(ring, ulysses, causal)
        # NCCL makes a communicator at its first use, for which all ranks must come; the first messages of a
        # ring may be for only some of them.
        barrier(ring)

    def columns(self, documents: Documents) -> tuple[tuple[range, ...], ...]:
        """Which tokens of each row this rank holds."""
        ring, ulysses = self.place.ring, self.place.ulysses
        rank = ring.rank * ulysses.size + ulysses.rank
        return tuple(partition_of(row, ring.size, ulysses.size).columns(rank) for row in documents)

    def __call__(
        self,
        q_BSHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        *,
        documents: Documents,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Return the attention of this rank's queries, (B, S, H, D).

        ``documents`` are those of the whole rows, each of which sums to the whole length.
        """
        lengths = [length for row in documents for length in row]
        out_BSHD, *_ = context_attention(q_BSHD, k_BSKD, v_BSKD, self.place.number, lengths, window, scale)
        return out_BSHD
