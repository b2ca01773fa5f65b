"""Ring attention: queries stay, keys and values come from the ranks that hold them.

[Note: straight to who needs it] At step t rank r receives keys and values from rank r - t and sends its own
to rank r + t, so all links are used at once and a message holds no more than what its receiver attends to.
The message of step t + 1 is under way while step t computes; step 0 needs none. In the backward the keys and
values come again, and after each step the gradients of them go straight back to their owner, which adds them
up in float32 one step later. They are never added up on the way, so errors do not grow with the number of
ranks (Liu et al. 2023 pass blocks from neighbour to neighbour instead).

[Note: exchanges in one order] What is sent and received at once is one group of NCCL's, since there each rank
runs its messages in the order in which it started them. All ranks start their groups in the same order: the
keys of step 1; then for each step t the keys of step t + 1 and the gradients of step t. So the first group
that has not ended anywhere can end, and nothing depends on tags.

[Note: merged in float32] Partial results (o, l) of blocks of keys merge to l' = logaddexp(l, l_j),
o' = exp(l - l') o + exp(l_j - l') o_j, in float32 or higher. No row of a block is empty, so no l_j is -inf;
a row starts from l = -inf, o = 0. With causal attention the squares on the diagonal come first and hold every
query once: their results are written, not merged.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fourfold.attention_engine import Forward, attend, attend_backward
from fourfold.collectives import exchange_
from fourfold.mesh import Axis
from fourfold.rectangle import Rectangle
from fourfold.sequence.rows import Documents, Needed, Ring, rows_alike


@dataclass(frozen=True, slots=True)
class Block:
    """Keys and values of a rank, or their gradients, both (rows, tokens, K, D); ``needed`` says which."""

    needed: Needed
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle, and where it stands.

    Attributes:
        piece: the rectangle.
        block: the number of the block of keys in its step.
        queries: its queries in a tensor (B, S, ...), and ``lse`` in one (B, H, S).
        keys: its keys in the block.
    """

    piece: Rectangle
    block: int
    queries: tuple[slice, slice]
    lse: tuple[slice, slice, slice]
    keys: tuple[slice, slice]


@dataclass(frozen=True)
class Around:
    """An attention around a ring, as this rank takes part in it.

    Attributes:
        axis: the ranks of the ring.
        ring: who needs what of whom.
        documents: of the whole rows.
    """

    axis: Axis
    ring: Ring
    documents: Documents

    def steps(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Block], tuple[Part, ...]]]:
        """Yield each rank, its keys and what to compute with them; those of the next are on their way."""
        blocks = self.own(k, v)
        for step in range(self.axis.size):
            source = (self.axis.rank - step) % self.axis.size
            following = self._keys(k, v, step + 1) if step + 1 < self.axis.size else None
            needed = tuple(block.needed for block in blocks)
            yield source, blocks, _parts(self.ring, self.axis.rank, source, needed)
            blocks = following() if following is not None else []

    def own(self, k: Tensor, v: Tensor) -> list[Block]:
        """This rank's keys and values, or their gradients, as blocks of all tokens."""
        return [
            Block(Needed(rows, ((0, k.shape[1]),)), k[rows.batch], v[rows.batch])
            for rows in rows_alike(self.documents)
        ]

    def needed(self, q_rank: int, k_rank: int) -> tuple[Needed, ...]:
        """What one rank needs of another's keys."""
        return self.ring.needed(self.documents, q_rank, k_rank)

    def gradients(self, message: Tensor, source: int, k: Tensor) -> Callable[[], list[Block]]:
        """Start to give a rank the gradients of its keys; the result waits for those that come in return."""
        reader = (
            2 * self.axis.rank - source
        ) % self.axis.size  # who computes with this rank's keys meanwhile
        return self._exchange({source: message}, reader, self.needed(reader, self.axis.rank), k)

    def _keys(self, k: Tensor, v: Tensor, step: int) -> Callable[[], list[Block]]:
        """Start the messages of a step; the result waits for them and returns what has come."""
        rank = self.axis.rank
        source, reader = (rank - step) % self.axis.size, (rank + step) % self.axis.size
        message, blocks = _room(self.needed(reader, rank), k, k.dtype)
        for block in blocks:
            rows = block.needed.rows.batch
            for here, there in block.needed.places():
                block.k[:, there], block.v[:, there] = k[rows, here], v[rows, here]
        return self._exchange({reader: message}, source, self.needed(rank, source), k)

    def _exchange(
        self, messages: dict[int, Tensor], source: int, expected: Sequence[Needed], k: Tensor
    ) -> Callable[[], list[Block]]:
        buffer, blocks = _room(expected, k, k.dtype)
        pending = exchange_(
            {peer: message for peer, message in messages.items() if message.numel()},
            {source: buffer} if expected else {},
            self.axis,
        )

        def wait() -> list[Block]:
            pending.wait()
            return blocks

        return wait


@lru_cache(maxsize=256)
def _parts(ring: Ring, q_rank: int, k_rank: int, needed: tuple[Needed, ...]) -> tuple[Part, ...]:
    """The rectangles of a rank's queries with blocks of a rank's keys; every layer has the same."""
    found = []
    for number, block in enumerate(needed):
        batch = block.rows.batch
        for piece in ring.pieces(block.rows, q_rank, k_rank):
            queries = slice(piece.q_start, piece.q_stop)
            first = block.place(piece.k_start)
            keys = slice(first, first + piece.k_stop - piece.k_start)
            lse = (batch, slice(None), queries)
            found.append(Part(piece, number, (batch, queries), lse, (slice(None), keys)))
    return tuple(found)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, *, around: Around, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention of this rank's queries over all keys, (B, S, H, D), and its log-sum-exp (B, H, S).

    The output has the dtype of ``q``, the other is in float32 or higher.

    Args:
        q: this rank's queries (B, S, H, D), and ``k``, ``v`` its keys and values (B, S, K, D).
        around: the ring.
        scale: of the scores.
    """
    high = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=high, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=high, device=q.device)
    for _, blocks, parts in around.steps(k, v):
        if around.axis.size == len(parts) == len(blocks) == 1:
            return attend(q, k, v, parts[0].piece, scale)
        for part in parts:
            block = blocks[part.block]
            found = attend(q[part.queries], block.k[part.keys], block.v[part.keys], part.piece, scale)
            if part.piece.causal:
                out[part.queries], lse[part.lse] = found
            else:
                _merge_(out[part.queries], lse[part.lse], *found)
    return out.to(q.dtype), lse


def ring_backward(
    grad: Tensor, forward: Forward, *, around: Around, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys and values, in their dtype.

    They are added up in float32 or higher. ``forward`` has this rank's tensors and what `ring_forward`
    returned for them.
    """
    q, k, v = forward.q, forward.k, forward.v
    high = forward.lse.dtype
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=high, device=tensor.device) for tensor in (q, k, v))
    returned: Callable[[], list[Block]] = list
    for source, blocks, parts in around.steps(k, v):
        if around.axis.size == len(parts) == len(blocks) == 1:
            return attend_backward(grad, forward, parts[0].piece, scale)
        message = None
        gradients = around.own(dk, dv)
        if source != around.axis.rank:
            message, gradients = _room([block.needed for block in blocks], k, high)
            message.zero_()
        for part in parts:
            block, gradient = blocks[part.block], gradients[part.block]
            piece = Forward(
                q[part.queries],
                block.k[part.keys],
                block.v[part.keys],
                forward.out[part.queries],
                forward.lse[part.lse],
            )
            found = attend_backward(grad[part.queries], piece, part.piece, scale)
            dq[part.queries] += found[0]
            gradient.k[part.keys] += found[1]
            gradient.v[part.keys] += found[2]
        _add_(dk, dv, returned())
        returned = list if message is None else around.gradients(message.to(k.dtype), source, k)
    _add_(dk, dv, returned())
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _room(parts: Sequence[Needed], k: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Block]]:
    """Return room for the keys and values of a message, and the same as blocks. It is not filled.

    Args:
        parts: which, of keys (B, S, K, D) like ``k``.
        k: says how many heads and channels there are.
        dtype: of the message.
    """
    shapes = [
        torch.Size((part.rows.stop - part.rows.start, part.tokens, *k.shape[2:]))
        for part in parts
        for _ in range(2)
    ]
    message = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype, device=k.device)
    pieces = message.split([shape.numel() for shape in shapes])
    views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    return message, [Block(*block) for block in zip(parts, views[::2], views[1::2], strict=True)]


def _add_(dk: Tensor, dv: Tensor, blocks: Sequence[Block]) -> None:
    """Add gradients that came back to those of this rank's keys and values."""
    for block in blocks:
        rows = block.needed.rows.batch
        for here, there in block.needed.places():
            dk[rows, here] += block.k[:, there]
            dv[rows, here] += block.v[:, there]


def _merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's result to the running one; see [Note: merged in float32]."""
    total = torch.logaddexp(lse, block_lse)
    kept, added = (lse - total).exp_(), (block_lse - total).exp_()
    out.mul_(kept.transpose(1, 2)[..., None]).addcmul_(
        block_out.to(out.dtype), added.transpose(1, 2)[..., None]
    )
    lse.copy_(total)
