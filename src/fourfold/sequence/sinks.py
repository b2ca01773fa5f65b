"""Attention sinks: a learned logit of each head that takes part in the softmax and brings no value.

[Note: a sink is one more key] With l the log-sum-exp over all keys and s the sink, the log-sum-exp over both
is l' = logaddexp(l, s), and the output o' = exp(l - l') o. Kept in place of l and o, they are the global
statistics of `fourfold.attention_engine`, so the gradients of all blocks of keys are computed as ever. That
of the sink is the sum over rows of -exp(s - l') rowsum(do * o').
"""

import torch
from torch import Tensor


def with_sinks(out_BSHD: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp with a sink of each head, in their dtypes.

    Args:
        out_BSHD: attention's output over all keys, and ``lse_BHS`` its log-sum-exp in float32 or higher.
        sinks_H: the logits, as large as scores after their scaling.
    """
    total_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype)[:, None])
    kept_BSH1 = (lse_BHS - total_BHS).exp().transpose(1, 2)[..., None]
    return (out_BSHD * kept_BSH1).to(out_BSHD.dtype), total_BHS


def sinks_gradient(grad_BSHD: Tensor, out_BSHD: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks (H,), in the dtype of ``lse_BHS``.

    ``out_BSHD`` and ``lse_BHS`` are what `with_sinks` returned.
    """
    high = lse_BHS.dtype
    share_BHS = (sinks_H.to(high)[:, None] - lse_BHS).exp()
    return -torch.einsum("bhs,bshd,bshd->h", share_BHS, grad_BSHD.to(high), out_BSHD.to(high))
