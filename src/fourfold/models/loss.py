"""The loss of next-token prediction, as a sum over tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.errors import UserError
from fourfold.models.batch import IGNORE

CHUNK_ELEMENTS = 2**17
"""Logits handled at once on a CPU: half a megabyte in float32, which stays in the cache."""

DEVICE_CHUNK_ELEMENTS = 2**24
"""Elsewhere, where it takes time to start an operation: 64 megabytes in float32."""


def rows_at_once(logits_NV: Tensor) -> int:
    """Return for how many tokens the loss is computed at once."""
    elements = CHUNK_ELEMENTS if logits_NV.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(1, elements // logits_NV.shape[-1])


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the sum of -log p(label) over the labels other than `IGNORE`, in float32 or higher.

    Overwrites the logits with their gradient when one is needed: no second tensor of their size ever exists.
    Raises `UserError` for a label outside the vocabulary, on a CPU; a GPU's kernel stops the process.
    """
    if labels_BS.device.type == "cpu":
        check_labels(labels_BS, logits_BSV.shape[-1])
    return _CrossEntropySum.apply(logits_BSV.flatten(0, -2), labels_BS.flatten())


def sum_over_chunks(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    x_BSC: Tensor,
    labels_BS: Tensor,
    *,
    parameters: Sequence[Tensor],
    tokens: int,
) -> Tensor:
    """Return the sum of `loss_of` over chunks of tokens, of which only one's logits exist at a time.

    [Note: logits of one chunk] The logits of a large vocabulary are the largest tensor of a step. A chunk's
    forward drops them, and its backward makes them again. Those of the last chunk are kept, since the
    backward starts with it: where all tokens are one chunk, nothing is made twice.

    Args:
        loss_of: gives the summed loss from (N, C) inputs and (N,) labels.
        x_BSC: the inputs.
        labels_BS: the labels.
        parameters: those that `loss_of` uses.
        tokens: of a chunk, at most.
    """
    xs, labels = x_BSC.flatten(0, -2).split(tokens), labels_BS.flatten().split(tokens)
    dropped = [
        _Recomputed.apply(loss_of, x, y, *parameters) for x, y in zip(xs[:-1], labels[:-1], strict=True)
    ]
    kept = loss_of(xs[-1], labels[-1])
    return torch.stack([*dropped, kept]).sum() if dropped else kept


class _Recomputed(torch.autograd.Function):
    """A loss whose backward computes its forward again."""

    @staticmethod
    def forward(ctx: Any, loss_of: Any, x_NC: Tensor, labels_N: Tensor, *parameters: Tensor) -> Tensor:
        ctx.loss_of, ctx.parameters = loss_of, parameters
        ctx.save_for_backward(x_NC, labels_N)
        return loss_of(x_NC, labels_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, labels_N = ctx.saved_tensors
        inputs = [x_NC.detach().requires_grad_(), *ctx.parameters]
        with torch.enable_grad():
            loss = ctx.loss_of(inputs[0], labels_N)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        # A gradient may be None: a layer may add its own in place (see `fourfold.weight_gradients`).
        found = iter(torch.autograd.grad(loss, wanted, grad, allow_unused=True))
        gradients = [next(found) if tensor.requires_grad else None for tensor in inputs]
        return None, gradients[0], None, *gradients[1:]


def check_labels(labels_BS: Tensor, vocab_size: int) -> None:
    """Raise `UserError` for a label that is neither a token nor `IGNORE`."""
    wrong = labels_BS[(labels_BS >= vocab_size) | ((labels_BS < 0) & (labels_BS != IGNORE))]
    if len(wrong):
        raise UserError(
            f"label {wrong[0].item()} is outside the vocabulary: use 0 to {vocab_size - 1}, "
            f"or {IGNORE} where there is nothing to predict"
        )


class _CrossEntropySum(torch.autograd.Function):
    """Sum of cross entropies; the forward leaves softmax - onehot in the place of the logits.

    A second backward fails: it would find the logits' version changed.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        high = torch.promote_types(logits_NV.dtype, torch.float32)
        total = logits_NV.new_zeros((), dtype=high)
        minus_one = total.new_full((1, 1), -1)
        rows = rows_at_once(logits_NV)
        for logits, labels in zip(logits_NV.split(rows), labels_N.split(rows), strict=True):
            log_p = torch.log_softmax(logits, -1, dtype=high)
            total += F.nll_loss(log_p, labels, ignore_index=IGNORE, reduction="sum")
            if ctx.needs_input_grad[0]:
                column = labels.clamp(min=0)[:, None]
                logits.copy_(log_p.exp_().scatter_add_(1, column, minus_one.expand_as(column)))
        ctx.save_for_backward(logits_NV, labels_N)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits_NV, labels_N = ctx.saved_tensors
        return logits_NV.mul_((grad * (labels_N != IGNORE))[:, None]), None
