"""all_gather, all_to_all, broadcast_, send, recv_ and barrier: every size, type and stride."""

import time

import pytest
import torch
from torch import Tensor

from fourfold.collectives import all_gather, all_to_all, backend, barrier, broadcast_, exchange_, recv_, send
from fourfold.mesh import Mesh
from fourfold.specs import Layout
from tests.collectives.axes import axis_of_all, numbered, strided
from tests.ranks import RankPool

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)


def same(result: Tensor, expected: Tensor) -> bool:
    return result.dtype == expected.dtype and torch.equal(
        result.view(torch.uint8), expected.view(torch.uint8)
    )


def check_all_gather() -> None:
    axis = axis_of_all()
    for rows in (1, 3, 70_000):  # 70000 rows of 2 are past the small ones
        expected = torch.cat([numbered(rank, rows, 2) for rank in range(axis.size)])
        for arrange in (torch.clone, strided):
            tensor = arrange(numbered(axis.rank, rows, 2))
            assert torch.equal(all_gather(tensor, axis), expected)
            out = arrange(torch.full_like(expected, -1))
            assert all_gather(tensor, axis, out=out) is out
            assert torch.equal(out, expected)
            out = arrange(torch.full_like(expected, -1))
            own = out.chunk(axis.size)[axis.rank]
            own.copy_(tensor)
            all_gather(own, axis, out=out)
            assert torch.equal(out, expected)
    assert all_gather(torch.tensor(2 + axis.rank), axis).tolist() == list(range(2, 2 + axis.size))
    assert all_gather(torch.empty(0, 2), axis).shape == (0, 2)
    assert all_gather(torch.empty(2, 0), axis).shape == (2 * axis.size, 0)


def check_uneven_all_gather() -> None:
    axis = axis_of_all()
    for scale in (1, 50_000):
        for counts in ([5, 0, 2, 1][: axis.size], [0] * (axis.size - 1) + [3], [0] * axis.size):
            counts = [count * scale for count in counts]
            tensor = strided(numbered(axis.rank, counts[axis.rank], 3))
            expected = torch.cat([numbered(rank, count, 3) for rank, count in enumerate(counts)])
            assert torch.equal(all_gather(tensor, axis, counts=counts), expected)


def check_all_to_all() -> None:
    axis = axis_of_all()
    for rows in (1, 3, 20_000):
        sent = [numbered(rank, axis.size * rows, 2) for rank in range(axis.size)]
        expected = torch.cat([tensor.chunk(axis.size)[axis.rank] for tensor in sent])
        for arrange in (torch.clone, strided):
            tensor = arrange(sent[axis.rank])
            assert torch.equal(all_to_all(tensor, axis), expected)
            out = arrange(torch.full_like(expected, -1))
            assert all_to_all(tensor, axis, out=out) is out
            assert torch.equal(out, expected)
    assert all_to_all(torch.empty(0, 2), axis).shape == (0, 2)


def check_uneven_all_to_all() -> None:
    axis = axis_of_all()
    # Row i of the table: how many rows rank i sends to each. Rank 1 sends nothing, nobody sends to rank 0.
    table = [[0, 3, 1, 2], [0, 0, 0, 0], [0, 5, 2, 0], [0, 1, 0, 4]]
    table = [row[: axis.size] for row in table[: axis.size]]
    sent = [numbered(rank, sum(row), 3) for rank, row in enumerate(table)]
    received = [row[axis.rank] for row in table]
    result = all_to_all(strided(sent[axis.rank]), axis, send_counts=table[axis.rank], receive_counts=received)
    parts = [tensor.split(row)[axis.rank] for tensor, row in zip(sent, table, strict=True)]
    assert torch.equal(result, torch.cat(parts))
    nothing = [0] * axis.size
    assert all_to_all(torch.empty(0, 3), axis, send_counts=nothing, receive_counts=nothing).shape == (0, 3)


def check_broadcast() -> None:
    axis = axis_of_all()
    for shape in ((), (3, 5), (400_000,), (0, 2)):
        for source in range(axis.size):
            for arrange in (torch.clone, strided):
                tensor = arrange(numbered(axis.rank, *shape))
                assert broadcast_(tensor, axis, source=source) is tensor
                assert torch.equal(tensor, numbered(source, *shape))


def check_dtypes() -> None:
    axis = axis_of_all()
    everyone = range(axis.size)
    for dtype in DTYPES:
        mine = [(numbered(rank, axis.size, 3) % 7).to(dtype) for rank in everyone]
        tensor = mine[axis.rank]
        joined = torch.cat([part.view(torch.uint8) for part in mine]).view(dtype)
        assert same(all_gather(tensor, axis), joined)
        dealt = torch.cat([part[axis.rank : axis.rank + 1].view(torch.uint8) for part in mine]).view(dtype)
        assert same(all_to_all(tensor, axis), dealt)
        assert same(broadcast_(tensor.clone(), axis, source=1), mine[1])
        around = send(tensor, axis, destination=(axis.rank + 1) % axis.size, blocking=False)
        before = (axis.rank - 1) % axis.size
        assert same(recv_(torch.zeros_like(tensor), axis, source=before), mine[before])
        around.wait()
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert all_gather(conjugate, axis).tolist() == [1 - 2j, 3 + 1j] * axis.size
    assert all_gather(conjugate.imag, axis).tolist() == [-2, 1] * axis.size


def check_send_and_recv() -> None:
    """Several messages around the ring, awaited in the opposite order, with a collective in between."""
    axis = axis_of_all()
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    shapes = ((), (7,), (300, 500), (0, 2), (2, 3))
    outgoing = [
        send(strided(numbered(axis.rank, *shape) + number), axis, destination=after, blocking=False)
        for number, shape in enumerate(shapes)
    ]
    gathered = all_gather(torch.full((100_000,), float(axis.rank)), axis)
    assert gathered[::100_000].tolist() == list(range(axis.size))
    buffers = [strided(torch.zeros(shape)) for shape in shapes]
    incoming = [recv_(buffer, axis, source=before, blocking=False) for buffer in buffers]
    for number, shape in reversed(list(enumerate(shapes))):
        assert incoming[number].wait() is buffers[number]
        assert torch.equal(buffers[number], numbered(before, *shape) + number)
        outgoing[number].wait()


def check_exchange() -> None:
    """With the next rank and the one before, and meanwhile from one rank to another alone."""
    axis = axis_of_all()
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    around = {peer: strided(numbered(axis.rank, 3, 4) + peer) for peer in (after, before)}
    buffers = {peer: strided(torch.zeros(3, 4)) for peer in around}
    first = exchange_(around, buffers, axis)
    sent = {1: torch.full((100_000,), 7.0)} if axis.rank == 0 else {}
    received = {0: torch.zeros(100_000)} if axis.rank == 1 else {}
    exchange_(sent, received, axis).wait()
    assert all((tensor == 7).all() for tensor in received.values())
    large = torch.zeros(300_000)  # on 2 ranks 2.4 MB together, too much for a collective
    exchange_({after: numbered(axis.rank, 300_000)}, {before: large}, axis).wait()
    assert torch.equal(large, numbered(before, 300_000))
    first.wait()
    for peer, buffer in buffers.items():
        assert torch.equal(buffer, numbered(peer, 3, 4) + axis.rank)
    with pytest.raises(ValueError, match="cannot be its own peer"):
        exchange_({}, {axis.rank: torch.zeros(1)}, axis)


def check_nccl_ways() -> None:
    """The operations that NCCL has are gloo's too, so that they can be called here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_has_nccl", lambda tensor, axis: True)
        check_all_gather()
        check_uneven_all_gather()


def column_of_case() -> list[float]:
    axis = axis_of_all()
    column = torch.tensor([[axis.rank + 1.0, 99.0], [axis.rank + 11.0, 99.0]])[:, 0]
    return broadcast_(column, axis, source=0).tolist()


def times_at_barrier() -> tuple[float, float]:
    axis = axis_of_all()
    barrier(axis)
    time.sleep(0.2 * axis.rank)
    arrived = time.monotonic()
    barrier(axis)
    return arrived, time.monotonic()


def refuse_misuse() -> None:
    axis = axis_of_all()
    with pytest.raises(ValueError, match=f"send on axis dp: rank {axis.rank} cannot be its own peer"):
        send(torch.ones(2), axis, destination=axis.rank)
    with pytest.raises(ValueError, match=f"recv on axis dp: rank {axis.rank} cannot be its own peer"):
        recv_(torch.ones(2), axis, source=axis.rank)
    with pytest.raises(ValueError, match="broadcast on axis dp: rank -1 is not one of 0 to 1"):
        broadcast_(torch.ones(2), axis, source=-1)
    with pytest.raises(ValueError, match=r"counts \[1, 1\] do not fit 2 ranks with 2 rows"):
        all_gather(torch.ones(2), axis, counts=[1, 1])
    with pytest.raises(ValueError, match=r"2 ranks do not divide dim 0 of \(3,\)"):
        all_to_all(torch.ones(3), axis)
    with pytest.raises(ValueError, match="give both send_counts and receive_counts, or none"):
        all_to_all(torch.ones(2), axis, send_counts=[1, 1])
    with pytest.raises(ValueError, match=r"send_counts \[1, 2\] and receive_counts \[1, 1\] do not fit"):
        all_to_all(torch.ones(2), axis, send_counts=[1, 2], receive_counts=[1, 1])
    with pytest.raises(ValueError, match=r"out is torch.float64 \(4,\)"):
        all_gather(torch.ones(2), axis, out=torch.ones(4, dtype=torch.float64))
    expanded = torch.ones(1).expand(3)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        broadcast_(expanded, axis, source=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_all_gather)


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_all_gather(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_uneven_all_gather)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_to_all(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_all_to_all)


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_all_to_all(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_uneven_all_to_all)


@pytest.mark.parametrize("world_size", [2, 3])
def test_broadcast(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_broadcast)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_dtype_moves(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_dtypes)


@pytest.mark.parametrize("world_size", [2, 3])
def test_send_and_recv(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_send_and_recv)


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_exchange)


def test_ways_of_nccl(ranks: RankPool) -> None:
    ranks(2, check_nccl_ways)


def test_strided_column_is_broadcast(ranks: RankPool) -> None:
    # COL-01
    # pytorch/pytorch#192920: gloo alone leaves [1, 12] on rank 1.
    assert ranks(2, column_of_case) == [[1.0, 11.0]] * 2


def test_barrier(ranks: RankPool) -> None:
    times = ranks(3, times_at_barrier)
    assert max(arrived for arrived, _ in times) <= min(left for _, left in times)


def test_misuse_is_refused(ranks: RankPool) -> None:
    ranks(2, refuse_misuse)


def test_axis_of_one_rank() -> None:
    axis = Mesh(Layout()).dp
    tensor = numbered(0, 4, 3)
    for result in (all_gather(tensor, axis), all_to_all(tensor, axis)):
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr()
    assert all_gather(tensor, axis, out=tensor) is tensor
    assert broadcast_(tensor, axis, source=0) is tensor
    assert torch.equal(all_gather(torch.tensor(3.0), axis), torch.tensor([3.0]))
    assert torch.equal(all_gather(tensor, axis, blocking=False).wait(), tensor)
    barrier(axis)
    with pytest.raises(ValueError, match="cannot be its own peer"):
        send(tensor, axis, destination=0)
