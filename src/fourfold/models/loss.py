"""The loss of next-token prediction, as a sum over tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.errors import UserError
from fourfold.models.batch import IGNORE

CHUNK_ELEMENTS = 2**17
"""Logits handled at once: half a megabyte in float32, which stays in the cache."""


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the sum of -log p(label) over the labels other than `IGNORE`, in float32 or higher.

    Overwrites the logits with their gradient when one is needed: no second tensor of their size ever exists.
    Raises `UserError` for a label outside the vocabulary, on a CPU; a GPU's kernel stops the process.
    """
    if labels_BS.device.type == "cpu":
        check_labels(labels_BS, logits_BSV.shape[-1])
    return _CrossEntropySum.apply(logits_BSV.flatten(0, -2), labels_BS.flatten())


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
        rows = max(1, CHUNK_ELEMENTS // logits_NV.shape[-1])
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
