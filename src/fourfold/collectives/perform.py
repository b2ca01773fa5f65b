"""What every collective does around its communication: note it, agree, start, wait."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.collectives import agree
from fourfold.collectives.backend import Started
from fourfold.collectives.pending import Pending, naming, waiting
from fourfold.collectives.recorder import note
from fourfold.mesh import Axis


def perform(
    op: str,
    axis: Axis,
    start: Callable[[], Started],
    *,
    message: Tensor,
    result: Tensor,
    blocking: bool,
    details: str = "",
) -> Tensor | Pending:
    """Do a collective in which all ranks of ``axis`` come with the same message shape and dtype.

    Args:
        op: its name in events and errors.
        axis: the ranks that take part, more than one.
        start: starts the communication; not called where the message is empty.
        message: has the shape and dtype of the whole message.
        result: what is returned for an empty message.
        blocking: wait for the end and return the result, else return what is under way.
        details: what else the ranks must agree on.
    """
    note(op, axis, message.numel(), message.dtype)
    if agree.active():
        agree.check(op, axis, message.device, agree.describe(message.dtype, message.shape, details))
    if message.numel() == 0:
        return finished(op, axis, result, blocking=blocking)
    return begin(op, axis, start, blocking=blocking)


def begin(op: str, axis: Axis, start: Callable[[], Started], *, blocking: bool) -> Tensor | Pending:
    """Start a collective, and wait for its end where asked to."""
    with waiting(op, axis), naming(op, axis):
        works, finish = start()
    return conclude(Pending(op, axis, works, finish), blocking=blocking)


def conclude(pending: Pending, *, blocking: bool) -> Tensor | Pending:
    """Return the result of a collective, or the collective where it need not end now."""
    return pending.wait() if blocking else pending


def finished(op: str, axis: Axis, result: Tensor, *, blocking: bool) -> Tensor | Pending:
    """Return a result that needed no communication as if it had."""
    return conclude(Pending(op, axis, (), lambda: result), blocking=blocking)


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor without gaps, the same one where it has none, and without its gradient history.

    gloo reads and writes the storage of a strided tensor as if it had no gaps, without an error.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def in_place(tensor: Tensor, start: Callable[[Tensor], Started]) -> Started:
    """Start a collective that writes into ``tensor``, by way of a packed copy where it is strided."""
    buffer = packed(tensor)
    works, finish = start(buffer)

    def finish_in_place() -> Tensor:
        finish()
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)
        return tensor

    return works, finish_in_place


def result_buffer(name: str, out: Tensor | None, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``out`` if it fits, or a new tensor of this shape."""
    if out is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            f"{name}: out is {out.dtype} {tuple(out.shape)} on {out.device}, "
            f"the result is {like.dtype} {tuple(shape)} on {like.device}"
        )
    return out


def check_rank(name: str, axis: Axis, rank: int) -> None:
    """Refuse a rank that is not on the axis."""
    if not 0 <= rank < axis.size:
        raise ValueError(f"{name} on axis {axis.name}: rank {rank} is not one of 0 to {axis.size - 1}")
