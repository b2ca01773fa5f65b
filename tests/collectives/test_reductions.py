"""all_reduce_, reduce_scatter and reduce_: right for every size, type and stride."""

import pytest
import torch

from fourfold.collectives import all_reduce_, backend, reduce_, reduce_scatter
from fourfold.mesh import Mesh
from fourfold.specs import Layout
from tests.collectives.axes import axis_of_all, numbered, strided
from tests.ranks import RankPool

# On both sides of where the way changes: 64 KiB of an all-reduce, 4 MiB of a reduce.
SIZES = (1, 7, 40_000, 1_100_000)


def check_all_reduce(dtype: torch.dtype) -> None:
    axis = axis_of_all()
    everyone = 2**axis.size - 1
    for size in SIZES[:3]:
        for arrange in (torch.clone, strided):
            index = torch.arange(size) % 16 + 1
            values = {"sum": index * everyone, "max": index * 2 ** (axis.size - 1), "min": index}
            for op, expected in values.items():
                tensor = arrange((index * 2**axis.rank).to(dtype))
                result = all_reduce_(tensor, axis, op=op)
                assert result is tensor
                torch.testing.assert_close(tensor, expected.to(dtype), rtol=0, atol=0)
    scalar = all_reduce_(torch.tensor(2.0**axis.rank, dtype=dtype), axis)
    assert scalar.shape == ()
    assert scalar.item() == everyone
    assert all_reduce_(torch.empty(0, 3, dtype=dtype), axis).shape == (0, 3)


def bits_of_random_sums() -> list[torch.Tensor]:
    axis = axis_of_all()
    torch.manual_seed(axis.rank)
    return [all_reduce_(torch.randn(size), axis) for size in (1000, 40_001)]


def sixteen_bit_sums() -> list[float]:
    """1 + 2**-8 + 2**-8 in bfloat16 is 1 if each sum is rounded, and 1.0078125 if only the last is."""
    axis = axis_of_all()
    mine = torch.tensor([1.0, 2.0**-8, 2.0**-8][axis.rank], dtype=torch.bfloat16)
    parts = reduce_scatter(mine.expand(3), axis)
    whole = mine.clone()
    reduce_(whole, axis, destination=axis.rank if axis.size == 1 else 0)
    return [all_reduce_(mine.clone(), axis).item(), parts.item(), whole.item()]


def check_reduce_scatter(dtype: torch.dtype) -> None:
    axis = axis_of_all()
    everyone = 2**axis.size - 1
    for rows in (1, 3, 20_000):
        expected = numbered(0, rows * axis.size, 2).chunk(axis.size)[axis.rank] * everyone
        for arrange in (torch.clone, strided):
            tensor = arrange(numbered(axis.rank, rows * axis.size, 2, dtype=dtype))
            before = tensor.clone()
            result = reduce_scatter(tensor, axis)
            torch.testing.assert_close(result, expected.to(dtype), rtol=0, atol=0)
            assert torch.equal(tensor, before)
            out = arrange(torch.full_like(result, -1))
            assert reduce_scatter(tensor, axis, out=out) is out
            assert torch.equal(out, result)
        own = before.chunk(axis.size)[axis.rank]
        reduce_scatter(before, axis, out=own)
        assert torch.equal(own, result)
    assert reduce_scatter(torch.empty(0, 2, dtype=dtype), axis).shape == (0, 2)


def check_uneven_reduce_scatter() -> None:
    axis = axis_of_all()
    for counts in ([5, 0, 2, 1][: axis.size], [0] * (axis.size - 1) + [3], [0] * axis.size):
        tensor = numbered(axis.rank, sum(counts), 3)
        result = reduce_scatter(tensor, axis, counts=counts)
        expected = (numbered(0, sum(counts), 3) * (2**axis.size - 1)).split(counts)[axis.rank]
        assert torch.equal(result, expected)


def check_reduce() -> None:
    axis = axis_of_all()
    for size in SIZES:
        for arrange in (torch.clone, strided):
            for destination in range(axis.size):
                mine = (torch.arange(size) % 16 + 1).float() * 2**axis.rank
                tensor = arrange(mine)
                assert reduce_(tensor, axis, destination=destination) is tensor
                total = (torch.arange(size) % 16 + 1).float() * (2**axis.size - 1)
                assert torch.equal(tensor, total if axis.rank == destination else mine)


def check_nccl_ways() -> None:
    """The operations that NCCL has are gloo's too, so that they can be called here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_has_nccl", lambda tensor, axis: True)
        check_all_reduce(torch.float32)
        check_reduce_scatter(torch.float32)
        check_uneven_reduce_scatter()
        axis = axis_of_all()
        tensor = reduce_(numbered(axis.rank, 5), axis, destination=1)
        assert axis.rank != 1 or torch.equal(tensor, numbered(0, 5) * (2**axis.size - 1))


def column_of_case() -> torch.Tensor:
    axis = axis_of_all()
    tensor = torch.tensor([[axis.rank + 1.0, 99.0], [axis.rank + 11.0, 99.0]])
    all_reduce_(tensor[:, 0], axis)
    return tensor


def refuse_misuse() -> None:
    axis = axis_of_all()
    with pytest.raises(ValueError, match=r"2 ranks do not divide dim 0 of \(3, 2\)"):
        reduce_scatter(torch.ones(3, 2), axis)
    with pytest.raises(ValueError, match=r"counts \[1, 1\] do not deal the 3 rows to 2 ranks"):
        reduce_scatter(torch.ones(3, 2), axis, counts=[1, 1])
    with pytest.raises(
        ValueError, match=r"out is torch.float32 \(2,\) on cpu, the result is torch.float32 \(1,\)"
    ):
        reduce_scatter(torch.ones(2), axis, out=torch.ones(2))
    with pytest.raises(ValueError, match="reduce on axis dp: rank 2 is not one of 0 to 1"):
        reduce_(torch.ones(2), axis, destination=2)
    with pytest.raises(ValueError, match="op='mean' is not sum, max or min"):
        all_reduce_(torch.ones(2), axis, op="mean")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_all_reduce(ranks: RankPool, world_size: int, dtype: torch.dtype) -> None:
    ranks(world_size, check_all_reduce, dtype)


def test_all_reduce_gives_all_ranks_the_same_bits(ranks: RankPool) -> None:
    first, *others = ranks(4, bits_of_random_sums)
    for small, large in others:
        assert torch.equal(small, first[0])
        assert torch.equal(large, first[1])


def test_sixteen_bit_sums_are_rounded_once(ranks: RankPool) -> None:
    results = ranks(3, sixteen_bit_sums)
    assert [result[:2] for result in results] == [[1.0078125, 1.0078125]] * 3
    assert results[0][2] == 1.0078125


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reduce_scatter(ranks: RankPool, world_size: int, dtype: torch.dtype) -> None:
    ranks(world_size, check_reduce_scatter, dtype)


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_reduce_scatter(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_uneven_reduce_scatter)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_leaves_the_other_ranks_alone(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_reduce)


def test_ways_of_nccl(ranks: RankPool) -> None:
    ranks(2, check_nccl_ways)


def test_strided_column_is_summed(ranks: RankPool) -> None:
    # COL-01
    # pytorch/pytorch#192920: gloo alone leaves [3, 11] and [3, 12].
    assert [result.tolist() for result in ranks(2, column_of_case)] == [[[3.0, 99.0], [23.0, 99.0]]] * 2


def test_misuse_is_refused(ranks: RankPool) -> None:
    ranks(2, refuse_misuse)


def test_axis_of_one_rank() -> None:
    axis = Mesh(Layout()).dp
    tensor = numbered(0, 4, 3)
    assert all_reduce_(tensor, axis) is tensor
    assert reduce_(tensor, axis, destination=0) is tensor
    part = reduce_scatter(tensor, axis)
    assert torch.equal(part, tensor)
    assert part.data_ptr() != tensor.data_ptr()
    assert torch.equal(tensor, numbered(0, 4, 3))
    pending = all_reduce_(tensor, axis, blocking=False)
    assert pending.wait() is tensor
