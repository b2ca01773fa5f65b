"""What devices can do: dense peak rates (the denominators of MFU and HFU), memory, bandwidths.

Datasheets print rates with 2:4 sparsity, which training does not use, and one product name covers
variants that differ by a third. So names are matched whole, as ``torch.cuda.get_device_name`` gives
them, and what is not in the table is not known: nothing is guessed.

The table is ``hardware.csv``. Sources: vendor datasheets (sparse rates halved), stas00/ml-engineering,
torchtitan, the Ada whitepaper. GeForce parts: the rate with float32 accumulation, which is what training
uses. PyTorch shows each of a MI250X's two dies as a device of this name: rates and memory are half of the
card's.
"""

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_DTYPES = ("bfloat16", "float16", "float8", "float32", "tf32")


@dataclass(frozen=True)
class Accelerator:
    """A device, as its datasheet has it.

    Attributes:
        names: as drivers print them, without the vendor's prefix NVIDIA.
        peak_flops: dense FLOP/s by dtype: bfloat16, float16, float8, float32 (with TF32 off), tf32; only
            those that it has units for.
        memory_bytes: its memory. A program sees some percent less.
        memory_bytes_per_second: the bandwidth of it.
        link_bytes_per_second: in one direction, to the devices that it is linked to.
        link_devices: how many of those there are, itself included; 1 where the link is the bus of the host.
        network_bytes_per_second: for each device, between machines as they are usually built.
    """

    names: tuple[str, ...]
    peak_flops: dict[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    link_devices: int
    network_bytes_per_second: float


def accelerator(device_name: str) -> Accelerator | None:
    """Return what is known of a device, by the name that ``torch.cuda.get_device_name`` gives; or None."""
    return _table().get(_plain(device_name))


def dense_peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense matmul peak in FLOP/s, or None where the device or the dtype is not known.

    ``device_name`` is as ``torch.cuda.get_device_name`` gives it; ``dtype`` as in `Accelerator.peak_flops`.
    """
    found = accelerator(device_name)
    return None if found is None else found.peak_flops.get(dtype)


def _plain(name: str) -> str:
    """Drop the vendor prefix that drivers before 470 lacked, and the case."""
    return " ".join(name.removeprefix("NVIDIA ").lower().split())


@cache
def _table() -> dict[str, Accelerator]:
    """By plain name."""
    found = {}
    with files("fourfold.specs").joinpath("hardware.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            device = _device(row)
            for name in device.names:
                assert _plain(name) not in found, f"{name} is there twice"
                found[_plain(name)] = device
    return found


def _device(row: dict[str, str]) -> Accelerator:
    return Accelerator(
        names=tuple(row["names"].split("|")),
        peak_flops={dtype: _number(row[dtype], 1e12) for dtype in _DTYPES if row[dtype]},
        memory_bytes=_number(row["memory_gb"], 1e9),
        memory_bytes_per_second=_number(row["memory_gb_per_s"], 1e9),
        link_bytes_per_second=_number(row["link_gb_per_s"], 1e9),
        link_devices=int(row["link_devices"]),
        network_bytes_per_second=_number(row["network_gb_per_s"], 1e9),
    )


def _number(text: str, unit: float) -> float:
    return float(round(float(text) * unit))
