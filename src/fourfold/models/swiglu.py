"""The gated activation of the feed-forward block.

[Note: made again] The linear layer behind it needs its input, the product, for its weight gradient. That is
cheap to make from what this node of the graph keeps anyway, so the layer keeps the node instead
(`fourfold.weight_gradients`): a tape has two tensors as wide as the feed-forward, where autograd's has four.
silu(gate), which this takes, is there then for the node's own backward, which comes next.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# PyTorch's own derivative of silu, rounded once; no public function gives it without a graph, or in place.
_silu_backward = torch.ops.aten.silu_backward.grad_input


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, of tensors of one shape (Shazeer 2020)."""
    return _SwiGLU.apply(gate, up)


def swiglu_node(product: Tensor) -> Any:
    """Return the node of the autograd graph that made ``product``, None where that is not `swiglu`."""
    node = product.grad_fn
    return node if getattr(node, "is_swiglu", False) else None


def product_again(node: Any) -> Tensor:
    """Return what a `swiglu_node` made, the same bits. Its backward has not run yet."""
    gate, up = node.saved_tensors
    node.silu = F.silu(gate)
    return node.silu * up


class _SwiGLU(torch.autograd.Function):
    """The same bits as autograd's, keeping the inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.is_swiglu = True
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_silu = grad * up
        grad_gate = _silu_backward(grad_silu, gate, grad_input=grad_silu)
        silu = vars(ctx).pop("silu", None)
        grad_up = (F.silu(gate) if silu is None else silu).mul_(grad)
        return grad_gate, grad_up
