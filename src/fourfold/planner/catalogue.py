"""Machines by name: what devices can do (`fourfold.specs.hardware`), and the share of it that is reached.

[Note: where the constants are from] All but one are measured outside of the runs that the planner is held
against: the share of a large product as the best of many shapes on each device (stas00/ml-engineering,
"MAMF"); attention as FlashAttention 2 (A100) and 3 (Hopper) report; the share of links as nccl-tests report
it for large messages, 80% within a node and 85% of the network card between nodes; memory at 85% of its
bandwidth. What is not is `Reached.sustained`.
"""

import re
from dataclasses import dataclass

from fourfold.errors import UserError, nearest
from fourfold.planner.machine import Level, Machine
from fourfold.specs.hardware import Accelerator, accelerator

MEMORY_SHARE, LINK_SHARE, NETWORK_SHARE = 0.85, 0.8, 0.85
"""Reached of what datasheets say of memory, of links within a node and of the network."""

LINK_LATENCY, BUS_LATENCY, NETWORK_LATENCY = 4e-6, 10e-6, 12e-6
"""Seconds of a round of a collective: over NVLink and the like, over the bus of the host, between nodes."""

VISIBLE = 0.985
"""Of the memory on a datasheet, what a program sees."""


@dataclass(frozen=True)
class Reached:
    """What a family of devices reaches of its peaks; see [Note: where the constants are from].

    Attributes:
        product: of a large matrix product in bfloat16 or float16, and ``product_float8`` in float8.
        attention: of fused attention forward, and ``attention_backward``.
        processors: how many tiles are computed at once.
        sustained: of the best rate of a product, what a device holds through a step, at its limit of power;
            set while looking at published runs.
    """

    product: float
    attention: float
    attention_backward: float
    processors: int
    product_float8: float = 0.7
    sustained: float = 0.92


REACHED = {
    "V100": Reached(0.80, 0.40, 0.30, 80),
    "A100": Reached(0.87, 0.60, 0.50, 108, sustained=0.92),
    "A800": Reached(0.87, 0.60, 0.50, 108, sustained=0.92),
    "H100": Reached(0.80, 0.60, 0.48, 132, 0.71, sustained=0.86),
    "H800": Reached(0.80, 0.60, 0.48, 132, 0.71, sustained=0.86),
    "H200": Reached(0.80, 0.60, 0.48, 132, 0.73, sustained=0.86),
    "GH200": Reached(0.83, 0.60, 0.48, 132, 0.77, sustained=0.86),
    "H20": Reached(0.90, 0.75, 0.60, 78, 0.85),
    "B200": Reached(0.78, 0.55, 0.42, 148, 0.76, sustained=0.78),
    "GB200": Reached(0.73, 0.55, 0.42, 148, 0.72, sustained=0.78),
    "B300": Reached(0.79, 0.55, 0.42, 148, 0.75, sustained=0.88),
    "GB300": Reached(0.79, 0.55, 0.42, 148, 0.75, sustained=0.88),
    "MI250X": Reached(0.60, 0.30, 0.25, 110),
    "MI300X": Reached(0.51, 0.35, 0.28, 304, 0.5),
    "MI325X": Reached(0.60, 0.40, 0.32, 304, 0.5),
    "MI355X": Reached(0.68, 0.40, 0.32, 256, 0.6),
    "L4": Reached(0.70, 0.50, 0.40, 58),
    "L40S": Reached(0.70, 0.50, 0.40, 142),
    "A10G": Reached(0.80, 0.55, 0.45, 80),
    "A10": Reached(0.60, 0.45, 0.35, 72),
    "A6000": Reached(0.80, 0.55, 0.45, 84),
    "3090": Reached(0.85, 0.60, 0.50, 82),
    "4090": Reached(0.85, 0.60, 0.50, 128),
    "5090": Reached(0.85, 0.60, 0.50, 170),
}
"""By a word of the device's name."""

SHORT_NAMES = {
    "V100-16GB": "Tesla V100-SXM2-16GB",
    "V100-32GB": "Tesla V100-SXM2-32GB",
    "A100-40GB": "A100-SXM4-40GB",
    "A100-80GB": "A100-SXM4-80GB",
    "A100-40GB-PCIe": "A100-PCIE-40GB",
    "A100-80GB-PCIe": "A100 80GB PCIe",
    "A800-80GB": "A800-SXM4-80GB",
    "H100-80GB": "H100 80GB HBM3",
    "H100-80GB-PCIe": "H100 PCIe",
    "H100-94GB-NVL": "H100 NVL",
    "GH200-96GB": "GH200 120GB",
    "GH200-144GB": "GH200 144G HBM3e",
    "H200-141GB": "H200",
    "H800-80GB": "H800",
    "H20-96GB": "H20",
    "B200-180GB": "B200",
    "GB200-186GB": "GB200",
    "B300-288GB": "B300 SXM6 AC",
    "GB300-288GB": "GB300",
    "L4": "L4",
    "L40S": "L40S",
    "A10G": "A10G",
    "A10": "A10",
    "RTX-A6000": "RTX A6000",
    "RTX-3090": "GeForce RTX 3090",
    "RTX-4090": "GeForce RTX 4090",
    "RTX-5090": "GeForce RTX 5090",
    "MI250X": "AMD Instinct MI250X",
    "MI300X": "AMD Instinct MI300X",
    "MI325X": "AMD Instinct MI325X",
    "MI355X": "AMD Instinct MI355X",
}
"""How a device is written on the command line, and in full."""


def machine(
    name: str, *, nodes_of: int | None = None, network_bytes_per_second: float | None = None
) -> Machine:
    """Return a cluster of devices, from the constants of the catalogue.

    Args:
        name: as in ``H100-80GB``, or as ``torch.cuda.get_device_name`` gives it.
        nodes_of: devices that a node's links join; by default as the device is usually built.
        network_bytes_per_second: for each device, between nodes; by default as usually built.

    Raises:
        UserError: where the device is not known.
    """
    device = accelerator(SHORT_NAMES.get(_spelled(name), name))
    if device is None:
        known = ", ".join(SHORT_NAMES)
        alike = nearest(name.upper(), SHORT_NAMES)
        raise UserError(f"device '{name}' is not known.{alike} Known: {known}")
    reached = _reached(device.names[0])
    node = nodes_of or max(device.link_devices, 1)
    is_bus = device.link_devices == 1  # no links but the bus of the host
    sizes = nodes_of or (8 if is_bus else node)
    near = Level(sizes, device.link_bytes_per_second * LINK_SHARE, BUS_LATENCY if is_bus else LINK_LATENCY)
    network = network_bytes_per_second or device.network_bytes_per_second * NETWORK_SHARE
    return Machine(
        name=_spelled(name),
        peak_flops=_peaks(device),
        product_efficiency={
            dtype: (reached.product_float8 if dtype == "float8" else reached.product) * reached.sustained
            for dtype in _peaks(device)
        },
        memory_bytes=device.memory_bytes * VISIBLE,
        memory_bytes_per_second=device.memory_bytes_per_second * MEMORY_SHARE,
        levels=(near, Level(0, network, NETWORK_LATENCY)),
        attention_efficiency=reached.attention,
        attention_backward_efficiency=reached.attention_backward,
        processors=reached.processors,
    )


def dtypes_of(name: str) -> list[str]:
    """Of the dtypes that a run computes in, the quickest first, those that a device of the catalogue has."""
    device = accelerator(SHORT_NAMES.get(_spelled(name), name))
    return [dtype for dtype in ("bfloat16", "float32") if device is None or dtype in device.peak_flops]


def _peaks(device: Accelerator) -> dict[str, float]:
    """Where a device has no units for bfloat16, float16 takes its place; float64 is not for training."""
    peaks = dict(device.peak_flops)
    peaks.setdefault("bfloat16", peaks["float16"])
    peaks.setdefault("float64", peaks["float32"] / 2)
    return peaks


def _spelled(name: str) -> str:
    """The short name in its own spelling, if it is one; without a memory where there is one such device."""
    plain = _plain(name)
    for known in SHORT_NAMES:
        if plain == _plain(known):
            return known
    alike = [known for known in SHORT_NAMES if _plain(known).startswith(f"{plain} ") and "PCIe" not in known]
    return alike[0] if len(alike) == 1 else name


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.lower().replace("-sxm", "").replace("_sxm", "")).strip()


def _reached(name: str) -> Reached:
    words = re.split(r"[\s-]+", name)
    return next(REACHED[word] for word in words if word in REACHED)
