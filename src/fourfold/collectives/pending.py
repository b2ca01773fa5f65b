"""A collective under way, how its failure is told, and how long this rank waited for it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from torch import Tensor

from fourfold.mesh import Axis
from fourfold.place import HERE


class CollectiveError(Exception):
    """A collective failed: the message names the op, the axis and this rank."""


class Work(Protocol):
    """What torch returns for an operation that runs in the background."""

    def wait(self) -> bool:
        """Wait until the operation is done; on CUDA, let the current stream wait."""

    def is_completed(self) -> bool:
        """Whether the operation is done."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which this rank's thread did nothing but start a collective, or wait for its end.

    Times are of ``time.perf_counter``, in seconds.

    Attributes:
        op: the collective.
        axis: the name of the mesh axis.
        began: when the rank turned to it.
        ended: when the rank went on.
        behind_seconds: how long the collective had been under way before, while the rank did other things: it
            may have ended in that time.
    """

    op: str
    axis: str
    began: float
    ended: float
    behind_seconds: float = 0.0


# As the recorder's lists: of the process, since a backward may run in autograd's threads.
_logs: list[list[Wait]] = []


@contextmanager
def log_waits() -> Iterator[list[Wait]]:
    """Yield a list that gets every `Wait` of this rank while the context is open, in order.

    On an accelerator its streams wait for collectives, not the thread: the list says little there.
    """
    log: list[Wait] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]


@contextmanager
def waiting(op: str, axis: Axis, *, since: float | None = None) -> Iterator[None]:
    """Log the time inside, with what waits inside of that; and say meanwhile that this rank is in it.

    Args:
        op: the collective.
        axis: its ranks; of one rank nothing is logged.
        since: when it got under way.
    """
    if axis.size == 1:
        yield
        return
    logs = tuple(_logs)
    _logs.clear()
    HERE.wait_in(op, axis.name)
    began = perf_counter()
    try:
        yield
    finally:
        HERE.go_on()
        _logs[:] = logs
        wait = Wait(op, axis.name, began, perf_counter(), 0.0 if since is None else began - since)
        for log in logs:
            log.append(wait)


@contextmanager
def naming(op: str, axis: Axis) -> Iterator[None]:
    """Turn an error of torch.distributed into one that says which collective failed and where."""
    try:
        yield
    except RuntimeError as error:
        rank = axis.ranks[axis.rank]
        raise CollectiveError(f"{op} on axis {axis.name} failed on rank {rank}: {error}") from error


class Pending:
    """A collective under way. ``wait`` ends it and returns the result, the only way to get at it.

    Until then the tensors that were handed in belong to the collective: do not read, write or reuse them.
    """

    def __init__(self, op: str, axis: Axis, works: Sequence[Work], finish: Callable[[], Tensor]):
        self._op = op
        self._axis = axis
        self._works: Sequence[Work] = works
        # It holds the tensors, so they live until the end.
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None
        self._started = perf_counter()

    def is_done(self) -> bool:
        """Whether the communication is known to have ended, so that ``wait`` would return at once.

        gloo tells it of collectives; of sends, receives and what is made of them only ``wait`` does.
        """
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        """Wait for the end and return the result. On CUDA only the current stream waits, not the host."""
        if self._finish is not None:
            with waiting(self._op, self._axis, since=self._started):
                with naming(self._op, self._axis):
                    for work in self._works:
                        work.wait()
                self._result = self._finish()
            self._works, self._finish = (), None
        assert self._result is not None
        return self._result
