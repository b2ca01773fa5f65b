"""Causal attention inside documents, exact, without a mask over the whole row."""

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.attention_engine import Forward, attend, attend_backward, goes_in_blocks
from fourfold.kept import ATTENTION, dear
from fourfold.rectangle import Rectangle


def attention(
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    *,
    documents: tuple[tuple[int, ...], ...],
    window: int | None,
    scale: float,
) -> Tensor:
    """Return causal attention of shape (B, S, H, D), in which no document sees another.

    Query head h reads key/value head h // (H / K). `documents` holds the lengths of each row's documents.
    With a `window` a query sees the last `window` positions, itself included. Where every row is one document
    (the usual case) this is one call of the fused kernel on views of q, k and v, or on a CPU for some lengths
    the few of [Note: squares in blocks] in `fourfold.attention_engine`. Neighbouring rows that are cut alike
    share their calls.
    """
    # The fused CPU kernel takes any strides, but reads the last dimension as contiguous without checking it,
    # and reads past the end when K does not divide H.
    assert q_BSHD.stride(-1) == k_BSKD.stride(-1) == v_BSKD.stride(-1) == 1, "head_dim must be contiguous"
    assert q_BSHD.shape[2] % k_BSKD.shape[2] == 0, "the key/value heads must divide the query heads"
    runs = [(lengths, len(list(rows))) for lengths, rows in groupby(documents)]
    if len(runs) == 1:
        return _attend_alike(q_BSHD, k_BSKD, v_BSKD, runs[0][0], window, scale)
    sizes = [rows for _, rows in runs]
    # split, not slices: its backward is one concatenation, that of a slice fills a whole row with zeros.
    parts = zip(q_BSHD.split(sizes), k_BSKD.split(sizes), v_BSKD.split(sizes), runs, strict=True)
    return torch.cat([_attend_alike(q, k, v, lengths, window, scale) for q, k, v, (lengths, _) in parts])


def _attend_alike(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, lengths: tuple[int, ...], window: int | None, scale: float
) -> Tensor:
    """Attend in rows that all have documents of these lengths."""
    if len(lengths) == 1:
        return _attend_document(q_BSHD, k_BSKD, v_BSKD, window, scale)
    parts = zip(q_BSHD.split(lengths, 1), k_BSKD.split(lengths, 1), v_BSKD.split(lengths, 1), strict=True)
    return torch.cat([_attend_document(q, k, v, window, scale) for q, k, v in parts], 1)


def _attend_document(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, scale: float
) -> Tensor:
    """Attend in rows that are one document each."""
    q_BHSD, k_BKSD, v_BKSD = q_BSHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    S = q_BHSD.shape[2]
    if window is None or window >= S:
        if q_BSHD.device.type == "cpu" and goes_in_blocks(S):
            return _CausalInBlocks.apply(q_BSHD, k_BSKD, v_BSKD, scale)
        out_BHSD = F.scaled_dot_product_attention(
            q_BHSD, k_BKSD, v_BKSD, is_causal=True, scale=scale, enable_gqa=True
        )
        return out_BHSD.transpose(1, 2)
    outs = []
    # Blocks of `window` queries see at most 2 * window - 1 keys, so work and masks grow with S * window.
    for start in range(0, S, window):
        stop, first = min(start + window, S), max(0, start - window + 1)
        query = torch.arange(start, stop, device=q_BHSD.device)[:, None]
        key = torch.arange(first, stop, device=q_BHSD.device)
        out_BHSD = F.scaled_dot_product_attention(
            q_BHSD[:, :, start:stop],
            k_BKSD[:, :, first:stop],
            v_BKSD[:, :, first:stop],
            attn_mask=(key <= query) & (key > query - window),
            scale=scale,
            enable_gqa=True,
        )
        outs.append(out_BHSD.transpose(1, 2))
    return torch.cat(outs, 1)


class _CausalInBlocks(torch.autograd.Function):
    """Attention of rows that are one document each: see [Note: squares in blocks] in the engine."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = dear(ATTENTION, lambda: attend(q, k, v, _square(q), scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        found = attend_backward(grad, Forward(*ctx.saved_tensors), _square(grad), ctx.scale)
        return *found, None


def _square(q_BSHD: Tensor) -> Rectangle:
    """All pairs of positions, those with later ones left out."""
    S = q_BSHD.shape[1]
    return Rectangle(0, S, 0, S, 0, causal=True)
