"""Root-mean-square normalisation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last dimension and multiply by a weight per channel.

    `x * rsqrt(mean(x^2) + eps) * weight`, computed in float32 or higher (Zhang and Sennrich 2019).
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x of any shape (..., dim), normalised."""
        if x.device.type == "cpu":
            return RMSNormOnCPU.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RMSNormOnCPU(torch.autograd.Function):
    """The same function with an explicit backward.

    torch has a fused kernel on GPUs only; on a CPU its own version takes four times as long as this one.
    With n = x / rms and t = grad * n: dweight = sum of t over the rows,
    dx = (grad * weight - n * mean(t * weight)) / rms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x normalised."""
        x_high = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(x_high, dim=-1, keepdim=True).square_()
        scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x_high * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and the weight."""
        x, weight, scale = ctx.saved_tensors
        n = x.to(scale.dtype) * scale
        t = n * grad
        weight_high = weight.to(scale.dtype)
        mean = (t @ weight_high).div_(-x.shape[-1]).unsqueeze(-1).mul_(scale)
        # In float32 or higher: autograd rounds it to the dtype that the parameter's gradient is kept in.
        dweight = t.view(-1, t.shape[-1]).sum(0)
        dx = n.mul_(mean).addcmul_(torch.mul(grad, weight_high, out=t), scale)
        return dx.to(x.dtype), dweight, None
