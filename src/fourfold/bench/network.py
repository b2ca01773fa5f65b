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

CALLS, MOST_CALLS, SECONDS = 5, 40, 0.08
"""So many calls are measured, at least and at most, and so long where they are short."""

PRODUCT = 384
"""Rows and columns of the product that a rank computes between two collectives."""

LEAST_SECONDS = 1e-6
"""Of a collective: its time is a difference."""


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
    """Seconds of a call, and the share of one core that a rank is busy in them; means over all ranks.

    A rank computes between two calls, as it does in a step: it comes to a collective a little earlier or
    later than the others, with other things in its caches. What computing alone takes is taken off.
    """
    left = torch.ones(PRODUCT, PRODUCT, device=device)
    product = torch.empty_like(left)

    def compute() -> None:
        torch.mm(left, left, out=product)

    def both() -> None:
        compute()
        run()

    both()
    first, _ = _mean(both, CALLS, world, device)
    calls = max(CALLS, min(MOST_CALLS, int(SECONDS / first)))
    seconds, busy = _mean(both, calls, world, device)
    computing, working = _mean(compute, calls, world, device)
    seconds = max(seconds - computing, LEAST_SECONDS)
    share = min(1.0, max(0.0, busy - working) / seconds) if device.type == "cpu" else 0.0
    return seconds, share


def _mean(run: Callable[[], object], calls: int, world: Axis, device: torch.device) -> tuple[float, float]:
    """Seconds of a call and of the process, means over calls and ranks; all ranks begin together."""
    barrier(world)
    synchronize(device)
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    synchronize(device)
    spent = [time.perf_counter() - began, time.process_time() - worked]
    found = all_reduce_(torch.tensor(spent, dtype=torch.float64, device=device), world)
    return float(found[0]) / world.size / calls, float(found[1]) / world.size / calls


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
