"""What this machine has and what it does: devices, measured matmul rates, memory bandwidth."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import fourfold
from fourfold.collectives import all_reduce_, barrier
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.outline import Step
from fourfold.planner.catalogue import machine
from fourfold.planner.context import Choice, chosen
from fourfold.specs import dense_peak_flops
from fourfold.specs.hardware import accelerator

# A product takes at least this long, so that starting it does not count.
_PRODUCT_SECONDS = 2e-3
_COPY_BYTES = 2**27

MOST_ON_A_HOST = 16
"""Devices. Where links join more, they go from host to host, and how many ranks a host has says little."""


@dataclass(frozen=True)
class Peak:
    """The rate that MFU is a fraction of, of all ranks together, and where it comes from."""

    flops_per_second: float
    origin: str


def peak_of(mesh: Mesh, dtype: str, *, given_tflops: float = 0) -> Peak:
    """Return the peak of all ranks together: as given, from the table of devices, or measured now.

    Called on all ranks. Ranks measure at the same time, because those of one machine share its cores.

    Args:
        mesh: the ranks.
        dtype: that computation runs in.
        given_tflops: of one device in TFLOP/s; 0 where nothing is given.
    """
    if given_tflops:
        origin = f"peak of logging.peak_tflops={given_tflops:g} a device"
        return Peak(given_tflops * 1e12 * mesh.world_size, origin)
    if mesh.device.type == "cuda":
        name = torch.cuda.get_device_name(mesh.device)
        known = dense_peak_flops(name, dtype)
        if known is not None:
            return Peak(known * mesh.world_size, f"dense {dtype} peak of {name}")
    barrier(mesh.world)
    measured = torch.tensor(
        [measured_peak_flops(dtype, device=mesh.device)], dtype=torch.float64, device=mesh.device
    )
    all_reduce_(measured, mesh.world)
    where = "this machine" if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
    return Peak(float(measured), f"{dtype} matmul peak measured on {where}")


def device_type(world_size: int) -> str:
    """Return where ranks of this machine compute: ``cuda`` where there is a GPU, else ``cpu``.

    Raises UserError where there are GPUs, but fewer than ranks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < count < world_size:
        raise UserError(
            f"{world_size} ranks need {world_size} GPUs and this machine has {count}: use {count} or fewer "
            "ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    return "cuda" if count else "cpu"


def chosen_here(step: Step, device_type: str, *, local_rank: int, local_world_size: int) -> Choice:
    """Write out what cp means for a step of a job that this rank is in; see `fourfold.planner.context`.

    On GPUs of the table it follows from what they and their links do, else from which ranks share a node. All
    ranks come to the same where all nodes are alike.
    """
    if device_type == "cuda":
        name = torch.cuda.get_device_name(local_rank)
        if accelerator(name) is not None:
            found = machine(name)
            near = found.levels[0].ranks
            if local_world_size < near <= MOST_ON_A_HOST:
                found = machine(name, nodes_of=local_world_size)
            return chosen(step, machine=found)
    return chosen(step, node=local_world_size)


def measured_peak_flops(
    dtype: str, *, threads: int | None = None, device: torch.device | None = None, seconds: float = 0.3
) -> float:
    """Return the rate of square matrix products in FLOP/s, averaged over ``seconds``.

    ``threads`` is for the CPU, None for the number that torch uses already.
    """
    place = device or torch.device("cpu")
    with _threads(threads):
        size = 256
        while True:
            left = torch.randn(size, size, device=place, dtype=torch.float32).to(getattr(torch, dtype))
            right, product = left.clone(), torch.empty_like(left)
            _product_seconds(left, right, product)  # the first one chooses a kernel
            if size >= 8192 or _product_seconds(left, right, product) >= _PRODUCT_SECONDS:
                break
            size *= 2
        products = 0
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            _product_seconds(left, right, product)
            products += 1
    return products * 2 * size**3 / elapsed


def _product_seconds(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> float:
    """Return how long one product takes, until it is done."""
    began = time.perf_counter()
    torch.mm(left, right, out=product)
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - began


def measured_copy_bytes_per_second(
    *, threads: int | None = None, device: torch.device | None = None, seconds: float = 0.3
) -> float:
    """Return the memory bandwidth of a large copy: bytes read and written per second, the best of several."""
    place = device or torch.device("cpu")
    with _threads(threads):
        source = torch.ones(_COPY_BYTES // 4, device=place)
        target = torch.zeros_like(source)
        best, ends = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < ends or best == float("inf"):
            began = time.perf_counter()
            target.copy_(source)
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            best = min(best, time.perf_counter() - began)
    return 2 * _COPY_BYTES / best


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def facts() -> dict[str, str]:
    """Return what this machine and installation are, by name, ready to print."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found = {
        "fourfold": fourfold.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": f"{cores} usable of {os.cpu_count()}, threads of torch: {torch.get_num_threads()}",
        "memory": memory_line(),
        "GPUs": "none",
        "backends": ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends.items()),
    }
    if gpus:
        found["GPUs"] = "; ".join(f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus)
    return found


def _processor() -> str:
    """Return the name of the processor, as far as the system tells."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def memory_line() -> str:
    """Return the memory of the machine, and how much of it is available where the system tells."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return f"{total / 1e9:.1f} GB, {int(line.split()[1]) * 1024 / 1e9:.1f} GB available"
    return f"{total / 1e9:.1f} GB"
