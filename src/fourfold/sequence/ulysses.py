"""Ulysses: tokens of all heads become all tokens of some heads, and back (Jacobs et al. 2023).

Every rank of the axis brings its tokens' queries, keys and values; each gets all tokens of an equal part of
the query heads and of the key/value heads that those read. Where there are fewer key/value heads than ranks,
neighbouring ranks get copies of one, and the gradients of copies are added up in float32 or higher.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.collectives import all_to_all
from fourfold.mesh import Axis


def copies_of_heads(kv_heads: int, ranks: int) -> int:
    """How many ranks get the same key/value head."""
    assert kv_heads % ranks == 0 or ranks % kv_heads == 0, f"{ranks} ranks for {kv_heads} key/value heads"
    return max(1, ranks // kv_heads)


def copied(tensor: Tensor, ranks: int) -> Tensor:
    """Return keys or values (B, S, K, D) with as many copies of each head as its ranks are."""
    copies = copies_of_heads(tensor.shape[2], ranks)
    return tensor if copies == 1 else tensor.repeat_interleave(copies, 2)


def summed_copies(gradient: Tensor, kv_heads: int) -> Tensor:
    """Return the gradients of keys or values, those of copies added up: the backward of `copied`."""
    copies = gradient.shape[2] // kv_heads
    if copies == 1:
        return gradient
    high = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.unflatten(2, (kv_heads, copies)).sum(3, dtype=high).to(gradient.dtype)


def to_heads(tensors: Sequence[Tensor], axis: Axis, tokens: Sequence[int]) -> Tensor:
    """Return all tokens of this rank's heads, in one exchange.

    Args:
        tensors: this rank's tokens of all heads, each (B, S, heads, D); the ranks divide the heads.
        axis: the ranks.
        tokens: how many each of them has of a row.

    Returns:
        (B, sum of tokens, heads, D): heads / ranks of the first tensor, then of the next.
    """
    B, D = tensors[0].shape[0], tensors[0].shape[3]
    by_rank = zip(*(tensor.chunk(axis.size, 2) for tensor in tensors), strict=True)
    parts = [torch.cat(of_a_rank, 2) for of_a_rank in by_rank]
    found = _exchanged(parts, axis, [B * count for count in tokens])
    heads = sum(tensor.shape[2] for tensor in tensors) // axis.size
    return torch.cat([part.view(B, -1, heads, D) for part in found], 1)


def from_heads(tensors: Sequence[Tensor], axis: Axis, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """Return this rank's tokens of all heads, in one exchange: the inverse of `to_heads`.

    Args:
        tensors: all tokens of this rank's heads, each (B, sum of tokens, heads / ranks, D).
        axis: the ranks.
        tokens: how many each of them has of a row.

    Returns:
        Of each tensor (B, S, heads, D).
    """
    B, D = tensors[0].shape[0], tensors[0].shape[3]
    sizes = [tensor.shape[2] for tensor in tensors]
    parts = torch.cat(tuple(tensors), 2).split(list(tokens), 1)
    found = _exchanged(parts, axis, [B * tokens[axis.rank]] * axis.size)
    by_rank = [part.view(B, tokens[axis.rank], sum(sizes), D).split(sizes, 2) for part in found]
    return tuple(torch.cat(of_a_tensor, 2) for of_a_tensor in zip(*by_rank, strict=True))


def _exchanged(parts: Sequence[Tensor], axis: Axis, rows: Sequence[int]) -> list[Tensor]:
    """Give each rank its part (B, S, heads, D), and return those of all ranks as (B * S, heads, D)."""
    flat = torch.cat([part.flatten(0, 1) for part in parts])
    sent = [part.shape[0] * part.shape[1] for part in parts]
    return list(all_to_all(flat, axis, send_counts=sent, receive_counts=rows).split(list(rows)))
