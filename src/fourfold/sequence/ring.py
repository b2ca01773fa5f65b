"""Ring attention: queries stay, keys and values come from the ranks that hold them.

[Note: straight to who needs it] At step t rank r receives keys and values from rank r - t and sends its own
to rank r + t, so all links are used at once and a message holds no more than what its receiver attends to.
The message of step t + 1 is under way while step t computes; step 0 needs none. In the backward the keys and
values come again, and the gradients of them go straight back to their owner, which adds them up in float32.
They are never added up on the way, so errors do not grow with the number of ranks (Liu et al. 2023 pass
blocks from neighbour to neighbour instead).

[Note: merged in float32] Partial results (o, l) of blocks of keys merge to l' = logaddexp(l, l_j),
o' = exp(l - l') o + exp(l_j - l') o_j, in float32 or higher. No row of a block is empty, so no l_j is -inf;
the first block of a row starts from l = -inf, o = 0.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fourfold.collectives import Pending, recv_, send
from fourfold.mesh import Axis
from fourfold.sequence.engine import attend, attend_backward
from fourfold.sequence.partition import Run
from fourfold.sequence.rows import Documents, Ring, Rows, rows_alike

KEYS, GRADIENTS = 1, 2
"""Tags of the two kinds of messages."""


Blocks = list[tuple[Rows, Run, Tensor, Tensor]]
"""Of which rows, which interval of a rank's tokens: their keys and values."""


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, *, axis: Axis, ring: Ring, documents: Documents, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention of this rank's queries over all keys, (B, S, H, D), and its log-sum-exp (B, H, S).

    Both in float32 or higher.

    Args:
        q: this rank's queries (B, S, H, D), and ``k``, ``v`` its keys and values (B, S, K, D).
        axis: the ranks of the ring.
        ring: who needs what of whom.
        documents: of the whole rows.
        scale: of the scores.
    """
    high = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=high, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=high, device=q.device)
    for source, blocks in _steps(k, v, axis, ring, documents):
        for rows, (first, _), k_part, v_part in blocks:
            for piece in ring.pieces(rows, axis.rank, source):
                queries = slice(piece.q_start, piece.q_stop)
                keys = slice(piece.k_start - first, piece.k_stop - first)
                block_out, block_lse = attend(
                    q[rows.start : rows.stop, queries], k_part[:, keys], v_part[:, keys], piece, scale
                )
                _merge_(
                    out[rows.start : rows.stop, queries],
                    lse[rows.start : rows.stop, :, queries],
                    block_out,
                    block_lse,
                )
    return out, lse


def ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    axis: Axis,
    ring: Ring,
    documents: Documents,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``, in float32 or higher.

    ``out`` is the output in the dtype of ``q``, ``lse`` what `ring_forward` returned.
    """
    high = lse.dtype
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=high, device=tensor.device) for tensor in (q, k, v))
    returning: list[Pending] = []
    coming: list[tuple[Pending, int, Tensor]] = []
    for source, blocks in _steps(k, v, axis, ring, documents):
        reader = (2 * axis.rank - source) % axis.size  # who computes with this rank's keys in this step
        expected = ring.needed(documents, reader, axis.rank) if reader != axis.rank else ()
        if expected:
            buffer = k.new_empty(2 * _numel(expected, k))
            coming.append((recv_(buffer, axis, source=reader, tag=GRADIENTS, blocking=False), reader, buffer))
        partial = []
        for rows, (first, stop), k_part, v_part in blocks:
            batch = slice(rows.start, rows.stop)
            if source == axis.rank:
                dk_part, dv_part = dk[batch], dv[batch]
            else:
                shape = (rows.stop - rows.start, stop - first, *k.shape[2:])
                dk_part, dv_part = (torch.zeros(shape, dtype=high, device=k.device) for _ in range(2))
                partial += [dk_part, dv_part]
            for piece in ring.pieces(rows, axis.rank, source):
                queries = slice(piece.q_start, piece.q_stop)
                keys = slice(piece.k_start - first, piece.k_stop - first)
                gradients = attend_backward(
                    grad[batch, queries],
                    q[batch, queries],
                    k_part[:, keys],
                    v_part[:, keys],
                    out[batch, queries],
                    lse[batch, :, queries],
                    piece,
                    scale,
                )
                dq[batch, queries] += gradients[0]
                dk_part[:, keys] += gradients[1]
                dv_part[:, keys] += gradients[2]
        if partial:
            message = torch.cat([tensor.flatten() for tensor in partial]).to(k.dtype)
            returning.append(send(message, axis, destination=source, tag=GRADIENTS, blocking=False))
    for pending, reader, buffer in coming:
        pending.wait()
        for rows, (first, stop), dk_part, dv_part in _unpacked(
            buffer, ring.needed(documents, reader, axis.rank), k
        ):
            dk[rows.start : rows.stop, first:stop] += dk_part
            dv[rows.start : rows.stop, first:stop] += dv_part
    for pending in returning:
        pending.wait()
    return dq, dk, dv


def _steps(
    k: Tensor, v: Tensor, axis: Axis, ring: Ring, documents: Documents
) -> Iterator[tuple[int, Blocks]]:
    """Yield each rank whose keys this one needs, with them; the next ones are on their way meanwhile."""
    own: Blocks = [
        (rows, (0, k.shape[1]), k[rows.start : rows.stop], v[rows.start : rows.stop])
        for rows in rows_alike(documents)
    ]
    blocks = own
    for step in range(axis.size):
        following = _exchange(k, v, axis, ring, documents, step + 1) if step + 1 < axis.size else None
        source = (axis.rank - step) % axis.size
        yield source, blocks
        blocks = following() if following is not None else []


def _exchange(
    k: Tensor, v: Tensor, axis: Axis, ring: Ring, documents: Documents, step: int
) -> Callable[[], Blocks]:
    """Start the messages of a step; the result waits for them and returns what has come."""
    source, reader = (axis.rank - step) % axis.size, (axis.rank + step) % axis.size
    needed = ring.needed(documents, axis.rank, source)
    sent = ring.needed(documents, reader, axis.rank)
    pending = []
    buffer = k.new_empty(2 * _numel(needed, k))
    if needed:
        pending.append(recv_(buffer, axis, source=source, tag=KEYS, blocking=False))
    if sent:
        parts = [
            tensor[rows.start : rows.stop, start:stop].flatten()
            for rows, (start, stop) in sent
            for tensor in (k, v)
        ]
        pending.append(send(torch.cat(parts), axis, destination=reader, tag=KEYS, blocking=False))

    def wait() -> Blocks:
        for message in pending:
            message.wait()
        return _unpacked(buffer, needed, k)

    return wait


def _numel(parts: Sequence[tuple[Rows, Run]], k: Tensor) -> int:
    """Elements of the keys of ``parts``."""
    width = k.shape[2] * k.shape[3]
    return sum((rows.stop - rows.start) * (stop - start) * width for rows, (start, stop) in parts)


def _unpacked(message: Tensor, parts: Sequence[tuple[Rows, Run]], k: Tensor) -> Blocks:
    """The keys and values, or their gradients, in a message, as views."""
    blocks: Blocks = []
    position = 0
    for rows, (start, stop) in parts:
        shape = torch.Size((rows.stop - rows.start, stop - start, *k.shape[2:]))
        two = []
        for _ in range(2):
            two.append(message[position : position + shape.numel()].view(shape))
            position += shape.numel()
        blocks.append((rows, (start, stop), two[0], two[1]))
    return blocks


def _merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's result to the running one; see [Note: merged in float32]."""
    total = torch.logaddexp(lse, block_lse)
    kept, added = (lse - total).exp_(), (block_lse - total).exp_()
    out.mul_(kept.transpose(1, 2)[..., None]).addcmul_(
        block_out.to(out.dtype), added.transpose(1, 2)[..., None]
    )
    lse.copy_(total)
