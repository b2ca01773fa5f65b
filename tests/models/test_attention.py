import pytest
import torch
import torch.nn.functional as F

from fourfold.models.attention import attention

B, S, H, K, D = 3, 12, 6, 2, 5
SCALE = 0.37


def heads(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, S, H, D), (B, S, K, D), (B, S, K, D))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def masked(q, k, v, documents, window):
    """The definition: softmax over the earlier positions of the same document, within the window."""
    document = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents])
    distance = torch.arange(S)[:, None] - torch.arange(S)
    visible = (document[:, :, None] == document[:, None]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    k, v = k.repeat_interleave(H // K, 2), v.repeat_interleave(H // K, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 12, 40])
@pytest.mark.parametrize(
    "documents",
    [((12,),) * 3, ((5, 7),) * 3, ((12,), (12,), (1, 4, 7)), ((1, 11), (12,), (1, 11)), ((1,) * 12,) * 3],
)
def test_equals_the_definition(documents, window):
    q, k, v = heads()
    out = attention(q, k, v, documents=documents, window=window, scale=SCALE)
    expected = masked(q, k, v, documents, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    incoming = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), incoming)
    for found, right in zip(gradients, torch.autograd.grad(expected, (q, k, v), incoming), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, 3])
def test_a_document_does_not_see_another(window):
    documents = ((5, 7), (5, 7), (12,))
    q, k, v = (part.detach() for part in heads(dtype=torch.float32))
    before = attention(q, k, v, documents=documents, window=window, scale=SCALE)
    for part in (q, k, v):
        part[:2, :5] = torch.randn_like(part[:2, :5]) * 10
    after = attention(q, k, v, documents=documents, window=window, scale=SCALE)
    assert torch.equal(before[:2, 5:], after[:2, 5:])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[:2, :5], after[:2, :5])


def test_reads_views_of_one_projection_without_a_copy(monkeypatch):
    seen = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **kwargs: seen.append(args) or fused(*args, **kwargs)
    )
    whole = torch.randn(B, S, H + 2 * K, D, dtype=torch.float64)
    q, k, v = whole.split((H, K, K), 2)
    out = attention(q, k, v, documents=((S,),) * B, window=None, scale=SCALE)
    assert [part.untyped_storage().data_ptr() for part in seen[0]] == [whole.untyped_storage().data_ptr()] * 3
    assert len(seen) == 1
    assert out.is_contiguous()  # so that joining the heads is a view too
    torch.testing.assert_close(out, masked(q, k, v, ((S,),) * B, None), rtol=0, atol=1e-14)


def test_neighbouring_rows_that_are_cut_alike_share_their_calls(monkeypatch):
    shapes = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, *args, **kwargs: shapes.append((q.shape[0], q.shape[2])) or fused(q, *args, **kwargs),
    )
    q, k, v = heads()
    attention(q, k, v, documents=((4, 8), (4, 8), (12,)), window=None, scale=SCALE)
    assert shapes == [(2, 4), (2, 8), (1, 12)]


def test_heads_that_the_kernel_would_misread_are_refused():
    q, k, v = heads()
    with pytest.raises(AssertionError, match="contiguous"):
        attention(
            q.transpose(2, 3).contiguous().transpose(2, 3), k, v, documents=((S,),) * B, window=None, scale=1
        )
    with pytest.raises(AssertionError, match="divide"):
        attention(q[:, :, :5], k, v, documents=((S,),) * B, window=None, scale=1)


@pytest.mark.parametrize("length", [129, 300, 600])
def test_squares_in_blocks_equal_the_kernel(length):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, length, n, D, generator=generator, dtype=torch.float64) for n in (H, K, K, H)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = attention(q, k, v, documents=((length,),) * 2, window=None, scale=SCALE)
    whole = F.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in inputs), is_causal=True, scale=SCALE, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-13)
    for found, right in zip(*(torch.autograd.grad(o, inputs, grad) for o in (out, whole)), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-13)
