"""Attention of one rectangle: its output and log-sum-exp, and its gradients from global statistics.

[Note: global statistics] With P = exp(S - lse), where lse is over *all* keys of a query, and
delta = rowsum(dout * out) with the *whole* output, the gradients of a block of keys need nothing of the other
blocks: dV = P^T dout, dS = P * (dout V^T - delta), dQ = dS K, dK = dS^T Q (times the scale). So the kernels'
own backward is called for each block with the merged output and log-sum-exp, and the results add up.

The kernels are PyTorch's own, called through aten since the public function returns no log-sum-exp. What they
do not check is checked here:

- a block without queries or keys ends the process on a CPU, and a row without keys has the log-sum-exp 0: the
  plan of rectangles has neither ([Note: no mask tensor] in `fourfold.sequence.rectangles`);
- the last dimension is read as contiguous;
- key/value heads that do not divide the query heads are read past their end;
- causal is aligned at the top left on a CPU and at the bottom right on CUDA: it is used for squares alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fourfold.rectangle import Rectangle

aten = torch.ops.aten

Partial = tuple[Tensor, Tensor]
"""The output of some keys, (B, S, H, D), and its log-sum-exp, (B, H, S), in float32 or higher."""


def attend(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, piece: Rectangle, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output (B, S, H, D) and the log-sum-exp (B, H, S) in float32 or higher, of a rectangle.

    Args:
        q_BSHD: its queries, and ``k_BSKD``, ``v_BSKD`` its keys and values: the rows of the rectangle alone.
        piece: which pairs see each other.
        scale: of the scores.
    """
    _check(q_BSHD, k_BSKD, v_BSKD, piece)
    return _engine(q_BSHD).forward(q_BSHD, k_BSKD, v_BSKD, piece, scale)


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward as its backward needs it; see [Note: global statistics].

    Attributes:
        q: queries (B, S, H, D).
        k: keys (B, S, K, D) of a block, and ``v`` their values.
        out: the output (B, S, H, D) of the queries over *all* of their keys.
        lse: its log-sum-exp (B, H, S).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def attend_backward(
    grad_BSHD: Tensor, forward: Forward, piece: Rectangle, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a rectangle's queries, keys and values, from that of its output."""
    _check(forward.q, forward.k, forward.v, piece)
    return _engine(forward.q).backward(grad_BSHD, forward, piece, scale)


class Engine(Protocol):
    """Computes rectangles on one kind of device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Rectangle, scale: float) -> Partial:
        """See `attend`."""

    def backward(
        self, grad: Tensor, forward: Forward, piece: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `attend_backward`."""


class OnCPU:
    """PyTorch's flash attention for the CPU: any float, grouped heads, any strides but the last.

    [Note: squares in blocks] The kernel takes keys in blocks of 512 and computes each block whole, with what
    the causal mask then throws away. So squares of up to 1024 go in blocks of queries, each with the keys
    that it sees. All blocks see all keys but those beyond their last columns, so one mask serves them all. On
    one core with 8 heads of 32 channels, in milliseconds forward and backward: 2.1 instead of 2.8 for 256
    tokens, 7.5 instead of 11.1 for 512, 26.7 instead of 33.8 for 1024; nothing is won from 2048 on.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Rectangle, scale: float) -> Partial:
        """See `attend`."""
        blocks = _query_blocks(piece)
        if not blocks:
            return self._forward(q, k, v, _is_square(piece), _mask(piece, q), scale)
        B, S, H, _ = q.shape
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty((B, H, S), dtype=torch.promote_types(q.dtype, torch.float32))
        mask = _mask_of_blocks(blocks, q)
        for queries, keys in blocks:
            found = self._forward(q[:, queries], k[:, keys], v[:, keys], *_cut(mask, queries, keys), scale)
            out[:, queries], lse[:, :, queries] = found
        return out, lse

    def backward(
        self, grad: Tensor, forward: Forward, piece: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `attend_backward`."""
        blocks = _query_blocks(piece)
        if not blocks:
            return self._backward(grad, forward, _is_square(piece), _mask(piece, grad), scale)
        q, k, v, out, lse = forward.q, forward.k, forward.v, forward.out, forward.lse
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(k.shape, dtype=lse.dtype, device=k.device) for _ in range(2))
        mask = _mask_of_blocks(blocks, q)
        for queries, keys in blocks:
            part = Forward(q[:, queries], k[:, keys], v[:, keys], out[:, queries], lse[:, :, queries])
            found = self._backward(grad[:, queries], part, *_cut(mask, queries, keys), scale)
            dq[:, queries] = found[0]
            dk[:, keys] += found[1]
            dv[:, keys] += found[2]
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> Partial:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, causal, attn_mask=mask, scale=scale
        )
        return out.transpose(1, 2), lse

    def _backward(
        self, grad: Tensor, forward: Forward, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(grad, forward.q, forward.k, forward.v, forward.out), forward.lse, 0.0,
            causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class OnCUDA:
    """FlashAttention as PyTorch has it built in, for 16-bit floats. Written from its signature, not yet run.

    A band is one call: the window's ends are counted from the bottom right corner.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Rectangle, scale: float) -> Partial:
        """See `attend`."""
        left, right = _window_from_the_corner(piece)
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, _is_square(piece), False,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse

    def backward(
        self, grad: Tensor, forward: Forward, piece: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `attend_backward`."""
        left, right = _window_from_the_corner(piece)
        q, k = forward.q, forward.k
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = aten._flash_attention_backward(
            grad, q, k, forward.v, forward.out, forward.lse.contiguous(), None, None, q.shape[1], k.shape[1],
            0.0, _is_square(piece), unused, unused,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return dq, dk, dv


class Plain:
    """The formulas in plain PyTorch, in float32 or higher: the oracle, and what any device can do."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Rectangle, scale: float) -> Partial:
        """See `attend`."""
        scores, v_high = self._scores(q, k, piece, scale), _expanded(v, q)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp() @ v_high
        return out.transpose(1, 2).to(q.dtype), lse

    def backward(
        self, grad: Tensor, forward: Forward, piece: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `attend_backward`."""
        q, k = forward.q, forward.k
        p = (self._scores(q, k, piece, scale) - forward.lse[..., None]).exp()
        grad_high, q_high, out_high = (_high(tensor).transpose(1, 2) for tensor in (grad, q, forward.out))
        delta = (grad_high * out_high).sum(-1, keepdim=True)
        ds = p * (grad_high @ _expanded(forward.v, q).mT - delta) * scale
        groups = (k.shape[2], q.shape[2] // k.shape[2])
        dk = (ds.mT @ q_high).unflatten(1, groups).sum(2)
        dv = (p.mT @ grad_high).unflatten(1, groups).sum(2)
        found = (ds @ _expanded(k, q), dk, dv)
        dq, dk, dv = (tensor.transpose(1, 2).to(q.dtype) for tensor in found)
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor, piece: Rectangle, scale: float) -> Tensor:
        scores = _high(q).transpose(1, 2) @ _expanded(k, q).mT * scale
        allowed = _allowed(piece, q.device)
        return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))


def _engine(q: Tensor) -> Engine:
    if q.device.type in ("cpu", "meta"):  # what it returns has the same shapes on every device
        return OnCPU()
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        return OnCUDA()
    return Plain()


def _check(q: Tensor, k: Tensor, v: Tensor, piece: Rectangle) -> None:
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "head_dim must be contiguous"
    assert q.shape[2] % k.shape[2] == 0, "the key/value heads must divide the query heads"
    assert q.shape[1] > 0, "a rectangle has queries"
    assert k.shape[1] > 0, "a rectangle has keys"
    is_diagonal = piece.causal and piece.window is None
    assert _is_square(piece) or not is_diagonal, "causal pieces are squares"


def _is_square(piece: Rectangle) -> bool:
    """Whether the kernel's own causal mask is the right one: a square on the diagonal without a window."""
    queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
    return piece.causal and piece.window is None and piece.ahead == 0 and queries == keys


def goes_in_blocks(size: int) -> bool:
    """Whether a CPU computes a causal square of so many queries in blocks: [Note: squares in blocks]."""
    return 128 < size <= 1024


def _query_blocks(piece: Rectangle) -> list[tuple[slice, slice]]:
    """Queries and keys of the blocks of a square, none if it goes whole: [Note: squares in blocks]."""
    size = piece.q_stop - piece.q_start
    if not _is_square(piece) or not goes_in_blocks(size):
        return []
    step = 64 if size <= 512 else 128
    stops = [min(start + step, size) for start in range(0, size, step)]
    return [(slice(start, stop), slice(0, stop)) for start, stop in zip([0, *stops], stops, strict=False)]


def _mask_of_blocks(blocks: Sequence[tuple[slice, slice]], q: Tensor) -> Tensor:
    """What is added to the scores of a square's blocks; the last rows and columns are those of each."""
    rows, columns = blocks[0][0].stop, blocks[-1][1].stop
    return q.new_full((rows, columns), float("-inf")).triu_(columns - rows + 1)


def _cut(mask: Tensor, queries: slice, keys: slice) -> tuple[bool, Tensor | None]:
    """Whether a block of a square is causal by itself, the first one, and the mask of any other."""
    if queries.start == 0:
        return True, None
    return False, mask[mask.shape[0] - (queries.stop - queries.start) :, mask.shape[1] - keys.stop :]


def _allowed(piece: Rectangle, device: torch.device) -> Tensor | None:
    """Which pairs see each other, (queries, keys); None where all do."""
    if not piece.causal and piece.window is None:
        return None
    query = torch.arange(piece.q_stop - piece.q_start, device=device)[:, None]
    apart = piece.ahead + query - torch.arange(piece.k_stop - piece.k_start, device=device)
    allowed = apart >= 0 if piece.causal else torch.ones_like(apart, dtype=torch.bool)
    return allowed if piece.window is None else allowed & (apart < piece.window)


def _mask(piece: Rectangle, q: Tensor) -> Tensor | None:
    """What is added to the scores; None where the kernel needs no mask."""
    allowed = None if _is_square(piece) else _allowed(piece, q.device)
    if allowed is None:
        return None
    return torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, float("-inf"))


def _window_from_the_corner(piece: Rectangle) -> tuple[int | None, int | None]:
    """A band as FlashAttention counts it: query i sees keys from i + keys - queries - left to ... + right."""
    if piece.window is None:
        return None, None
    queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
    left = (keys - queries) - piece.ahead + piece.window - 1
    right = piece.ahead - (keys - queries)
    return left, right if piece.causal else right + keys


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _high(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _expanded(k: Tensor, q: Tensor) -> Tensor:
    """Key/value heads repeated for the query heads that read them, (B, H, S, D), in float32 or higher."""
    return _high(k).repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
