"""How each collective is done: the fastest way that the backend has.

Tensors on CUDA use NCCL's own operations. Tensors on CPU use gloo, where several of its own operations are
slower than the same thing made of others. Median time of a call in microseconds, one thread a rank, two
cores, the ways measured in turns (gloo's own | all_to_all and a local sum or copy | sends and receives):

| op | ranks | 4 KiB | 128 KiB | 4 MiB | 32 MiB |
|---|---|---|---|---|---|
| all_reduce | 2 | 820, 810, 3090 | 1730, 1110, 1170 | 6560, 62500, 10400 | 56100, -, - |
| all_reduce | 4 | 8480, 4600, 5460 | 8140, 4360, 4690 | 19700, 170000, 44800 | 166000, -, - |
| all_gather | 2 | 730, 810, 2940 | 930, 1010, 1330 | 7210, 9290, 4660 | 241000, 174000, 51100 |
| all_gather | 4 | 3770, 2730, 5010 | 6170, 3360, 3800 | 14500, 12900, 8200 | 257000, 236000, 75700 |
| reduce_scatter | 2 | -, 520, 4270 | -, 710, 2730 | -, 5480, 6190 | -, 61300, 70200 |
| reduce_scatter | 4 | -, 2470, 4140 | -, 2680, 4450 | -, 10600, 8560 | -, 109000, 102000 |
| all_to_all | 4 | 3400, -, 4420 | 2490, -, 2870 | 7370, -, 8050 | 76300, -, 78500 |
| broadcast | 4 | 1200, -, 2450 | 1250, -, 1390 | 9810, -, 9890 | 72400, -, 70200 |
| reduce | 4 | 4680, -, 1920 | 4360, -, 1660 | 12200, -, 9890 | 123000, -, 223000 |

gloo's own reduce_scatter is an all_reduce inside and sends twice the bytes; it is never used.

Every function here takes packed tensors, starts the operation and returns what to wait for and what to do
then. All of them are of one stage, so that what is sent does not depend on when a rank waits.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.collectives.pending import Work
from fourfold.collectives.recorder import given
from fourfold.mesh import Axis, StandIn, backend_of

Started = tuple[list[Work], Callable[[], Tensor]]

# Below these sizes of a message gloo's all_to_all wins with more than 2 ranks: see the table. For all_reduce
# it sends every tensor to everyone, which pays only for the short ones: a loss, a norm, a flag. With 2 ranks
# gloo's own all_gather is as fast there, for less work on this side.
SMALL_ALL_REDUCE_BYTES = 64 * 1024
SMALL_ALL_GATHER_BYTES = 512 * 1024
# On 2 ranks its all_to_all is the faster exchange up to this size of what both send together: of 64, 256 and
# 512 KiB each way in 0.4, 0.9 and 1.1 ms, sends and receives in 1.3, 2.6 and 2.9. Beyond, both take as long.
SMALL_EXCHANGE_BYTES = 2 * 1024 * 1024
# Up to this size an all_reduce that a rank waits for has fewer stages than gloo's own, for a buffer or two.
# Of 128, 512 and 1024 KiB on 2 ranks in 0.24, 0.38 and 0.90 ms, gloo's in 0.36, 0.53 and 0.98; of 256 and
# 1024 KiB on 4 ranks in 3.6 and 4.1, gloo's in 5.3 and 6.9; of 2 MiB gloo's is the faster on both. (On other,
# faster cores than those of the table.)
BLOCKING_ALL_REDUCE_BYTES = 1024 * 1024
# Above this size of a tensor gloo's own reduce wins, since it spreads the sums over the ranks.
LARGE_REDUCE_BYTES = 4 * 1024 * 1024


class Part(IntEnum):
    """What a message of `send` and `receive` is: the tensor, or in debug mode what is said about it."""

    TENSOR = 1
    ANNOUNCEMENT = 2
    ANSWER = 3


# gloo matches messages of a pair by tag, and those of one tag in order. Those of collectives made of sends
# and receives have a tag of their own, so that they never meet a message of send and recv.
EXCHANGE_TAG = 0


def _wire_tag(tag: int, part: Part) -> int:
    return tag * len(Part) + part


# PyTorch 2.13 renamed these two and warns at the old names; 2.11 has only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def all_reduce(tensor: Tensor, axis: Axis, op: str, *, blocking: bool) -> Started:
    """Combine ``tensor`` of all ranks, in place; where the rank waits for it, time is worth a buffer."""
    if blocking and tensor.nbytes <= BLOCKING_ALL_REDUCE_BYTES and not _has_nccl(tensor, axis):
        if axis.size == 2:
            return _all_reduce_of_two(tensor, axis, op)
        if tensor.nbytes > SMALL_ALL_REDUCE_BYTES:
            return _all_reduce_by_parts(tensor, axis, op)
    if _has_nccl(tensor, axis) or axis.size == 2 or tensor.nbytes > SMALL_ALL_REDUCE_BYTES:
        return _call(axis, dist.all_reduce, tensor, _REDUCE_OPS[op], async_op=True), lambda: tensor
    copies = tensor.view(1, -1).repeat(axis.size, 1)
    received = torch.empty_like(copies)
    works = _call(axis, dist.all_to_all_single, received, copies, async_op=True)
    flat = tensor.view(-1)

    def finish() -> Tensor:
        _combine_(received.unbind(), op, out=flat)
        return tensor

    return works, finish


def _all_reduce_of_two(tensor: Tensor, axis: Axis, op: str) -> Started:
    """Exchange and combine: as many bytes as gloo's own, in one stage where that has two."""
    other = 1 - axis.rank
    received = torch.empty_like(tensor)
    works = exchange({other: tensor}, {other: received}, axis)

    def finish() -> Tensor:
        _combine_((received, tensor) if axis.rank else (tensor, received), op, out=tensor)
        return tensor

    return works, finish


def _all_reduce_by_parts(tensor: Tensor, axis: Axis, op: str) -> Started:
    """Each rank combines its part, and all get the parts: gloo's own bytes, in 2 stages in place of 2(N-1).

    The second stage is in ``finish``: only for a rank that waits at once.
    """
    flat = tensor.view(-1)
    counts = [part.numel() for part in flat.tensor_split(axis.size)]
    part = flat.new_empty(counts[axis.rank])
    works, combine = reduce_scatter(flat, axis, part, counts, op)

    def finish() -> Tensor:
        for work in all_gather(combine(), axis, flat, counts)[0]:
            work.wait()
        return tensor

    return works, finish


def reduce_scatter(
    tensor: Tensor, axis: Axis, out: Tensor, counts: Sequence[int] | None, op: str = "sum"
) -> Started:
    """Combine ``tensor`` of all ranks and leave this rank's rows in ``out``; ``counts`` are rows by rank."""
    if counts is None and _has_nccl(tensor, axis):
        return _call(axis, _reduce_scatter_single, out, tensor, _REDUCE_OPS[op], async_op=True), lambda: out
    received = tensor.new_empty((axis.size, *out.shape))
    send = receive = None
    if counts is not None:
        row = tensor[:1].numel()
        send, receive = [count * row for count in counts], [out.numel()] * axis.size
    works = _call(
        axis, dist.all_to_all_single, received.view(-1), tensor.view(-1), receive, send, async_op=True
    )

    def finish() -> Tensor:
        _combine_(received.unbind(), op, out=out)
        return out

    return works, finish


def reduce(tensor: Tensor, axis: Axis, destination: int) -> Started:
    """Sum ``tensor`` of all ranks in place on ``destination``; the others keep theirs."""
    here = axis.rank == destination
    if _has_nccl(tensor, axis) or tensor.nbytes > LARGE_REDUCE_BYTES:
        # gloo's reduce leaves partial sums in the tensors of the other ranks.
        buffer = tensor if here or _has_nccl(tensor, axis) else tensor.clone()
        return _call(axis, dist.reduce, buffer, group_dst=destination, async_op=True), lambda: tensor
    if not here:
        return exchange({destination: tensor}, {}, axis), lambda: tensor
    pieces = [tensor if rank == destination else torch.empty_like(tensor) for rank in range(axis.size)]
    others = {rank: piece for rank, piece in enumerate(pieces) if rank != destination}

    def finish() -> Tensor:
        _combine_(pieces, "sum", out=tensor)
        return tensor

    return exchange({}, others, axis), finish


def all_gather(tensor: Tensor, axis: Axis, out: Tensor, counts: Sequence[int] | None) -> Started:
    """Put the tensors of all ranks one after another into ``out``; ``counts`` are rows by rank.

    ``tensor`` may be this rank's part of ``out``.
    """
    mine, gathered = _as_bytes(tensor), _as_bytes(out)
    small = out.nbytes <= SMALL_ALL_GATHER_BYTES
    if counts is None and (_has_nccl(tensor, axis) or (small and axis.size == 2)):
        return _call(axis, _all_gather_single, gathered, mine, async_op=True), lambda: out
    row = out.nbytes // sum(counts) if counts is not None else 0
    sizes = [count * row for count in counts] if counts is not None else [mine.numel()] * axis.size
    if small and not _has_nccl(tensor, axis):
        copies = mine.repeat(axis.size)
        received = [mine.numel()] * axis.size
        works = _call(axis, dist.all_to_all_single, gathered, copies, sizes, received, async_op=True)
        return works, lambda: out
    places = gathered.split(sizes)
    if places[axis.rank].data_ptr() != mine.data_ptr():
        places[axis.rank].copy_(mine)
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    return exchange(dict.fromkeys(others, mine), {rank: places[rank] for rank in others}, axis), lambda: out


def all_to_all(
    tensor: Tensor, axis: Axis, out: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Started:
    """Deal the rows of ``tensor`` to the ranks; ``out`` gets what they deal to this one."""
    row = tensor[:1].nbytes or out[:1].nbytes
    works = _call(
        axis,
        dist.all_to_all_single,
        _as_bytes(out),
        _as_bytes(tensor),
        [count * row for count in receive_counts],
        [count * row for count in send_counts],
        async_op=True,
    )
    return works, lambda: out


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Started:
    """Fill ``tensor`` of all ranks with that of ``source``."""
    works = _call(axis, dist.broadcast, _as_bytes(tensor), group_src=source, async_op=True)
    return works, lambda: tensor


def send(tensor: Tensor, axis: Axis, destination: int, tag: int, part: Part = Part.TENSOR) -> Started:
    """Send ``tensor`` to one rank."""
    works = _call(axis, dist.isend, _as_bytes(tensor), group_dst=destination, tag=_wire_tag(tag, part))
    return works, lambda: tensor


def receive(tensor: Tensor, axis: Axis, source: int, tag: int, part: Part = Part.TENSOR) -> Started:
    """Receive from one rank into ``tensor``."""
    works = _call(axis, dist.irecv, _as_bytes(tensor), group_src=source, tag=_wire_tag(tag, part))
    return works, lambda: tensor


def exchange(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], axis: Axis) -> list[Work]:
    """Send a tensor to each of some ranks and receive one from each of some, all at once.

    In one group of NCCL's: sends and receives that were started one by one would run one after another
    there, and ranks that all send first, or all receive first, would wait for each other for ever.
    """
    given(axis, (*sent.values(), *received.values()))
    if isinstance(axis.group, StandIn):
        return []
    nbytes = sum(tensor.nbytes for tensor in (*sent.values(), *received.values()))
    if axis.size == 2 and backend_of(axis) != "nccl" and nbytes <= SMALL_EXCHANGE_BYTES:
        return _exchange_of_two(sent, received, axis) if nbytes else []
    operations = []
    for step in range(1, axis.size):  # everyone starts with another neighbour
        after, before = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        if before in received and received[before].numel():
            operations.append(_point_to_point(dist.irecv, received[before], axis, before))
        if after in sent and sent[after].numel():
            operations.append(_point_to_point(dist.isend, sent[after], axis, after))
    return _present(dist.batch_isend_irecv(operations)) if operations else []


def _exchange_of_two(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], axis: Axis) -> list[Work]:
    """Start an exchange on an axis of 2 ranks as a collective: each knows what the other sends."""
    other = 1 - axis.rank
    nothing = torch.empty(0, dtype=torch.uint8)
    mine, theirs = (
        _as_bytes(messages[other]) if other in messages else nothing for messages in (sent, received)
    )
    receive, send = ([0, tensor.numel()] if other else [tensor.numel(), 0] for tensor in (theirs, mine))
    work = dist.all_to_all_single(theirs, mine, receive, send, group=axis.group, async_op=True)
    return _present([work])


def barrier(axis: Axis) -> Started:
    """Wait until every rank has come here."""
    place = device(axis)
    ids = [place.index] if place.type == "cuda" else None
    return _call(axis, dist.barrier, async_op=True, device_ids=ids), lambda: torch.empty(0)


def device(axis: Axis) -> torch.device:
    """Return where tensors of a message that carries no data must lie."""
    if isinstance(axis.group, StandIn):
        return torch.device("meta")
    if backend_of(axis) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _has_nccl(tensor: Tensor, axis: Axis) -> bool:
    return (tensor.is_cuda or tensor.is_meta) and backend_of(axis) == "nccl"


def _call(axis: Axis, operation: Callable[..., Work | None], *args: Any, **options: Any) -> list[Work]:
    """Start an operation of torch's on the axis, and return what to wait for: nothing on a stand-in."""
    given(axis, args)
    if isinstance(axis.group, StandIn):
        return []
    return _present([operation(*args, group=axis.group, **options)])


def _point_to_point(operation: Callable, tensor: Tensor, axis: Axis, peer: int) -> dist.P2POp:
    assert not isinstance(axis.group, StandIn)
    return dist.P2POp(operation, tensor, group=axis.group, tag=EXCHANGE_TAG, group_peer=peer)


def _present(works: Sequence[Work | None]) -> list[Work]:
    """Return the works; torch's types allow none where this rank is not in the group, and it is."""
    return [work for work in works if work is not None]


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a packed tensor as bytes: what is only moved needs no type, and gloo knows few of them.

    One element is packed whatever its stride says, and only a stride of 1 can be viewed so.
    """
    return tensor.view(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _combine_(pieces: Sequence[Tensor], op: str, *, out: Tensor) -> None:
    """Combine the pieces in the order of ranks into ``out``, which may be one of them.

    Sums of 16-bit floats are made in float32 and rounded once. The order is the same on every rank, so all
    get the same bits. All pieces but ``out`` may be overwritten.
    """
    total, *rest = pieces
    combine = _COMBINE[op]
    if op == "sum" and total.dtype in (torch.float16, torch.bfloat16):
        total = total.float()
        for piece in rest:
            total.add_(piece)
        out.copy_(total)
        return
    for piece in rest[:-1]:
        combine(total, piece, out=total)
    combine(total, rest[-1], out=out)
