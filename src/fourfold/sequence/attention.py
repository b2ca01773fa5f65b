"""Attention over tokens that are spread over ranks: Ulysses around a ring.

With a ring of one it is Ulysses, with one rank of Ulysses it is ring attention. With both, each group of
Ulysses' ranks exchanges tokens for heads, and a ring goes through the ranks with the same heads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.collectives import barrier
from fourfold.mesh import Axis
from fourfold.sequence.engine import Forward
from fourfold.sequence.partition import partition_of
from fourfold.sequence.ring import Around, ring_backward, ring_forward
from fourfold.sequence.rows import Documents, Ring
from fourfold.sequence.ulysses import copied, from_heads, summed_copies, to_heads


class ContextAttention:
    """In place of `fourfold.models.attention.attention`, for this rank's tokens.

    Args:
        ring: the ranks between which keys and values travel.
        ulysses: the ranks that exchange tokens for heads. Rank r of the ring and u of these holds part
            ``r * ulysses.size + u`` of every row's partition.
        causal: whether a token sees only itself and those before it.
    """

    def __init__(self, *, ring: Axis, ulysses: Axis, causal: bool = True):
        self.ring = ring
        self.ulysses = ulysses
        self.causal = causal
        # NCCL makes a communicator at its first use, for which all ranks must come; the first messages of a
        # ring may be for only some of them.
        barrier(ring)

    def columns(self, documents: Documents) -> tuple[tuple[range, ...], ...]:
        """Which tokens of each row this rank holds."""
        rank = self.ring.rank * self.ulysses.size + self.ulysses.rank
        return tuple(partition_of(row, self.ring.size, self.ulysses.size).columns(rank) for row in documents)

    def tokens(self, documents: Documents) -> list[int]:
        """How many tokens of a row each rank of Ulysses holds, in this rank's part of the ring."""
        counts = partition_of(documents[0], self.ring.size, self.ulysses.size).counts()
        first = self.ring.rank * self.ulysses.size
        return counts[first : first + self.ulysses.size]

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
        return _Attention.apply(q_BSHD, k_BSKD, v_BSKD, self, documents, window, scale)


class _Attention(torch.autograd.Function):
    """Keeps what its own rank attends with: for a ring its own keys and values, which come again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: ContextAttention,
        documents: Documents,
        window: int | None,
        scale: float,
    ) -> Tensor:
        ulysses, tokens = attention.ulysses, attention.tokens(documents)
        ring = Ring(attention.ring.size, attention.causal, window)
        ctx.attention, ctx.around, ctx.scale = attention, Around(attention.ring, ring, documents), scale
        ctx.tokens, ctx.kv_heads = tokens, k.shape[2]
        if ulysses.size > 1:
            q, k, v = to_heads([q, copied(k, ulysses.size), copied(v, ulysses.size)], ulysses, tokens)
        out, lse = ring_forward(q, k, v, around=ctx.around, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out if ulysses.size == 1 else from_heads([out], ulysses, tokens)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attention, tokens = ctx.attention, ctx.tokens
        if attention.ulysses.size > 1:
            (grad,) = to_heads([grad], attention.ulysses, tokens)
        dq, dk, dv = ring_backward(
            grad if grad.stride(-1) == 1 else grad.contiguous(),
            Forward(*ctx.saved_tensors),
            around=ctx.around,
            scale=ctx.scale,
        )
        if attention.ulysses.size > 1:
            dq, dk, dv = from_heads([dq, dk, dv], attention.ulysses, tokens)
            dk, dv = summed_copies(dk, ctx.kv_heads), summed_copies(dv, ctx.kv_heads)
        return dq, dk, dv, None, None, None, None
