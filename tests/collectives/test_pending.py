"""Collectives under way: their result comes with wait, and their failure with a name."""

import os
import signal
import time

import pytest
import torch

from fourfold.collectives import CollectiveError, Pending, all_gather, all_reduce_, broadcast_, reduce_scatter
from fourfold.mesh import Mesh
from fourfold.specs import Layout
from tests.collectives.axes import axis_of_all, numbered
from tests.ranks import RankDied, RankPool


def overlap_many() -> None:
    """Many collectives at once, on two axes, awaited in another order, with inputs dropped at once."""
    mesh = Mesh(Layout(dp=2, tp=2))
    started = []
    for number in range(20):
        axis = (mesh.dp, mesh.tp)[number % 2]
        size = (10, 30_000)[number % 3 == 0]
        mine = [numbered(rank, size).remainder(97) + number for rank in axis.ranks]
        started += [
            (all_reduce_(mine[axis.rank].clone(), axis, blocking=False), mine[0] + mine[1]),
            (all_gather(mine[axis.rank].clone(), axis, blocking=False), torch.cat(mine)),
            (
                reduce_scatter(mine[axis.rank].clone(), axis, blocking=False),
                (mine[0] + mine[1]).chunk(2)[axis.rank],
            ),
            (broadcast_(mine[axis.rank].clone(), axis, source=1, blocking=False), mine[1]),
        ]
    for pending, expected in reversed(started):
        assert torch.equal(pending.wait(), expected)


def reuse_after_wait() -> None:
    """Overwrite the input with NaN as soon as that is allowed."""
    axis = axis_of_all()
    for size in (1_000, 500_000):
        for _ in range(20):
            tensor, source = torch.ones(size), torch.ones(size)
            summed = all_reduce_(tensor, axis, blocking=False)
            parts = reduce_scatter(source, axis, blocking=False)
            result = summed.wait().clone()
            tensor.fill_(torch.nan)
            part = parts.wait()
            source.fill_(torch.nan)
            assert torch.equal(result, torch.full((size,), float(axis.size)))
            assert torch.equal(part, torch.full((size // axis.size,), float(axis.size)))


def wait_twice() -> tuple[list[str], bool, bool]:
    pending = all_reduce_(torch.ones(3), axis_of_all(), blocking=False)
    visible = [name for name in dir(pending) if not name.startswith("_")]
    return visible, pending.wait() is pending.wait(), pending.is_done()


def errors_of_peer_death() -> None:
    """Raise what rank 0 is told when rank 1 dies, since the test gets no result when a rank has died."""
    axis = axis_of_all()
    if axis.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as small:
        all_reduce_(torch.ones(3), axis)
    large = all_reduce_(torch.ones(300_000), axis, blocking=False)
    with pytest.raises(CollectiveError) as later:
        large.wait()
    assert time.monotonic() - start < 10
    raise RuntimeError(f"told: {small.value} | {later.value}")


def test_many_at_once(ranks: RankPool) -> None:
    ranks(4, overlap_many)


def test_input_can_be_reused_after_wait(ranks: RankPool) -> None:
    ranks(2, reuse_after_wait)


def test_only_wait_gives_the_result(ranks: RankPool) -> None:
    assert ranks(2, wait_twice) == [(["is_done", "wait"], True, True)] * 2


def test_failure_names_op_axis_and_rank() -> None:
    class Broken:
        def wait(self) -> bool:
            raise RuntimeError("Connection closed by peer")

    axis = Mesh(Layout()).tp
    pending = Pending("all_gather", axis, [Broken()], lambda: torch.ones(1))
    with pytest.raises(
        CollectiveError, match="all_gather on axis tp failed on rank 0: Connection closed by peer"
    ):
        pending.wait()


def test_death_of_a_peer_is_told(ranks: RankPool) -> None:
    with pytest.raises((RuntimeError, RankDied)) as caught:
        ranks(2, errors_of_peer_death)
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "told: all_reduce on axis dp failed on rank 0: " in told
    assert "| all_reduce on axis dp failed on rank 0: " in told
