"""Weight gradients of linear and embedding layers: added in place into ``weight.grad``, at once or later.

[Note: deferred weight gradients] The backward of a linear layer is two products: the input gradient, which
the layer before waits for, and the weight gradient, which nobody waits for before the reduction. Zero-bubble
schedules (Qi et al. 2023) run them at different times. `WeightGradients.deferred` collects the second
products instead of running them, and `add_deferred_` runs them.

An embedding's gradient is one addition of rows into the float32 (or higher) buffer. It is always at once, and
never summed in a lower precision: frequent tokens would stop to count.

The object that decides is passed to each layer when `WeightGradients.attach_` replaces the layer's forward,
and rides along in the autograd graph. It is no global and no thread-local: two models do not mix, and the
autograd engine's device threads see it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.kept import dear
from fourfold.models.swiglu import product_again, swiglu_node


class WeightGradients:
    """Takes over the weight gradients of a model's linear and embedding layers.

    Weights must have a ``.grad`` of their own shape from the start; it may be of a higher precision than the
    weight. A weight that one linear layer alone uses is *written* by its first product of a step and added to
    by later ones, so its gradient need not be zeroed before a step. All others are added to.
    """

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] | None = None
        self._written_first: set[Tensor] = set()
        self._untouched: set[Tensor] = set()

    def attach_(self, model: nn.Module) -> None:
        """Replace the forward of every `nn.Linear` and `nn.Embedding`; parameters and names stay."""
        uses: dict[Tensor, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                uses.setdefault(parameter, []).append(module)
        for weight, modules in uses.items():
            if weight.ndim == 2 and len(modules) == 1 and type(modules[0]) is nn.Linear:
                self._written_first.add(weight)
        for name, module in model.named_modules():
            if type(module) is nn.Linear:
                module.forward = _linear(module, name.rpartition(".")[2], self)  # type: ignore[method-assign, assignment]
            elif type(module) is nn.Embedding:
                module.forward = _embedding(module, self)  # type: ignore[method-assign, assignment]

    def begin_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start the gradients of ``parameters`` anew, whatever is in them."""
        self._untouched.update(self._written_first.intersection(parameters))
        zeroed = [_gradient_of(parameter) for parameter in parameters if parameter not in self._written_first]
        if zeroed:
            torch._foreach_zero_(zeroed)

    def finish_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the gradients of ``parameters`` whole before a reduction: zero where nothing was added."""
        for parameter in parameters:
            if parameter in self._untouched:
                self._untouched.discard(parameter)
                _gradient_of(parameter).zero_()

    @contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Collect weight gradients instead of computing them, for `add_deferred_` to make up for it."""
        assert self._queue is None, "weight gradients are being deferred already"
        queue: list[Callable[[], None]] = []
        self._queue = queue
        try:
            yield queue
        finally:
            self._queue = None

    @staticmethod
    def add_deferred_(queue: list[Callable[[], None]]) -> None:
        """Compute what `deferred` collected, in its order, and release what each addition needed after it."""
        queue.reverse()
        with torch.no_grad():
            while queue:
                queue.pop()()

    def add(self, weight: Tensor, bias: Tensor | None, x_NI: Tensor, gradient_NO: Tensor) -> None:
        """Add the gradients of ``weight`` and ``bias``, given the layer's input and its output's gradient.

        Args:
            weight: (out, in).
            bias: (out,) or None.
            x_NI: (rows, in).
            gradient_NO: (rows, out).
        """
        if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
            return
        if self._queue is None:  # inside a backward, where autograd records nothing
            self._add(weight, bias, x_NI, gradient_NO)
        else:
            # What was saved would hold the graph behind it, and the gradient at the graph's end.
            self._queue.append(partial(self._add, weight, bias, x_NI.detach(), gradient_NO.detach()))

    def add_rows(self, weight: Tensor, ids: Tensor, gradient: Tensor) -> None:
        """Add the gradient of an embedding.

        Args:
            weight: (vocabulary, channels).
            ids: (...), of the rows that were looked up.
            gradient: (..., channels).
        """
        if not weight.requires_grad:
            return
        total = _gradient_of(weight)
        total.index_add_(0, ids.flatten(), gradient.flatten(0, -2).to(total.dtype))

    def _add(self, weight: Tensor, bias: Tensor | None, x_NI: Tensor, gradient_NO: Tensor) -> None:
        if weight.requires_grad:
            self._add_weight(weight, x_NI, gradient_NO)
        if bias is not None and bias.requires_grad:
            total = _gradient_of(bias)
            total.add_(gradient_NO.sum(0, dtype=total.dtype))

    def _add_weight(self, weight: Tensor, x_NI: Tensor, gradient_NO: Tensor) -> None:
        total = _gradient_of(weight)
        first = weight in self._untouched
        if first:
            self._untouched.remove(weight)
        if total.dtype != x_NI.dtype:
            product = gradient_NO.t() @ x_NI
            total.copy_(product) if first else total.add_(product)
        elif first:
            torch.mm(gradient_NO.t(), x_NI, out=total)
        else:
            total.addmm_(gradient_NO.t(), x_NI)


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose backward returns the input gradient and hands the rest to `WeightGradients`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, sink: WeightGradients
    ) -> Tensor:
        ctx.made_by = swiglu_node(x)  # [Note: made again]
        ctx.save_for_backward(*([x] if ctx.made_by is None else []))
        ctx.shape = x.shape
        # The parameters themselves, not saved copies: hooks on saved tensors may pack those elsewhere.
        ctx.weight, ctx.bias, ctx.sink = weight, bias, sink
        return dear(name, lambda: F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        rows = gradient.reshape(-1, gradient.shape[-1])
        # First, since an input that is made again is wide, and gone before the input gradient is made.
        ctx.sink.add(ctx.weight, ctx.bias, _Linear._input(ctx).reshape(-1, ctx.shape[-1]), rows)
        input_gradient = torch.mm(rows, ctx.weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return input_gradient, None, None, None, None

    @staticmethod
    def _input(ctx: Any) -> Tensor:
        return ctx.saved_tensors[0] if ctx.made_by is None else product_again(ctx.made_by)


class _Embedding(torch.autograd.Function):
    """Rows of the weight, whose backward hands their gradients to `WeightGradients`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, sink: WeightGradients) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.sink = weight, sink
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.sink.add_rows(ctx.weight, ids, gradient)
        return None, None, None


def _linear(layer: nn.Linear, name: str, sink: WeightGradients) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Linear.apply(x, layer.weight, layer.bias, name, sink)
        return F.linear(x, layer.weight, layer.bias)

    return forward


def _embedding(layer: nn.Embedding, sink: WeightGradients) -> Callable[[Tensor], Tensor]:
    assert layer.padding_idx is None, "an embedding with a padding row has its own gradient"
    assert layer.max_norm is None, "an embedding with a maximal norm changes its weight in the forward"

    def forward(ids: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Embedding.apply(ids, layer.weight, sink)
        return F.embedding(ids, layer.weight)

    return forward


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "the parameter has no gradient buffer"
    return gradient
