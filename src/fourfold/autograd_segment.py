"""Run part of a module as one node of the autograd graph, with a graph of its own inside.

It is what `Segment` is to our decoder, for modules whose forward we do not know: the outer graph ends at the
node, the inner one starts at detached leaves, and the backward of the inner one is an explicit call.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def differentiable_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that need a gradient, each once, through tuples, lists and dicts."""
    return list({id(x): x for x in _tensors((args, kwargs)) if x.requires_grad}.values())


def run_as_node(
    forward: Callable[..., Any],
    backward: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
    anchor: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what ``forward(*args, **kwargs)`` returns, as outputs of one node of the autograd graph.

    Tensors are found through tuples, lists and dicts; any other object passes as it is.

    Args:
        forward: is given detached leaves in place of tensors that need a gradient.
        backward: is given outputs of ``forward`` and their gradients, and calls the backward of them, if
            there are any. It is called once, on every rank whose loss depends on an output.
        anchor: a leaf that needs a gradient. With it there is a node although no input may need one.
        args: of the forward.
        kwargs: of the forward.
    """
    inputs = differentiable_inputs(args, kwargs)
    result: Any = None

    def run(leaves: Sequence[Tensor]) -> list[Tensor]:
        nonlocal result
        leaf_of = {id(x): leaf for x, leaf in zip(inputs, leaves, strict=True)}
        inner_args, inner_kwargs = _mapped((args, kwargs), lambda x: leaf_of.get(id(x), x))
        result = forward(*inner_args, **inner_kwargs)
        return _tensors(result)

    outputs = iter(_Node.apply(run, backward, anchor, *inputs))
    return _mapped(result, lambda _: next(outputs))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Sequence[Tensor]], list[Tensor]],
        backward: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            kept = run(leaves)
        outputs = tuple(y.detach() for y in kept)
        needs_gradient = [y.requires_grad for y in kept]
        if not any(needs_gradient):
            # A rank on which nothing inside needs a gradient still has the backward that other ranks have.
            needs_gradient = [y.is_floating_point() or y.is_complex() for y in kept]
        ctx.mark_non_differentiable(*(y for y, yes in zip(outputs, needs_gradient, strict=True) if not yes))
        ctx.set_materialize_grads(False)
        ctx.inner_backward, ctx.kept = backward, (leaves, kept)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError("a second backward through one forward of a block: run the forward again")
        leaves, kept = ctx.kept
        ctx.kept = None
        pairs = [(y, g) for y, g in zip(kept, gradients, strict=True) if y.requires_grad and g is not None]
        ctx.inner_backward([y for y, _ in pairs], [g for _, g in pairs])
        return (None, None, None, *(leaf.grad for leaf in leaves))


def _tensors(value: object) -> list[Tensor]:
    """The tensors in a value, in order."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, add)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with its tensors changed, through tuples, lists and dicts; itself where none changes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [_mapped(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: _mapped(item, change) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result
    return value
