"""The vocabulary on the tp axis: each rank has the logits of its own tokens, and no rank has all.

[Note: one exchange of statistics] The loss of a token with logits l and label y is lse(l) - l[y]. Each rank
computes the log-sum-exp of its own columns, and l[y] if y is among them. Two numbers a token and rank are
gathered, and the rest is local: lse = logsumexp over ranks of theirs. All ranks gather the same numbers and
compute the same loss from them, bit for bit. The vocabulary is cut unevenly where ranks do not divide it, so
there are no padded columns that could take part.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fourfold.collectives import all_gather
from fourfold.errors import UserError
from fourfold.mesh import Axis
from fourfold.models.loss import check_labels, rows_at_once


def vocabulary_parallel_cross_entropy_sum(
    logits_BSV: Tensor, labels_BS: Tensor, *, axis: Axis, first: int, vocab_size: int
) -> Tensor:
    """Return the sum of -log p(label) over the labels other than `IGNORE`, in float32 or higher.

    Overwrites the logits with their gradient, as `fourfold.models.loss.cross_entropy_sum` does.

    Args:
        logits_BSV: (B, S, V / tp), this rank's columns.
        labels_BS: (B, S), ids in the whole vocabulary.
        axis: the ranks that hold the other columns.
        first: the token of this rank's first column.
        vocab_size: of the whole vocabulary.

    Raises `UserError` for a label outside the vocabulary, on a CPU.
    """
    if labels_BS.device.type == "cpu":
        check_labels(labels_BS, vocab_size)
    return _CrossEntropySum.apply(logits_BSV.flatten(0, -2), labels_BS.flatten(), axis, first)


class _CrossEntropySum(torch.autograd.Function):
    """The forward leaves softmax - onehot in the place of this rank's logits."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, axis: Axis, first: int) -> Tensor:
        high = torch.promote_types(logits_NV.dtype, torch.float32)
        is_mine, column_N = _columns(labels_N, first, logits_NV.shape[-1])
        valid = labels_N >= 0
        statistics_2N = torch.zeros(2, len(labels_N), dtype=high, device=logits_NV.device)
        rows = rows_at_once(logits_NV)
        for n in range(0, len(labels_N), rows):
            logits, chunk = logits_NV[n : n + rows], slice(n, n + rows)
            at_label = logits.gather(1, column_N[chunk, None])[:, 0]
            statistics_2N[1, chunk] = at_label.to(high).masked_fill_(~is_mine[chunk], 0)
            softmax = torch.softmax(logits, -1, dtype=high)
            # Any column gives the log-sum-exp: the largest one with the least rounding.
            largest, at = logits.max(-1)
            empty = largest == -torch.inf  # a model may rule out all tokens of a rank: no share of the sum
            lse = largest.to(high) - softmax.gather(1, at[:, None])[:, 0].log()
            statistics_2N[0, chunk] = lse.masked_fill_(empty, -torch.inf)
            if ctx.needs_input_grad[0]:
                logits.copy_(softmax).masked_fill_(empty[:, None], 0)
        parts_P2N = all_gather(statistics_2N[None], axis)
        lse_N = parts_P2N[:, 0].logsumexp(0)
        total = (lse_N - parts_P2N[:, 1].sum(0)).masked_fill(~valid, 0).sum()
        if ctx.needs_input_grad[0]:
            # softmax over all columns = softmax over mine x exp(my log-sum-exp - that of all)
            share_N = (statistics_2N[0] - lse_N).exp_()
            ctx.save_for_backward(logits_NV, share_N, column_N, is_mine, valid)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, share_N, column_N, is_mine, valid = ctx.saved_tensors
        gradient_NV = logits_NV.mul_((share_N * valid * grad).to(logits_NV.dtype)[:, None])
        at_label = (is_mine * -grad).to(logits_NV.dtype)
        return gradient_NV.scatter_add_(1, column_N[:, None], at_label[:, None]), None, None, None


def _columns(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which ids are among this rank's, and their place there; 0 for the others."""
    local = ids - first
    is_mine = (local >= 0) & (local < count)
    return is_mine, local.masked_fill(~is_mine, 0)


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise UserError(f"token {wrong[0].item()} is outside the vocabulary: use 0 to {vocab_size - 1}")


def look_up_own_rows_(embedding: nn.Embedding, first: int, *, vocab_size: int) -> None:
    """Have an embedding that holds the rows from ``first`` on give zeros for all other tokens.

    The rows of all ranks then add up to the whole embedding's. The row of padding, which gets no gradient,
    is that of one rank. A token outside the vocabulary is a `UserError`, on a CPU.
    """
    others: list[Tensor] = []
    if embedding.padding_idx is not None:
        own = range(first, first + embedding.weight.shape[0])
        embedding.padding_idx = embedding.padding_idx - first if embedding.padding_idx in own else None

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if args[0].device.type == "cpu":  # an id of no rank would be zeros on all of them
            _check_ids(args[0], vocab_size)
        is_mine, local = _columns(args[0], first, len(torch.as_tensor(module.weight)))
        others.append(~is_mine)
        return (local, *args[1:])

    def after(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out.masked_fill(others.pop()[..., None], 0)

    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)
