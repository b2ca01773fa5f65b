"""A piece of the model with an explicit forward and backward."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fourfold.models import Microbatch, Piece
from fourfold.weight_gradients import WeightGradients


class Segment:
    """Runs one `Piece` forward and backward, microbatch by microbatch.

    [Note: explicit backward] The input of a segment is a detached leaf, so the autograd graph of a segment
    ends at its borders. Its backward is called with the gradient of its output and returns the gradient of
    its input: nothing runs because of a hook, and the order of everything is the program's.

    Args:
        piece: the part of the model.
        weight_gradients: where the linear layers of the model put their weight gradients.
    """

    def __init__(self, piece: Piece, weight_gradients: WeightGradients):
        self.piece = piece
        self._weight_gradients = weight_gradients
        self._live: dict[int, tuple[Tensor | None, GradientEdge | None]] = {}
        self._deferred: dict[int, list[Callable[[], None]]] = {}

    def forward(self, microbatch: int, x: Tensor | None, batch: Microbatch) -> Tensor:
        """F: compute the output and keep what the backward needs.

        Args:
            microbatch: which one; identifies what is kept.
            x: the output of the segment before, None for the first.
            batch: the microbatch's tokens, labels and positions.
        """
        leaf = None if x is None else x.detach().requires_grad_()
        with torch.enable_grad():
            y = self.piece.forward(leaf, batch)
        # The place in the graph, not the tensor: an output that is sent away takes no memory here.
        # Without it where this is the first segment and all of it is frozen.
        self._live[microbatch] = (leaf, get_gradient_edge(y) if y.requires_grad else None)
        return y.detach()

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """B: add the weight gradients and return the gradient of the input (None for the first segment)."""
        leaf, edge = self._live.pop(microbatch)
        if edge is not None:
            torch.autograd.backward(edge, gradient)
        return None if leaf is None else leaf.grad

    def input_gradient(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """I: return the gradient of the input, and keep the linear layers' weight gradients for later.

        The gradients of norms and embeddings are cheap and are added at once. See
        [Note: deferred weight gradients].
        """
        with self._weight_gradients.deferred() as queue:
            input_gradient = self.backward(microbatch, gradient)
        self._deferred[microbatch] = queue
        return input_gradient

    def weight_gradient(self, microbatch: int) -> None:
        """W: add the weight gradients that `input_gradient` kept."""
        queue = self._deferred.pop(microbatch)
        queue.reverse()  # the order stays; what an addition needed goes with it
        while queue:
            queue.pop()()

    def evaluate(self, x: Tensor | None, batch: Microbatch) -> Tensor:
        """Compute the output and keep nothing."""
        with torch.no_grad():
            return self.piece.forward(x, batch)

    @property
    def in_flight(self) -> int:
        """Of how many microbatches activations are kept: until their backward or weight gradient has run."""
        return len(self._live) + len(self._deferred)

    def reset(self) -> None:
        """Drop everything kept, after a step that failed."""
        self._live.clear()
        self._deferred.clear()
