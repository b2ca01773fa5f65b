"""The recorder: what the collectives sent, as events, and the tensors that they were done with."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fourfold.mesh import Axis
from fourfold.traffic import Event

# A plain list of the process and no context variable: on CUDA the backward runs in autograd's own threads,
# where a context variable of the caller is not set, and its collectives must be recorded as well.
_recorders: list[list[Event]] = []


@contextmanager
def record() -> Iterator[list[Event]]:
    """Yield a list that gets an event for each collective of this rank while the context is open.

    One call of a collective is one event, whatever it is made of. An axis of one rank sends nothing and
    records nothing.
    """
    events: list[Event] = []
    _recorders.append(events)
    try:
        yield events
    finally:
        # By identity: two lists of equal events are equal.
        _recorders[:] = [recorder for recorder in _recorders if recorder is not events]


def note(op: str, axis: Axis, numel: int, dtype: torch.dtype) -> None:
    """Add an event of ``numel`` elements to every active recorder."""
    if _recorders:
        event = Event(op, axis.name, numel * dtype.itemsize, dtype_name(dtype))
        for events in _recorders:
            events.append(event)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


Watcher = Callable[[Axis, Sequence[Tensor]], None]

_watchers: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` of the axis and the tensors of each operation that a backend is given meanwhile."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def given(axis: Axis, arguments: Iterable[object]) -> None:
    """Tell who watches what a backend is given for an operation."""
    for watcher in _watchers:
        watcher(axis, [argument for argument in arguments if isinstance(argument, Tensor)])
