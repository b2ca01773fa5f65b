"""The pool of ranks itself: results, failures, and that the next test works after each."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from fourfold.errors import UserError
from tests.ranks import RankDied, RankPool, RankStuck


def sum_of_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    tensor = torch.full((3,), float(dist.get_rank() + offset))
    dist.all_reduce(tensor)
    return os.getpid(), dist.get_world_size(), tensor


def strided_result() -> torch.Tensor:
    return torch.arange(6.0, requires_grad=True).reshape(2, 3).T * 2


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise UserError("first problem", "second problem")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(100)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn() -> None:
    warnings.warn("a warning", FutureWarning, stacklevel=1)


def threads() -> int:
    return torch.get_num_threads()


def check_alive(pool: RankPool) -> None:
    for _, size, tensor in pool(2, sum_of_ranks, 1):
        assert size == 2
        assert torch.equal(tensor, torch.full((3,), 3.0))


def test_processes_stay_and_world_size_changes(ranks: RankPool) -> None:
    first = [pid for pid, _, _ in ranks(4, sum_of_ranks, 0)]
    assert len(set(first)) == 4
    assert os.getpid() not in first
    check_alive(ranks)
    assert [size for _, size, _ in ranks(3, sum_of_ranks, 0)] == [3, 3, 3]
    assert [pid for pid, _, _ in ranks(1, sum_of_ranks, 0)] == first[:1]
    assert [pid for pid, _, _ in ranks(4, sum_of_ranks, 0)] == first
    assert ranks(4, threads) == [1, 1, 1, 1]


def test_results_are_plain_tensors(ranks: RankPool) -> None:
    for result in ranks(2, strided_result):
        assert torch.equal(result, torch.tensor([[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]))
        assert not result.is_shared()


def test_failing_rank(ranks: RankPool) -> None:
    with pytest.raises(UserError, match="first problem\nsecond problem") as caught:
        ranks(2, fail_on, 1)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1:")
    assert "in fail_on" in note
    check_alive(ranks)


def test_warning_is_an_error_on_ranks(ranks: RankPool) -> None:
    with pytest.raises(FutureWarning, match="a warning"):
        ranks(1, warn)


def test_stuck_rank(ranks: RankPool) -> None:
    ranks(2, sum_of_ranks, 0)
    start = time.monotonic()
    with pytest.raises(RankStuck, match="no answer within 3 s from rank 1 of 2") as caught:
        ranks(2, hang_on, 1, limit_seconds=3.0)
    assert time.monotonic() - start < 10
    assert "in hang_on" in str(caught.value)
    check_alive(ranks)


def test_killed_rank(ranks: RankPool) -> None:
    with pytest.raises(RankDied, match="rank 1 was ended by SIGKILL"):
        ranks(2, die_on, 1)
    check_alive(ranks)


def test_pool_leaves_no_process() -> None:
    pool = RankPool()
    (result,) = pool(1, sum_of_ranks, 0)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(result[0], 0)
