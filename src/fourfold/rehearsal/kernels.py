"""Which kernels a device would run, where the meta device has none of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fourfold.models.norm import RMSNormOnCPU

aten = torch.ops.aten


class Kernels(TorchFunctionMode):
    """Lets functions on the meta device run as the fused kernels of a device do.

    The meta device takes attention apart into products with a score for every pair, and norms into their
    formula; a device does not. What a fused kernel returns and keeps for the backward is the same everywhere:
    for attention the output and the log-sum-exp, for which the operation of the CPU stands here.

    Args:
        device_type: ``cuda`` or ``cpu``; a CPU has no fused norm, but ours.
    """

    def __init__(self, device_type: str):
        super().__init__()
        self._instead: Mapping[Any, Callable[..., Tensor]] = {
            F.scaled_dot_product_attention: _attention,
            F.rms_norm: _norm_of_the_cpu if device_type == "cpu" else _fused_norm,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        instead = self._instead.get(func)
        if instead is not None and args[0].is_meta:
            func = instead
        return func(*args, **(kwargs or {}))


def _attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=q_BHSD.dtype).masked_fill_(~attn_mask, float("-inf"))
    out, _ = aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHSD, k_BKSD, v_BKSD, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out


def _norm_of_the_cpu(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    return RMSNormOnCPU.apply(x, weight, eps)


def _fused_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    return _FusedNorm.apply(x, weight)


class _FusedNorm(torch.autograd.Function):
    """What CUDA's norm allocates: the output, and a number in float32 for each row, kept with the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
