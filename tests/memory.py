"""Counts what autograd keeps, and what storages live, for tests of what is released."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kept:
    """Bytes of the tensors saved for a backward: now, and at most so far."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0


class _Saved:
    """One saved tensor; it lives as long as the graph that saved it."""

    def __init__(self, tensor: Tensor, kept: Kept):
        self.tensor = tensor.detach()  # an output that is saved would hold the graph that holds it
        self.bytes = tensor.numel() * tensor.element_size()
        self.kept = kept
        kept.now_bytes += self.bytes
        kept.peak_bytes = max(kept.peak_bytes, kept.now_bytes)

    def __del__(self) -> None:
        self.kept.now_bytes -= self.bytes


@contextmanager
def counting_kept_bytes() -> Iterator[Kept]:
    """Count the tensors that forwards save for their backward while the context is open.

    Parameters count as well, once for every use: the count is an upper bound, the same for equal work.
    """
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: _Saved(tensor, kept), lambda saved: saved.tensor
    ):
        yield kept


class LiveBytes(TorchDispatchMode):
    """Counts the storages that were made while it is active and still live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the storages of what it returns."""
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given:  # else it was written to
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def now_bytes(self) -> int:
        """Of all storages that live now; those of one element are left out."""
        self._made = {key: found for key, found in self._made.items() if not found[0].expired()}
        return sum(size for _, size in self._made.values() if size > 8)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tree_leaves(tree) if isinstance(tensor, Tensor)]
