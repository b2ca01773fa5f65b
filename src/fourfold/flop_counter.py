"""A counter of the FLOPs of running code: PyTorch's formulas, and those of operations it does not count."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fourfold.flops import Convention, attended_pairs

aten = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """Counts what runs inside, forward and backward, as ``flops``.

    `torch.utils.flop_counter.FlopCounterMode` with its bookkeeping of modules left out, which fails where a
    backward runs a forward again. It does not know the CPU's attention nor products added in place; those are
    here. A masked block counts whole, and the backward of attention with the scores that it computes again.

    Args:
        convention: what a causal kernel computes: with ``square`` all, as PyTorch counts, with ``pairs`` the
            half that it needs.
    """

    def __init__(self, convention: Convention = "pairs"):
        super().__init__()
        self.flops = 0
        self._formulas: dict[Any, Callable[..., int]] = {
            **flop_registry,
            aten.addmm_: _addmm,
            aten._scaled_dot_product_flash_attention_for_cpu: _attention(2, 0, convention),
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5, 1, convention),
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        if func.namespace == "fourfold":  # an op of several kernels: count those
            with self:
                return OPDEFS[func._overloadpacket._qualified_op_name]._init_fn(*args, **kwargs)
        out = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        return out


def _attention(products: int, first: int, convention: Convention) -> Callable[..., int]:
    """Of an operation with q and k from argument ``first`` on: so many products for each pair."""
    causal_at = 4 if products == 2 else 7

    def flops(*args: Any, is_causal: bool | None = None, out_val: Any = None, **kwargs: Any) -> int:
        q_BHSD, k_BKSD = args[first], args[first + 1]
        if is_causal is None:
            is_causal = len(args) > causal_at and args[causal_at]
        return products * 2 * q_BHSD.shape[-1] * _pairs(q_BHSD, k_BKSD, is_causal and convention == "pairs")

    return flops


def _pairs(q_BHSD: Tensor, k_BKSD: Tensor, is_triangle: bool) -> int:
    B, H, queries, _ = q_BHSD.shape
    keys = k_BKSD.shape[2]
    assert not is_triangle or queries == keys, "causal kernels are called for squares alone"
    return B * H * (attended_pairs(queries) if is_triangle else queries * keys)


def _addmm(total: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]
