"""Attention over ranks equals attention on one."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.models.attention import attention
from fourfold.sequence.attention import ContextAttention
from fourfold.sequence.partition import partition_of
from fourfold.specs import Layout
from fourfold.specs.spec import divisors
from tests.ranks import RankPool

Documents = tuple[tuple[int, ...], ...]


def on_a_rank(
    tensors: list[Tensor],
    documents: Documents,
    window: int | None,
    ulysses: int,
    causal: bool = True,
    sinks_H: Tensor | None = None,
) -> tuple[tuple[tuple[range, ...], ...], Tensor, list[Tensor]]:
    """This rank's columns, output and gradients; ``tensors`` are q, k, v and the output's gradient, whole."""
    mesh = Mesh(Layout(cp=torch.distributed.get_world_size()))
    ring, near = mesh.split("cp", ulysses)
    attend = ContextAttention(ring=ring, ulysses=near, causal=causal)
    columns = attend.columns(documents)
    index_BS = torch.tensor([[i for run in row for i in run] for row in columns], dtype=torch.int64)
    q, k, v, grad = (
        tensor.take_along_dim(index_BS.view(len(columns), -1)[..., None, None], 1) for tensor in tensors
    )
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    if sinks_H is not None:
        inputs.append(sinks_H.detach().requires_grad_())
    out = attend(*inputs[:3], documents=documents, window=window, scale=0.3, sinks_H=(*inputs, None)[3])
    return columns, out.detach(), list(torch.autograd.grad(out, inputs, grad))


def check(
    ranks: RankPool,
    world_size: int,
    ulysses: int,
    documents: Documents,
    *,
    heads: int = 8,
    kv_heads: int = 4,
    window: int | None = None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, length = len(documents), sum(documents[0])
    sizes = (heads, kv_heads, kv_heads, heads)
    tensors = [torch.randn(rows, length, n, 6, generator=generator, dtype=torch.float64) for n in sizes]
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    expected = attention(*inputs, documents=documents, window=window, scale=0.3)
    gradients = torch.autograd.grad(expected, inputs, tensors[3])
    found = ranks(world_size, on_a_rank, tensors, documents, window, ulysses)
    seen = torch.zeros(rows, length, dtype=torch.int64)
    for columns, out, own in found:
        for row, runs in enumerate(columns):
            index = torch.tensor([i for run in runs for i in run], dtype=torch.int64)
            seen[row, index] += 1
            torch.testing.assert_close(out[row], expected.detach()[row, index], rtol=0, atol=1e-12)
            for mine, whole in zip(own, gradients, strict=True):
                torch.testing.assert_close(mine[row], whole[row, index], rtol=0, atol=1e-12)
    assert (seen == 1).all()


GRIDS = [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4)]
PACKS = {
    "one document": ((24,), (24,)),
    "boundaries on, before and after shard edges": ((12, 12), (5, 8, 11), (24,)),
    "documents of one token": ((1,) * 7 + (16, 1), (1, 22, 1)),
    "a length that no number of ranks divides": ((23,), (4, 19)),
    "many short documents": ((3,) * 8, (2,) * 12, (1,) * 24),
    "a row shorter than the ranks": ((3,), (1, 2)),
}


@pytest.mark.parametrize("documents", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize(("world_size", "ulysses"), GRIDS)
def test_any_documents_on_any_grid(
    ranks: RankPool, world_size: int, ulysses: int, documents: Documents
) -> None:
    # CP-05
    check(ranks, world_size, ulysses, documents)
    check(ranks, world_size, ulysses, documents, window=5)


@st.composite
def packs(draw: st.DrawFn) -> Documents:
    """Rows of one length, in documents of any lengths."""
    length = draw(st.integers(1, 40))
    ends = st.sets(st.integers(1, length), max_size=8).map(lambda found: sorted({0, length} | found))
    rows = draw(st.lists(ends, min_size=1, max_size=3))
    return tuple(tuple(stop - start for start, stop in pairwise(row)) for row in rows)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@settings(max_examples=20)
@given(packs(), st.data())
def test_anything_equals_full_attention(
    ranks: RankPool, world_size: int, documents: Documents, data: st.DataObject
) -> None:
    ulysses = data.draw(st.sampled_from(divisors(world_size)))
    kv_heads = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if n % ulysses == 0 or ulysses % n == 0]))
    heads = ulysses * kv_heads * data.draw(st.integers(1, 2))
    window = data.draw(st.one_of(st.none(), st.integers(1, 45)))
    check(ranks, world_size, ulysses, documents, heads=heads, kv_heads=kv_heads, window=window)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("world_size", "ulysses"), GRIDS)
def test_grouped_heads(ranks: RankPool, world_size: int, ulysses: int, kv_heads: int) -> None:
    # CP-15
    check(ranks, world_size, ulysses, ((17,), (9, 8)), kv_heads=kv_heads)


def test_one_key_value_head_for_eight_ranks(ranks: RankPool) -> None:
    # CP-15
    check(ranks, 8, 8, ((17,), (9, 8)), kv_heads=1)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 100])
def test_windows(ranks: RankPool, window: int) -> None:
    # CP-11
    check(ranks, 4, 2, ((29,), (11, 18)), window=window)
    check(ranks, 3, 1, ((29,), (11, 18)), window=window)


@pytest.mark.parametrize(("world_size", "ulysses"), [(2, 1), (2, 2), (3, 1)])
def test_without_causal_order(ranks: RankPool, world_size: int, ulysses: int) -> None:
    """Tokens see later ones too, of their own document alone, whoever holds them."""
    # CP-11
    documents = ((4, 19), (23,))
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 23, 2, 6, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    of_document = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
    )
    mask = (of_document[:, :, None] == of_document[:, None])[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in inputs), attn_mask=mask, scale=0.3
    ).transpose(1, 2)
    gradients = torch.autograd.grad(expected, inputs, grad)
    for columns, out, own in ranks(world_size, on_a_rank, [q, k, v, grad], documents, None, ulysses, False):
        for row, runs in enumerate(columns):
            index = [i for run in runs for i in run]
            torch.testing.assert_close(out[row], expected.detach()[row, index], rtol=0, atol=1e-12)
            for mine, whole in zip(own, gradients, strict=True):
                torch.testing.assert_close(mine[row], whole[row, index], rtol=0, atol=1e-12)


def errors_in_bfloat16(ranks: RankPool, world_size: int, ulysses: int) -> list[float]:
    """Root mean square errors of the output and the gradients against float64, relative."""
    documents = ((256,),)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 256, n, 32, generator=generator).bfloat16() for n in (4, 2, 2, 4)]
    exact = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    out = attention(*exact, documents=documents, window=None, scale=0.3)
    right = [out.detach(), *torch.autograd.grad(out, exact, tensors[3].double())]
    if world_size == 1:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        kernel = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.transpose(1, 2) for tensor in leaves), is_causal=True, scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        found = [kernel.detach(), *torch.autograd.grad(kernel, leaves, tensors[3])]
    else:
        found = [torch.empty_like(tensor) for tensor in tensors[:1] + tensors[:3]]
        for columns, part, gradients in ranks(world_size, on_a_rank, tensors, documents, None, ulysses):
            index = [i for run in columns[0] for i in run]
            for whole, mine in zip(found, [part, *gradients], strict=True):
                whole[:, index] = mine
    return [
        float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt())
        for a, b in zip(found, right, strict=True)
    ]


def test_bfloat16_is_as_exact_on_any_number_of_ranks(ranks: RankPool) -> None:
    """At most 1.5 times the error of PyTorch's own kernel on one rank, and no more on 8 ranks than on 2."""
    # CP-09
    alone = errors_in_bfloat16(ranks, 1, 1)
    two, eight = (errors_in_bfloat16(ranks, world_size, 1) for world_size in (2, 8))
    for error, of_two, of_eight in zip(alone, two, eight, strict=True):
        assert of_two < 1.5 * error
        assert of_eight < 1.5 * error
        assert of_eight < 1.2 * of_two
    for ulysses in (2, 4):  # of 4 ranks two each have a copy of a key/value head
        for error, of_ulysses in zip(alone, errors_in_bfloat16(ranks, 4, ulysses), strict=True):
            assert of_ulysses < 1.5 * error


@pytest.mark.parametrize(("world_size", "ulysses"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_sinks_take_part_in_the_softmax(ranks: RankPool, world_size: int, ulysses: int) -> None:
    """As one more column of scores without a value, whose logit is learned: packed rows and a window."""
    documents, window, length = ((23,), (4, 19)), 9, 23
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, length, n, 6, generator=generator, dtype=torch.float64) for n in (8, 4, 4, 8)]
    sinks = torch.tensor([-9.0, -1, 0, 0.5, 1, 2, 4, 30], dtype=torch.float64)
    q, k, v, sinks_H = inputs = [tensor.clone().requires_grad_() for tensor in (*tensors[:3], sinks)]
    scores = 0.3 * torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2))
    number = torch.tensor([[0] * 23, [0] * 4 + [1] * 19])
    apart = torch.arange(length)[:, None] - torch.arange(length)
    allowed = (number[:, :, None] == number[:, None]) & (apart >= 0) & (apart < window)
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    column = sinks_H[None, :, None, None].expand(2, -1, length, 1)
    shares = torch.cat([scores, column], 3).softmax(3)[..., :length]
    expected = torch.einsum("bhqk,bkhd->bqhd", shares, v.repeat_interleave(2, 2))
    *gradients, of_sinks = torch.autograd.grad(expected, inputs, tensors[3])
    found = ranks(world_size, on_a_rank, tensors, documents, window, ulysses, True, sinks)
    torch.testing.assert_close(sum(own[3] for *_, own in found), of_sinks, rtol=0, atol=1e-12)
    for columns, out, own in found:
        for row, runs in enumerate(columns):
            index = torch.tensor([i for run in runs for i in run], dtype=torch.int64)
            pairs = zip((out, *own[:3]), (expected.detach(), *gradients), strict=True)
            for mine, whole in pairs:
                torch.testing.assert_close(mine[row], whole[row, index], rtol=0, atol=1e-12)


def test_tokens_come_back_in_their_order() -> None:
    """Any tensor that is like the sequence is cut alike, and comes back in order."""
    # CP-12
    ids = torch.arange(32).view(2, 16)
    whole = Microbatch(ids, ids + 100, ids + 200, ((16,), (3, 13)))
    partitions = [partition_of(row, 2, 2) for row in whole.documents]
    parts = [whole.take(tuple(p.columns(rank) for p in partitions)) for rank in range(4)]
    for row in range(2):
        order = torch.tensor([i for rank in range(4) for run in partitions[row].columns(rank) for i in run])
        back = torch.empty(16, dtype=torch.int64)
        back[order] = torch.cat([part.input_ids_BS[row] for part in parts])
        assert torch.equal(back, ids[row])
    for part in parts:
        assert torch.equal(part.labels_BS, part.input_ids_BS + 100)
        assert torch.equal(part.position_ids_BS, part.input_ids_BS + 200)
    lengths = torch.cat([part.token_lengths[1] for part in parts])
    assert sorted(lengths.tolist()) == [3] * 3 + [13] * 13


def refusal(ulysses: int, shape: tuple[int, int, int, int], causal: bool, arguments: dict[str, Any]) -> str:
    """What a rank is told for queries of this many rows, tokens, heads and key/value heads."""
    rows, tokens, heads, kv_heads = shape
    ring, near = Mesh(Layout(cp=2)).split("cp", ulysses)
    attend = ContextAttention(ring=ring, ulysses=near, causal=causal)
    q, k = torch.zeros(rows, tokens, heads, 4), torch.zeros(rows, tokens, kv_heads, 4)
    with pytest.raises(UserError) as caught:
        attend(q, k, k, **({"documents": ((16,),) * rows, "window": None, "scale": 1.0} | arguments))
    return str(caught.value)


FITS = (1, 8, 4, 2)
REFUSED: dict[str, tuple[int, tuple[int, int, int, int], bool, dict[str, Any], str]] = {
    "whole rows": (1, (1, 16, 4, 2), True, {}, "queries of 16 tokens of a row, of whose 16 this rank has 8"),
    "documents of a part": (1, FITS, True, {"documents": ((8,),)}, "of whose 8 this rank has 4"),
    "rows of other lengths": (
        1, (2, 8, 4, 2), True, {"documents": ((16,), (9, 8))}, "rows sum to 16 or 17 tokens",
    ),
    "an empty document": (1, FITS, True, {"documents": ((0, 16),)}, "documents of row 0 are (0, 16)"),
    "a row without documents": (1, FITS, True, {"documents": ((),)}, "documents of row 0 are ()"),
    "other rows": (1, FITS, True, {"documents": ((16,),) * 3}, "of 3 rows, and the queries of 1"),
    "sinks of other heads": (1, FITS, True, {"sinks_H": torch.ones(2)}, "shape (2,) for 4 query heads"),
    "a window of nothing": (1, FITS, True, {"window": 0}, "window=0 (Sequence axis): a token sees itself"),
    "a window ahead": (1, FITS, True, {"window": -1}, "window=-1 (Sequence axis): a token sees itself"),
    "a window both ways": (1, FITS, False, {"window": 4}, "window=4 without causal order"),
    "heads that are not shared equally": (1, (1, 8, 4, 3), True, {}, "use 1, 2 or 4"),
    "heads that cannot be dealt": (
        2, (1, 8, 3, 3), True, {},
        "ulysses=2 does not divide the 3 query heads of a rank, and neither divides the 3 key/value heads of "
        "a rank nor is a multiple (Sequence axis): use 1 of the 2 ranks, as in mesh.split('cp', 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ulysses", "shape", "causal", "arguments", "message"), REFUSED.values(), ids=REFUSED
)
def test_arguments_that_would_give_wrong_numbers_are_refused(
    ranks: RankPool,
    ulysses: int,
    shape: tuple[int, int, int, int],
    causal: bool,
    arguments: dict[str, Any],
    message: str,
) -> None:
    # CP-17
    for found in ranks(2, refusal, ulysses, shape, causal, arguments):
        assert message in found
