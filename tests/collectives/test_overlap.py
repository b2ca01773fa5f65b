"""A collective under way and its buffers: the largest messages, reused as soon as that is allowed."""

import torch

from fourfold.collectives import all_reduce_
from tests.collectives.axes import axis_of_all
from tests.ranks import RankPool

MESSAGE_BYTES = 64 * 2**20
REPEATS = 30


def overwrite_at_once(repeats: int) -> None:
    """Sum 64 MB again and again, and overwrite the input with NaN right after ``wait``."""
    axis = axis_of_all()
    tensor, result = torch.empty(MESSAGE_BYTES // 4), torch.empty(MESSAGE_BYTES // 4)
    for repeat in range(repeats):
        tensor.fill_(repeat + axis.rank)
        pending = all_reduce_(tensor, axis, blocking=False)
        result.copy_(pending.wait())
        tensor.fill_(torch.nan)
        expected = axis.size * repeat + sum(range(axis.size))
        assert torch.equal(result.aminmax().min, result.aminmax().max)
        assert float(result[0]) == expected


def test_a_buffer_may_be_overwritten_after_wait(ranks: RankPool) -> None:
    """No NaN and no mixture of two repeats is ever read."""
    # COL-07
    ranks(2, overwrite_at_once, REPEATS)
