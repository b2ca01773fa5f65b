"""Measures collectives by op, number of ranks and size of the message, between the ranks of this job."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from fourfold.bench.timing import synchronize
from fourfold.collectives import all_gather, all_reduce_, all_to_all, barrier, exchange_, reduce_scatter
from fourfold.mesh import Axis, Mesh
from fourfold.planner.machine import MeasuredCollective
from fourfold.specs import Layout

SIZES = tuple(2**power for power in (3, 12, 15, 17, 19, 21, 24))
"""Bytes of messages."""

CALLS, SECONDS = 5, 0.08
"""So many calls are measured at least, and so long at most where they are short."""


def measured_collectives(device: torch.device, *, near: int) -> Iterator[MeasuredCollective]:
    """Every collective on groups of neighbours of every size, all groups at the same time.

    All ranks call it, and all yield the same: the mean over ranks.

    Args:
        device: of the messages.
        near: how many neighbours are on one machine.
    """
    world = Mesh(Layout(dp=torch.distributed.get_world_size()), device.type).world
    for ranks in (size for size in range(2, world.size + 1) if world.size % size == 0):
        axis = Mesh(Layout(dp=world.size // ranks, tp=ranks), device.type).tp
        for op, make in _OPS.items():
            for nbytes in SIZES:
                run = make(axis, nbytes, device)
                seconds, busy = _per_call(run, world, device)
                yield MeasuredCollective(op, ranks, min(ranks, near), nbytes, seconds, busy)


def _per_call(run: Callable[[], object], world: Axis, device: torch.device) -> tuple[float, float]:
    """Seconds of a call, and the share of one core that a rank is busy in them; means over all ranks."""
    calls = CALLS
    for attempt in range(2):  # the first says how many calls fill the time
        run()
        barrier(world)
        synchronize(device)
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(calls):
            run()
        synchronize(device)
        seconds, busy = time.perf_counter() - began, time.process_time() - worked
        found = torch.tensor([seconds, busy], dtype=torch.float64, device=device)
        seconds, busy = (float(value) / world.size for value in all_reduce_(found, world))
        if attempt or seconds >= SECONDS:
            break
        calls = max(CALLS, min(200, int(calls * SECONDS / seconds)))
    share = busy / seconds if device.type == "cpu" else 0.0
    return seconds / calls, share


def _all_reduce(axis: Axis, nbytes: int, device: torch.device) -> Callable[[], object]:
    return partial(all_reduce_, torch.zeros(_elements(nbytes), device=device), axis)


def _all_gather(axis: Axis, nbytes: int, device: torch.device) -> Callable[[], object]:
    mine = torch.zeros(_elements(nbytes // axis.size), device=device)
    return partial(all_gather, mine, axis, out=mine.new_empty(axis.size * len(mine)))


def _reduce_scatter(axis: Axis, nbytes: int, device: torch.device) -> Callable[[], object]:
    return partial(
        reduce_scatter, torch.zeros(axis.size * _elements(nbytes // axis.size), device=device), axis
    )


def _all_to_all(axis: Axis, nbytes: int, device: torch.device) -> Callable[[], object]:
    return partial(all_to_all, torch.zeros(axis.size * _elements(nbytes // axis.size), device=device), axis)


def _send(axis: Axis, nbytes: int, device: torch.device) -> Callable[[], object]:
    """A message to the next rank and one from the rank before, at the same time."""
    out = torch.zeros(_elements(nbytes), device=device)
    into = torch.empty_like(out)
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    return lambda: exchange_({after: out}, {before: into}, axis).wait()


def _elements(nbytes: int) -> int:
    """Of float32."""
    return max(1, nbytes // 4)


_OPS: dict[str, Callable[[Axis, int, torch.device], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
