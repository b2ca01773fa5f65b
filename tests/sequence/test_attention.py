"""Attention over ranks equals attention on one."""

import pytest
import torch
from torch import Tensor

from fourfold.mesh import Mesh
from fourfold.models.attention import attention
from fourfold.sequence.attention import ContextAttention
from fourfold.specs import Layout
from tests.ranks import RankPool

Documents = tuple[tuple[int, ...], ...]


def on_a_rank(
    tensors: list[Tensor], documents: Documents, window: int | None, ulysses: int
) -> tuple[tuple[tuple[range, ...], ...], Tensor, list[Tensor]]:
    """This rank's columns, output and gradients; ``tensors`` are q, k, v and the output's gradient, whole."""
    mesh = Mesh(Layout(cp=torch.distributed.get_world_size()))
    ring, near = mesh.split("cp", ulysses)
    attend = ContextAttention(ring=ring, ulysses=near)
    columns = attend.columns(documents)
    index_BS = torch.tensor([[i for run in row for i in run] for row in columns], dtype=torch.int64)
    q, k, v, grad = (
        tensor.take_along_dim(index_BS.view(len(columns), -1)[..., None, None], 1) for tensor in tensors
    )
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attend(*inputs, documents=documents, window=window, scale=0.3)
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
    check(ranks, world_size, ulysses, documents)
    check(ranks, world_size, ulysses, documents, window=5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("world_size", "ulysses"), GRIDS)
def test_grouped_heads(ranks: RankPool, world_size: int, ulysses: int, kv_heads: int) -> None:
    check(ranks, world_size, ulysses, ((17,), (9, 8)), kv_heads=kv_heads)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 100])
def test_windows(ranks: RankPool, window: int) -> None:
    check(ranks, 4, 2, ((29,), (11, 18)), window=window)
    check(ranks, 3, 1, ((29,), (11, 18)), window=window)
