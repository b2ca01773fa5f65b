"""Debug mode: ranks that disagree get an error that says who wants what, on every rank, and no abort."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from fourfold.collectives import (
    CollectiveMismatch,
    agreement,
    all_gather,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast_,
    differentiable,
    exchange_,
    recv_,
    reduce_,
    reduce_scatter,
    send,
)
from fourfold.mesh import Axis
from tests.collectives.axes import axis_of_all, numbered
from tests.ranks import RankPool


def error_in(call: Callable[[Axis], object]) -> str:
    with agreement(), pytest.raises(CollectiveMismatch) as caught:
        call(axis_of_all())
    return str(caught.value)


def other_dtype() -> str:
    dtypes = (torch.float32, torch.bfloat16)
    return error_in(lambda axis: all_reduce_(torch.ones(4, dtype=dtypes[axis.rank]), axis))


def other_shape() -> str:
    return error_in(lambda axis: all_reduce_(torch.ones(4 + axis.rank), axis, blocking=False))


def other_op() -> str:
    def call(axis: Axis) -> object:
        tensor = torch.ones(4)
        return barrier(axis) if axis.rank == 2 else all_gather(tensor, axis)

    return error_in(call)


def other_source() -> str:
    return error_in(lambda axis: broadcast_(torch.ones(4), axis, source=axis.rank))


def other_row_counts() -> str:
    counts = ([2, 1], [1, 2])
    return error_in(lambda axis: reduce_scatter(torch.ones(3), axis, counts=counts[axis.rank]))


def unexpected_rows() -> str:
    sent, received = ([1, 2], [0, 1]), ([1, 0], [3, 1])
    return error_in(
        lambda axis: all_to_all(
            torch.ones(sum(sent[axis.rank]), 2),
            axis,
            send_counts=sent[axis.rank],
            receive_counts=received[axis.rank],
        )
    )


def other_message() -> str:
    def call(axis: Axis) -> object:
        if axis.rank == 0:
            return send(torch.ones(4), axis, destination=1)
        return recv_(torch.ones(5), axis, source=0)

    error = error_in(call)
    axis = axis_of_all()
    if axis.rank == 1:
        recv_(torch.ones(4), axis, source=0)  # the message is still under way
    return error


def other_exchange() -> str:
    """Rank 1 expects more than rank 0 sends; what it sends itself fits."""

    def call(axis: Axis) -> object:
        sent, received = ((4, 3), (3, 5))[axis.rank]
        peer = 1 - axis.rank
        return exchange_({peer: torch.ones(sent)}, {peer: torch.ones(received)}, axis).wait()

    return error_in(call)


def very_long_shapes() -> str:
    return error_in(lambda axis: all_reduce_(torch.ones([1] * 100 + [1 + axis.rank]), axis))


def agree_on_everything() -> None:
    axis = axis_of_all()
    with agreement():
        assert all_reduce_(torch.tensor(1.0), axis).item() == axis.size
        assert reduce_scatter(torch.ones(axis.size), axis).tolist() == [axis.size]
        counts = [3, *[1] * (axis.size - 1)]
        assert all_gather(torch.ones(counts[axis.rank]), axis, counts=counts).shape == (axis.size + 2,)
        received = torch.arange(axis.size)
        assert all_to_all(torch.full((axis.size,), axis.rank), axis).equal(received)
        uneven = all_to_all(
            torch.full((axis.rank * axis.size,), axis.rank),
            axis,
            send_counts=[axis.rank] * axis.size,
            receive_counts=list(range(axis.size)),
        )
        assert uneven.equal(received.repeat_interleave(received))
        broadcast_(torch.ones(2), axis, source=1)
        reduce_(torch.ones(2), axis, destination=1)
        barrier(axis)
        x = torch.ones(2, requires_grad=True)
        differentiable.copy_to(x, axis).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [axis.size] * 2
        # Everyone sends first, then receives: the agreement must not make a deadlock of it.
        after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        incoming = [recv_(torch.zeros(3), axis, source=before, blocking=False)]
        outgoing = [
            send(numbered(axis.rank, 3) + number, axis, destination=after, blocking=False)
            for number in range(2)
        ]
        incoming.append(recv_(torch.zeros(3), axis, source=before, blocking=False))
        for number, pending in enumerate(incoming):
            assert torch.equal(pending.wait(), numbered(before, 3) + number)
        for pending in outgoing:
            pending.wait()
        buffer = torch.zeros(3)
        exchange_({after: numbered(axis.rank, 3)}, {before: buffer}, axis).wait()
        assert torch.equal(buffer, numbered(before, 3))


CASES = [
    (other_dtype, "all_reduce", "all_reduce float32 (4,) op=sum", "all_reduce bfloat16 (4,) op=sum"),
    (other_shape, "all_reduce", "all_reduce float32 (4,) op=sum", "all_reduce float32 (5,) op=sum"),
    (other_source, "broadcast", "broadcast float32 (4,) source=0", "broadcast float32 (4,) source=1"),
    (
        other_row_counts,
        "reduce_scatter",
        "reduce_scatter float32 (3,) counts=[2, 1]",
        "reduce_scatter float32 (3,) counts=[1, 2]",
    ),
]


@pytest.mark.parametrize(("function", "op", "first", "second"), CASES)
def test_mismatch(ranks: RankPool, function: Callable[[], str], op: str, first: str, second: str) -> None:
    # COL-06
    expected = f"ranks disagree on axis dp, here in {op}:\n  rank 0: {first}\n  rank 1: {second}"
    assert ranks(2, function, limit_seconds=20) == [expected] * 2


def test_other_op(ranks: RankPool) -> None:
    lines = "  rank 0: all_gather float32 (12,)\n  rank 1: all_gather float32 (12,)\n  rank 2: barrier"
    places = ("all_gather", "all_gather", "barrier")
    expected = [f"ranks disagree on axis dp, here in {place}:\n{lines}" for place in places]
    assert ranks(3, other_op, limit_seconds=20) == expected


def test_all_to_all_counts(ranks: RankPool) -> None:
    expected = "ranks disagree on axis dp, in all_to_all:\n  rank 0 sends 2 rows, rank 1 expects 3"
    assert ranks(2, unexpected_rows, limit_seconds=20) == [expected] * 2


def test_send_and_recv(ranks: RankPool) -> None:
    expected = (
        "ranks disagree on axis dp, in send and recv:\n"
        "  rank 0 sends float32 (4,)\n  rank 1 expects float32 (5,)"
    )
    assert ranks(2, other_message, limit_seconds=20) == [expected] * 2


def test_exchange(ranks: RankPool) -> None:
    expected = (
        "ranks disagree on axis dp, in send and recv:\n"
        "  rank 0 sends float32 (4,)\n  rank 1 expects float32 (5,)"
    )
    assert ranks(2, other_exchange, limit_seconds=20) == [expected] * 2


def test_long_descriptions_differ(ranks: RankPool) -> None:
    for text in ranks(2, very_long_shapes, limit_seconds=20):
        assert text.count("checksum") == 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_those_who_agree_go_on(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, agree_on_everything, limit_seconds=20)


def test_environment_turns_it_on() -> None:
    code = "from fourfold.collectives import agree; print(agree.active())"
    result = subprocess.run(
        [sys.executable, "-c", code], env={"FOURFOLD_DEBUG": "1"}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "True"
