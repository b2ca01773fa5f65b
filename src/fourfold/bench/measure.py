"""Puts the measurements of all ranks together to a calibration."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fourfold.allocator import keep_freed_memory
from fourfold.bench.compute import (
    Shapes,
    measured_attentions,
    measured_blocks,
    measured_products,
    measured_updates,
)
from fourfold.bench.network import measured_collectives
from fourfold.bench.timing import median_seconds
from fourfold.collectives import barrier
from fourfold.doctor import device_type, measured_copy_bytes_per_second, measured_peak_flops
from fourfold.flops import attended_pairs
from fourfold.launch import Rank
from fourfold.launch.local import cores
from fourfold.mesh import Mesh
from fourfold.planner.calibration import MeasuredAttention
from fourfold.planner.machine import Level, Machine, MeasuredCollective
from fourfold.specs import Layout
from fourfold.specs.hardware import accelerator

LARGE = 2**22
"""Bytes of the messages that a bandwidth is read off, at least."""

MEASURED = (
    "name", "source", "peak_flops", "product_efficiency", "memory_bytes", "memory_bytes_per_second", "levels",
    "attention_efficiency", "attention_backward_efficiency", "launch_seconds", "ranks_per_device", "products",
    "collectives", "blocks", "attentions", "updates",
)  # fmt: skip
"""The fields of a machine that are measured; ``interference``, too, on a CPU."""


def calibration(machine: Machine) -> dict[str, Any]:
    """What `measure` found, as a calibration file has it: nothing that was not measured."""
    values = machine.to_json()
    names = MEASURED if machine.interference else (*MEASURED, "interference")
    return {name: values[name] for name in names if values[name] not in ([], ())}


def measure(rank: Rank, shapes: Shapes) -> Machine | None:
    """Measure on all ranks; return what rank 0 found, None on the others.

    On a CPU ranks share cores. Computation is measured on as many ranks at once as there are cores, so that
    each has one and all share caches and memory as they do in a run; `Machine.ranks_per_device` says how many
    ranks of this job one core has. A collective is measured with all ranks of the job in one like it.
    """
    job = rank.job
    kind = device_type(job.local_world_size)
    rank.connect(device_type=kind, agree_on={"shapes": repr(shapes)})
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.cuda.current_device())
    of_a_core = job.local_world_size * torch.get_num_threads() / cores() if kind == "cpu" else 1.0
    found = None
    if job.local_rank < job.local_world_size / max(1.0, of_a_core):
        found = replace(_computing(shapes, device), ranks_per_device=max(1.0, of_a_core))
    if job.world_size > 1:
        _together(kind)
        rows = tuple(measured_collectives(device, near=job.local_world_size))
        if found is not None:
            levels = _levels(rows, job.local_world_size, kind)
            found = replace(found, collectives=rows, levels=levels)
    return found if rank.is_first else None


def _computing(shapes: Shapes, device: torch.device) -> Machine:
    if device.type == "cpu":
        keep_freed_memory()  # as a training process does: page faults would take longer than the products
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    known = accelerator(name)
    rate = measured_peak_flops(shapes.dtype, device=device)
    peak = rate if known is None else known.peak_flops.get(shapes.dtype, rate)
    products = tuple(measured_products(shapes, device))
    attentions = tuple(measured_attentions(shapes, device))
    blocks = tuple(measured_blocks(shapes, device))
    updates = tuple(measured_updates(shapes, device))
    found = Machine(
        name=name,
        source="measured by fourfold bench",
        peak_flops={shapes.dtype: peak},
        product_efficiency={shapes.dtype: rate / peak},
        memory_bytes=_memory_bytes(device),
        memory_bytes_per_second=measured_copy_bytes_per_second(device=device),
        levels=(),
        attention_efficiency=_efficiency(attentions, peak, backward=False),
        attention_backward_efficiency=_efficiency(attentions, peak, backward=True),
        launch_seconds=_launch_seconds(device),
        products=products,
        attentions=attentions,
        blocks=blocks,
        updates=updates,
    )
    # On a CPU what is sent takes cores, which is measured and simulated as that.
    return replace(found, interference=0.0) if device.type == "cpu" else found


def _together(kind: str) -> None:
    """Wait until every rank has come here."""
    barrier(Mesh(Layout(dp=torch.distributed.get_world_size()), kind).world)


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _launch_seconds(device: torch.device) -> float:
    """Between two small kernels that the host starts one after another."""
    x = torch.zeros(16, device=device)
    return median_seconds(lambda: [x.add_(1.0) for _ in range(100)], device) / 100


def _efficiency(rows: Sequence[MeasuredAttention], peak: float, *, backward: bool) -> float:
    """The share of the peak that attention would reach with long rows; see `Machine.attention_seconds`."""
    row = max(rows, key=lambda row: row.rows * row.heads * row.sequence**2)
    flops = 4 * row.rows * row.heads * row.head_dim * attended_pairs(row.sequence)
    if backward:
        flops = flops * 5 // 2
    seconds = row.backward_seconds if backward else row.forward_seconds
    return flops / seconds / peak * (row.sequence + 512) / row.sequence


def _levels(rows: tuple[MeasuredCollective, ...], near: int, kind: str) -> tuple[Level, ...]:
    """Latency and bandwidth of each level, as the formula for an all_gather has them.

    Of one machine with accelerators only the level within it: what lies between machines was not measured.
    """
    found = []
    widest = max(row.ranks for row in rows)
    for ranks in sorted({min(near, widest), widest}):
        of_level = sorted(
            (row.bytes, row.seconds) for row in rows if row.ranks == ranks and row.op == "all_gather"
        )
        small = of_level[0][1]
        nbytes, seconds = next(pair for pair in of_level if pair[0] >= LARGE)
        rate = nbytes * (ranks - 1) / ranks / max(seconds - small, 1e-9)
        everywhere = ranks == widest and (widest > near or kind == "cpu")
        found.append(Level(0 if everywhere else ranks, rate, small / (ranks - 1)))
    return tuple(found)
