"""Collectives that move data as it is: gathered, dealt out, broadcast, sent from one rank to another."""

from collections.abc import Mapping, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from fourfold.collectives import agree, backend
from fourfold.collectives.backend import Started
from fourfold.collectives.pending import Pending, naming
from fourfold.collectives.perform import (
    begin,
    check_rank,
    finished,
    in_place,
    packed,
    perform,
    result_buffer,
)
from fourfold.collectives.recorder import note
from fourfold.mesh import Axis


@overload
def all_gather(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
    blocking: Literal[True] = True,
) -> Tensor: ...
@overload
def all_gather(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
    blocking: Literal[False],
) -> Pending: ...
def all_gather(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
    blocking: bool = True,
) -> Tensor | Pending:
    """Return the tensors of all ranks one after another along dim 0, in rank order.

    They have the same shape, or ``counts[rank]`` rows each. A tensor without dims gives one element a rank.
    ``out`` takes the result; ``tensor`` may be this rank's rows of it, which then stay where they are.
    """
    rest = tensor.shape[1:]
    rows = tensor.shape[0] if tensor.dim() else 1
    if counts is not None and (len(counts) != axis.size or min(counts) < 0 or counts[axis.rank] != rows):
        raise ValueError(
            f"all_gather on axis {axis.name}: counts {list(counts)} do not fit {axis.size} ranks with "
            f"{rows} rows on rank {axis.rank}"
        )
    total = rows * axis.size if counts is None else sum(counts)
    result = result_buffer("all_gather", out, tensor, (total, *rest))
    if axis.size == 1:
        if result.data_ptr() != tensor.data_ptr():
            result.detach().copy_(tensor)
        return finished("all_gather", axis, result, blocking=blocking)
    source = packed(tensor)
    return perform(
        "all_gather",
        axis,
        lambda: in_place(result, lambda buffer: backend.all_gather(source, axis, buffer, counts)),
        message=result,
        result=result,
        blocking=blocking,
        details="" if counts is None else f"counts={list(counts)}",
    )


@overload
def all_to_all(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    blocking: Literal[True] = True,
) -> Tensor: ...
@overload
def all_to_all(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    blocking: Literal[False],
) -> Pending: ...
def all_to_all(
    tensor: Tensor,
    axis: Axis,
    *,
    out: Tensor | None = None,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    blocking: bool = True,
) -> Tensor | Pending:
    """Deal the rows of ``tensor`` (dim 0) to the ranks in order and return what the ranks dealt to this one.

    Equal parts, or ``send_counts[j]`` rows to rank j and ``receive_counts[j]`` from it. Both counts are
    given or none. ``out`` takes the result and must not overlap ``tensor``.
    """
    sent, received = _dealt_rows(tensor, axis, send_counts, receive_counts)
    result = result_buffer("all_to_all", out, tensor, (sum(received), *tensor.shape[1:]))
    if axis.size == 1:
        result.detach().copy_(tensor)
        return finished("all_to_all", axis, result, blocking=blocking)
    note("all_to_all", axis, tensor.numel(), tensor.dtype)
    if agree.active():
        # Ranks may hold different numbers of rows. That these fit is a question of its own.
        row = agree.describe(tensor.dtype, tensor.shape[1:], "a row")
        agree.check("all_to_all", axis, tensor.device, row)
        agree.check_counts(axis, tensor.device, sent, received)
    source = packed(tensor)
    return begin(
        "all_to_all",
        axis,
        lambda: in_place(result, lambda buffer: backend.all_to_all(source, axis, buffer, sent, received)),
        blocking=blocking,
    )


@overload
def broadcast_(tensor: Tensor, axis: Axis, *, source: int, blocking: Literal[True] = True) -> Tensor: ...
@overload
def broadcast_(tensor: Tensor, axis: Axis, *, source: int, blocking: Literal[False]) -> Pending: ...
def broadcast_(tensor: Tensor, axis: Axis, *, source: int, blocking: bool = True) -> Tensor | Pending:
    """Fill ``tensor`` on every rank with that of the rank ``source`` of the axis."""
    check_rank("broadcast", axis, source)
    if axis.size == 1:
        return finished("broadcast", axis, tensor, blocking=blocking)
    return perform(
        "broadcast",
        axis,
        lambda: in_place(tensor, lambda buffer: backend.broadcast(buffer, axis, source)),
        message=tensor,
        result=tensor,
        blocking=blocking,
        details=f"source={source}",
    )


@overload
def send(
    tensor: Tensor, axis: Axis, *, destination: int, tag: int = 0, blocking: Literal[True] = True
) -> Tensor: ...
@overload
def send(
    tensor: Tensor, axis: Axis, *, destination: int, tag: int = 0, blocking: Literal[False]
) -> Pending: ...
def send(
    tensor: Tensor, axis: Axis, *, destination: int, tag: int = 0, blocking: bool = True
) -> Tensor | Pending:
    """Send ``tensor`` to the rank ``destination`` of the axis, which calls ``recv_``; return it.

    Messages of one tag from one rank to another arrive in the order in which they were sent. On NCCL, which
    knows no tags, all of an axis do. Do not count on a blocking send to end before the other side receives.
    """
    _check_peer("send", axis, destination)
    note("send", axis, tensor.numel(), tensor.dtype)

    def start() -> Started:
        works, _ = backend.send(packed(tensor), axis, destination, tag)
        return works, lambda: tensor

    def start_announced() -> Started:
        description = agree.describe(tensor.dtype, tensor.shape)
        hear_answer = agree.announce(axis, destination, tensor.device, description, tag)
        works, _ = start()

        def finish() -> Tensor:
            hear_answer()  # first: a peer that refuses never takes the message
            for work in works:
                work.wait()
            return tensor

        return [], finish

    return begin("send", axis, start_announced if agree.active() else start, blocking=blocking)


@overload
def recv_(
    tensor: Tensor, axis: Axis, *, source: int, tag: int = 0, blocking: Literal[True] = True
) -> Tensor: ...
@overload
def recv_(tensor: Tensor, axis: Axis, *, source: int, tag: int = 0, blocking: Literal[False]) -> Pending: ...
def recv_(
    tensor: Tensor, axis: Axis, *, source: int, tag: int = 0, blocking: bool = True
) -> Tensor | Pending:
    """Fill ``tensor`` with the next message of this tag from the rank ``source`` of the axis.

    It must have the shape and dtype of what is sent; only debug mode finds out where it has not. There the
    message is taken when its end is awaited.
    """
    _check_peer("recv", axis, source)
    note("recv", axis, tensor.numel(), tensor.dtype)

    def start() -> Started:
        return in_place(tensor, lambda buffer: backend.receive(buffer, axis, source, tag))

    def start_late() -> Started:
        def receive() -> Tensor:
            agree.answer(axis, source, tensor.device, agree.describe(tensor.dtype, tensor.shape), tag)
            works, finish = start()
            for work in works:
                work.wait()
            return finish()

        return [], receive

    return begin("recv", axis, start_late if agree.active() else start, blocking=blocking)


def exchange_(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], axis: Axis) -> Pending:
    """Start to send a tensor to each of some ranks while filling one from each of some, all at once.

    Both are by rank of the axis. Every message is an event of its own, as one of ``send`` or ``recv_`` is,
    but on NCCL all go as one group, so that ranks may exchange in a circle. What one rank sends to another is
    what that one receives in its next exchange with it: all ranks come to their exchanges in one order, and
    those with nothing to send or receive may leave one out. ``wait`` returns no result of its own.
    """
    for op, messages in (("recv", receives), ("send", sends)):
        for peer, tensor in messages.items():
            _check_peer(op, axis, peer)
            note(op, axis, tensor.numel(), tensor.dtype)
    if agree.active():
        agree.check_messages(axis, _described(sends), _described(receives))

    outgoing = {peer: packed(tensor) for peer, tensor in sends.items()}
    buffers = {peer: packed(tensor) for peer, tensor in receives.items()}

    def finish() -> Tensor:
        outgoing.clear()  # held until here
        for peer, tensor in receives.items():
            if buffers[peer].data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(buffers[peer])
        return torch.empty(0)

    with naming("exchange", axis):
        works = backend.exchange(outgoing, buffers, axis)
    return Pending("exchange", axis, works, finish)


def barrier(axis: Axis) -> None:
    """Return once every rank of the axis has come here."""
    if axis.size > 1:
        note("barrier", axis, 0, torch.uint8)
        if agree.active():
            agree.check("barrier", axis, backend.device(axis), "")
        begin("barrier", axis, lambda: backend.barrier(axis), blocking=True)


def _dealt_rows(
    tensor: Tensor, axis: Axis, send_counts: Sequence[int] | None, receive_counts: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return how many rows go to and come from each rank, and refuse counts that do not add up."""
    where = f"all_to_all on axis {axis.name}"
    if not tensor.dim():
        raise ValueError(f"{where}: a tensor without dims has no rows")
    rows = tensor.shape[0]
    if send_counts is None and receive_counts is None:
        if rows % axis.size:
            raise ValueError(f"{where}: {axis.size} ranks do not divide dim 0 of {tuple(tensor.shape)}")
        return [rows // axis.size] * axis.size, [rows // axis.size] * axis.size
    if send_counts is None or receive_counts is None:
        raise ValueError(f"{where}: give both send_counts and receive_counts, or none")
    sent, received = list(send_counts), list(receive_counts)
    if (
        not len(sent) == len(received) == axis.size
        or min(*sent, *received) < 0
        or sum(sent) != rows
        or sent[axis.rank] != received[axis.rank]
    ):
        raise ValueError(
            f"{where}: send_counts {sent} and receive_counts {received} do not fit {axis.size} ranks with "
            f"{rows} rows on rank {axis.rank}"
        )
    return sent, received


def _check_peer(name: str, axis: Axis, peer: int) -> None:
    check_rank(name, axis, peer)
    if peer == axis.rank:
        raise ValueError(f"{name} on axis {axis.name}: rank {peer} cannot be its own peer; copy the tensor")


def _described(messages: Mapping[int, Tensor]) -> dict[int, str]:
    return {peer: agree.describe(tensor.dtype, tensor.shape) for peer, tensor in messages.items()}
