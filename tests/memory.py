"""Counts what autograd keeps, for tests of what is released."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
