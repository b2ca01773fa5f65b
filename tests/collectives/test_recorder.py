"""The recorder: one event a call, with the bytes of the whole message, whatever runs underneath."""

import torch

from fourfold.collectives import (
    all_gather,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast_,
    differentiable,
    exchange_,
    record,
    recv_,
    reduce_,
    reduce_scatter,
    send,
)
from fourfold.mesh import Mesh
from fourfold.specs import Layout
from fourfold.traffic import Event
from tests.collectives.axes import axis_of_all
from tests.ranks import RankPool


def events_of_every_op() -> list[Event]:
    axis = axis_of_all()
    with record() as events:
        all_reduce_(torch.ones(5), axis)
        all_reduce_(torch.ones(50_000, dtype=torch.float64), axis, blocking=False).wait()
        reduce_scatter(torch.ones(6, 3), axis)
        reduce_scatter(torch.ones(4, dtype=torch.bfloat16), axis, counts=[3, 1])
        all_gather(torch.ones(6, 3), axis)
        all_gather(torch.ones(3 if axis.rank == 0 else 0), axis, counts=[3, 0])
        all_to_all(torch.ones(4, 2), axis)
        broadcast_(torch.ones(7), axis, source=1)
        reduce_(torch.ones(7), axis, destination=1)
        if axis.rank == 0:
            send(torch.ones(3), axis, destination=1)
        else:
            recv_(torch.ones(3), axis, source=0)
        all_reduce_(torch.empty(0), axis)
        exchange_({1 - axis.rank: torch.ones(3)}, {1 - axis.rank: torch.ones(3)}, axis).wait()
        barrier(axis)
    all_reduce_(torch.ones(5), axis)
    return events


def events_of_one_rank_axis() -> list[Event]:
    mesh = Mesh(Layout(dp=2))
    with record() as events:
        all_reduce_(torch.ones(5), mesh.tp)
        all_gather(torch.ones(5), mesh.cp)
        barrier(mesh.pp)
    return events


def nested_recorders() -> tuple[list[Event], list[Event], list[Event]]:
    axis = axis_of_all()
    with record() as outer:
        with record() as inner:
            all_reduce_(torch.ones(1), axis)
        all_reduce_(torch.ones(2), axis)
        with record() as later:
            pass
    return outer, inner, later


def events_of_backward() -> tuple[list[Event], list[Event]]:
    mesh = Mesh(Layout(tp=2))
    x = torch.ones(4, 6, requires_grad=True)
    with record() as forward:
        y = differentiable.all_gather(x, mesh.tp, dim=1)
    with record() as backward:
        y.sum().backward()
    return forward, backward


def test_every_op(ranks: RankPool) -> None:
    results = ranks(2, events_of_every_op)
    for rank, events in enumerate(results):
        assert events == [
            Event("all_reduce", "dp", 20, "float32"),
            Event("all_reduce", "dp", 400_000, "float64"),
            Event("reduce_scatter", "dp", 72, "float32"),
            Event("reduce_scatter", "dp", 8, "bfloat16"),
            Event("all_gather", "dp", 144, "float32"),
            Event("all_gather", "dp", 12, "float32"),
            Event("all_to_all", "dp", 32, "float32"),
            Event("broadcast", "dp", 28, "float32"),
            Event("reduce", "dp", 28, "float32"),
            Event("recv" if rank else "send", "dp", 12, "float32"),
            Event("all_reduce", "dp", 0, "float32"),
            Event("recv", "dp", 12, "float32"),
            Event("send", "dp", 12, "float32"),
            Event("barrier", "dp", 0, "uint8"),
        ]


def test_axis_of_one_rank_records_nothing(ranks: RankPool) -> None:
    assert ranks(2, events_of_one_rank_axis) == [[], []]


def test_recorders_nest(ranks: RankPool) -> None:
    one, two = Event("all_reduce", "dp", 4, "float32"), Event("all_reduce", "dp", 8, "float32")
    assert ranks(2, nested_recorders) == [([one, two], [one], [])] * 2


def test_backward_is_recorded(ranks: RankPool) -> None:
    gather, scatter = Event("all_gather", "tp", 192, "float32"), Event("reduce_scatter", "tp", 192, "float32")
    assert ranks(2, events_of_backward) == [([gather], [scatter])] * 2
