"""What enters a branch gathered once more in the backward, instead of kept.

[Note: what entered] With sequence parallelism a rank has its own tokens of the stream, and gathers all of
them where it enters a branch. The column-wise projections need them again for their weight gradients. Kept,
these are (B, S, C) a branch, as without sequence parallelism. Dropped and gathered again, (B, S / tp, C) are
kept, for one more all_gather a branch in the backward (Korthikanti et al. 2022, 4.2.2).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fourfold.errors import UserError

View = tuple[Size, tuple[int, ...], int]
"""Shape, strides and offset: where a view, transposed or not, lies in what entered."""


class Entered:
    """What entered a branch once, of which the tape of the branch holds the places of its views alone.

    The first use in the backward gathers, and the last one drops. A branch that writes into its input is an
    AssertionError.

    Args:
        gather: gives what entered, of all tokens.
    """

    def __init__(self, gather: Callable[[], Tensor]):
        self._gather = gather
        self._uses = 0
        self._again: Tensor | None = None

    @contextmanager
    def not_kept(self, whole: Tensor) -> Iterator[None]:
        """Keep no view of ``whole`` for the backward inside; all else is kept."""
        place, dtype, version = whole.untyped_storage().data_ptr(), whole.dtype, whole._version

        def pack(kept: Tensor) -> Tensor | View:  # the tape holds this function, so it must not hold `whole`
            if kept.untyped_storage().data_ptr() != place or kept.dtype != dtype:
                return kept
            self._uses += 1
            return kept.shape, kept.stride(), int(kept.storage_offset())

        with saved_tensors_hooks(pack, self._unpack):
            yield
        assert whole._version == version, "a branch wrote into its input, which is to be gathered again"

    def _unpack(self, kept: Tensor | View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        whole = self._gather() if self._again is None else self._again
        self._uses -= 1
        self._again = whole if self._uses else None
        return whole.as_strided(*kept)


def stream_name(module: nn.Module) -> str:
    """The name of a branch's first argument, the stream, by which it may be passed in any order."""
    return next(iter(inspect.signature(module.forward).parameters))


def entered(
    args: tuple[Any, ...], kwargs: dict[str, Any], name: str, enter: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    """What a branch is called with once its stream, the argument ``name``, has entered; before it, and after.

    Raises UserError where it is called without one.
    """
    if args:
        whole = enter(args[0])
        return (whole, *args[1:]), kwargs, args[0], whole
    if name not in kwargs:
        others = ", ".join(kwargs) or "nothing"
        raise UserError(f"a branch got no '{name}', its first argument and the stream, but {others}")
    whole = enter(kwargs[name])
    return args, kwargs | {name: whole}, kwargs[name], whole


def gathered_again(module: nn.Module, enter: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return the forward of a branch whose first argument, of this rank's tokens, enters it.

    Args:
        module: the branch.
        enter: gives the stream of all tokens.
    """
    # No closure: a copy of the module gets a forward of its own.
    return partial(_entering, module.forward, stream_name(module), enter)


def _entering(
    forward: Callable[..., Any], name: str, enter: Callable[[Tensor], Tensor], /, *args: Any, **kwargs: Any
) -> Any:
    args, kwargs, stream, whole = entered(args, kwargs, name, enter)
    own = stream.detach()

    @torch.no_grad()
    def gather() -> Tensor:
        return enter(own)

    with Entered(gather).not_kept(whole):
        return forward(*args, **kwargs)
