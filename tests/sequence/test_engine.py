"""Attention of one rectangle equals the plain formulas; what the kernels do not check is checked."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.attention_engine import Forward, OnCPU, Plain, _query_blocks, attend, attend_backward
from fourfold.models.attention import attention
from fourfold.rectangle import Rectangle
from fourfold.sequence.partition import partition_of
from fourfold.sequence.rectangles import rectangles
from fourfold.sequence.ring import _merge_

FULL = Rectangle(0, 5, 0, 9, 20)
SQUARE = Rectangle(0, 7, 0, 7, 0, causal=True)
BAND = Rectangle(0, 4, 0, 6, 6, window=6)
CAUSAL_BAND = Rectangle(0, 4, 0, 7, 3, causal=True, window=4)
PIECES = {"full": FULL, "square": SQUARE, "band": BAND, "causal band": CAUSAL_BAND}


def tensors(piece: Rectangle, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    return [
        torch.randn(2, tokens, n, 5, generator=generator, dtype=torch.float64).to(dtype)
        for tokens, n in shapes
    ]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
def test_the_kernel_equals_the_formulas(piece: Rectangle, heads: int, kv_heads: int) -> None:
    """With statistics that are of more keys than the rectangle's."""
    q, k, v, grad = tensors(piece, heads, kv_heads, torch.float64)
    out, lse = OnCPU().forward(q, k, v, piece, 0.4)
    plain_out, plain_lse = Plain().forward(q, k, v, piece, 0.4)
    torch.testing.assert_close(out, plain_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-13)
    forward = Forward(q, k, v, 0.7 * out + 0.1, lse + 0.6)
    found = OnCPU().backward(grad, forward, piece, 0.4)
    expected = Plain().backward(grad, forward, piece, 0.4)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("size", "blocks"), [(128, 0), (129, 3), (500, 8), (600, 5), (1024, 8), (1025, 0)])
def test_squares_in_blocks_equal_the_formulas(size: int, blocks: int) -> None:
    piece = Rectangle(3, 3 + size, 3, 3 + size, 0, causal=True)
    assert len(_query_blocks(piece)) == blocks
    q, k, v, grad = tensors(piece, 2, 1, torch.float64)
    out, lse = attend(q, k, v, piece, 0.4)
    plain_out, plain_lse = Plain().forward(q, k, v, piece, 0.4)
    torch.testing.assert_close(out, plain_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-12)
    forward = Forward(q, k, v, out, lse)
    found, expected = (kind.backward(grad, forward, piece, 0.4) for kind in (OnCPU(), Plain()))
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
def test_the_formulas_gradients_are_autograds(piece: Rectangle) -> None:
    q, k, v, grad = tensors(piece, 4, 2, torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = Plain().forward(q, k, v, piece, 0.4)
    expected = torch.autograd.grad(out, inputs, grad)
    found = Plain().backward(grad, Forward(q, k, v, out, lse), piece, 0.4)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach(), right, rtol=0, atol=1e-13)


def test_what_the_kernel_would_not_notice_is_refused() -> None:
    q, k, v, _ = tensors(FULL, 4, 2, torch.float32)
    with pytest.raises(AssertionError, match="has queries"):
        attend(q[:, :0], k, v, FULL, 1.0)
    with pytest.raises(AssertionError, match="has keys"):
        attend(q, k[:, :0], v[:, :0], FULL, 1.0)
    with pytest.raises(AssertionError, match="contiguous"):
        attend(q, k.mT.contiguous().mT, v, FULL, 1.0)
    with pytest.raises(AssertionError, match="divide the query heads"):
        attend(q[:, :, :3], k, v, FULL, 1.0)
    with pytest.raises(AssertionError, match="squares"):
        attend(q, k, v, Rectangle(0, 5, 0, 9, 4, causal=True), 1.0)


def on_a_ring(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, ranks: int) -> list[Tensor]:
    """Output and gradients as the ranks of a ring find them, without the messages."""
    documents = (q.shape[1],)
    partition = partition_of(documents, ranks)
    index = [torch.tensor([i for run in partition.columns(rank) for i in run]) for rank in range(ranks)]
    found = [torch.zeros(tensor.shape) for tensor in (q, q, k, v)]
    for rank in range(ranks):
        mine, mine_grad = q[:, index[rank]], grad[:, index[rank]]
        out = torch.zeros(mine.shape)
        lse = torch.full((q.shape[0], q.shape[2], mine.shape[1]), float("-inf"))
        work = [
            (piece, index[source][piece.k_start : piece.k_stop], slice(piece.q_start, piece.q_stop))
            for source in ((rank - step) % ranks for step in range(ranks))
            for piece in rectangles(partition, rank, source, documents)
        ]
        for piece, keys, rows in work:
            block = attend(mine[:, rows], k[:, keys], v[:, keys], piece, 0.125)
            _merge_(out[:, rows], lse[:, :, rows], *block)
        low = out.to(q.dtype)
        found[0][:, index[rank]] = low.float()
        for piece, keys, rows in work:
            forward = Forward(mine[:, rows], k[:, keys], v[:, keys], low[:, rows], lse[:, :, rows])
            dq, dk, dv = attend_backward(mine_grad[:, rows], forward, piece, 0.125)
            found[1][:, index[rank][rows]] += dq
            found[2][:, keys] += dk
            found[3][:, keys] += dv
    return [tensor.to(q.dtype) for tensor in found]


def relative_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((mine.double() - right).norm() / right.norm()) for mine, right in pairs]


def whole(tensors: list[Tensor]) -> list[Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    out = attention(*inputs, documents=((inputs[0].shape[1],),), window=None, scale=0.125)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3])]


def kernel(tensors: list[Tensor]) -> list[Tensor]:
    """The same by PyTorch's kernel alone, which adds up all gradients of a key in the tensors' dtype."""
    q, k, v = inputs = [tensor.transpose(1, 2).clone().requires_grad_() for tensor in tensors[:3]]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125, enable_gqa=True)
    grads = torch.autograd.grad(out, inputs, tensors[3].transpose(1, 2))
    return [tensor.transpose(1, 2) for tensor in (out.detach(), *grads)]


def test_errors_of_bfloat16_do_not_grow_with_the_ring() -> None:
    """The merge keeps its weights in float32: rounded to bfloat16, a ring of 16 errs 1.31 times as much."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 512, n, 64, generator=generator).bfloat16() for n in (4, 2, 2, 4)]
    exact = whole([tensor.double() for tensor in inputs])
    one = relative_errors(kernel(inputs), exact)
    for ranks in (2, 8, 16):
        many = relative_errors(on_a_ring(*inputs, ranks), exact)
        assert all(error <= 1.2 * alone for error, alone in zip(many, one, strict=True))


def test_a_band_needs_no_mask_of_the_whole_row() -> None:
    """Work and masks grow with S * window, not S * S."""
    length, window = 4096, 128
    pieces = rectangles(partition_of((length,), 1), 0, 0, (length,), window=window)
    sizes = [(piece.q_stop - piece.q_start) * (piece.k_stop - piece.k_start) for piece in pieces]
    assert max(sizes) < 2 * window * window
    assert sum(piece.pairs for piece in pieces) == length * window - window * (window - 1) // 2
