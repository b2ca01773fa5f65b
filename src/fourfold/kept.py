"""Results that a forward keeps for when it runs again: selective recomputation.

[Note: kept by name] What is dear to compute is computed through `dear`, under a name. A forward that keeps
stores the results of the names that it is told to; when it runs again, the same calls come in the same order
and get them back, and nothing is computed or communicated. All that stands between them is computed again,
so the tape of the second run is the same as without. A result that this tape does not need, such as what a
layer adds to the stream last, is neither kept nor computed again: not-a-number stands in its place. That is
so of our own layers only. A hook of the user may read the result, and not-a-number would not show: relu
makes a mask of zeros of it. Where foreign code runs in a layer, all of these are computed again (`segment`).

Calls of `dear` stand inside an ``autograd.Function`` or below autograd, where results have no graph. The
kernels of ``scaled_dot_product_attention`` are found by a dispatch mode. What draws random numbers is never
kept: leaving it out would change what is drawn next.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import nan
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

ATTENTION, SUM, GATHER = "attention", "sum", "gather"
"""Names beside those of linear layers."""

# Plain state of the process, as in `collectives.recorder`: a forward runs in one thread.
_open: list["KeptResults"] = []


def dear(name: str, compute: Callable[[], T]) -> T:
    """Return ``compute()``, or what an earlier run of the same forward kept of it.

    Args:
        name: by which it is kept.
        compute: returns a tensor or a tuple, without a graph.
    """
    return _open[-1].result(name, compute) if _open else compute()


class KeptResults:
    """The results of one forward.

    Args:
        names: of what is kept.
        unread: names of what the second run does not need.
    """

    def __init__(self, names: frozenset[str], unread: frozenset[str] = frozenset()):
        self._names = names | unread
        self._unread = unread
        self._results: deque[tuple[str, Any, tuple[int, ...]]] = deque()
        self._is_taking = False
        self._is_inside = False

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep results of the forward inside."""
        with self._opened():
            yield

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Give the results back to the same forward inside, each once."""
        self._is_taking = True
        with self._opened():
            yield
        assert not self._results, "the forward that ran again left out some calls"

    @contextmanager
    def _opened(self) -> Iterator[None]:
        _open.append(self)
        try:
            with _AttentionKernels():
                yield
        finally:
            _open.pop()

    def result(self, name: str, compute: Callable[[], T]) -> T:
        """What `dear` returns."""
        if name not in self._names or self._is_inside:
            return compute()
        if self._is_taking:
            found, result, versions = self._results.popleft()
            assert found == name, f"the forward that ran again computes {name} where {found} was"
            if _versions(result) != versions:
                raise RuntimeError(f"a kept result of '{name}' has been written to: keep something else")
            return cast(T, result)
        self._is_inside = True  # what it is made of is not kept as well
        try:
            result = compute()
        finally:
            self._is_inside = False
        # A tensor of its own: autograd gives the one that it returns a graph.
        kept: Any = tuple(map(_detached, result)) if isinstance(result, tuple) else _detached(result)
        if name in self._unread:
            kept = kept.new_full((), nan).expand_as(kept)
        self._results.append((name, kept, _versions(kept)))
        return result


class _AttentionKernels(TorchDispatchMode):
    """Runs the kernels of attention through `dear`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        compute = partial(func, *args, **(kwargs or {}))
        if func._schema.name not in _KERNELS or _dropout(func, args, kwargs or {}):
            return compute()
        return dear(ATTENTION, compute)


_KERNELS = frozenset(
    {
        "fourfold::context_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
"""What gives attention's output with the statistics that its backward needs."""


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The probability with which a kernel of attention drops weights."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return float(given.get("dropout_p", 0.0))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _versions(result: Any) -> tuple[int, ...]:
    """How often the tensors of a result have been written to."""
    parts = result if isinstance(result, tuple) else (result,)
    return tuple(part._version for part in parts if isinstance(part, Tensor))
