"""A collective under way, and how its failure is told."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from fourfold.mesh import Axis


class CollectiveError(Exception):
    """A collective failed: the message names the op, the axis and this rank."""


class Work(Protocol):
    """What torch returns for an operation that runs in the background."""

    def wait(self) -> bool:
        """Wait until the operation is done; on CUDA, let the current stream wait."""

    def is_completed(self) -> bool:
        """Whether the operation is done."""


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

    def is_done(self) -> bool:
        """Whether the communication is known to have ended, so that ``wait`` would return at once.

        gloo tells it of collectives; of sends, receives and what is made of them only ``wait`` does.
        """
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        """Wait for the end and return the result. On CUDA only the current stream waits, not the host."""
        if self._finish is not None:
            with naming(self._op, self._axis):
                for work in self._works:
                    work.wait()
            self._result = self._finish()
            self._works, self._finish = (), None
        assert self._result is not None
        return self._result
