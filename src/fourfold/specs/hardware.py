"""Dense peak rates of devices: the denominators of MFU and HFU.

Datasheets print rates with 2:4 sparsity, which training does not use, and one product name covers
variants that differ by a third. So names are matched whole, as ``torch.cuda.get_device_name`` gives
them, and what is not in the table has no peak: nothing is guessed.
"""

from collections.abc import Sequence

_DTYPES = ("bfloat16", "float16", "float32", "tf32")

# Names -> dense peak in TFLOP/s for bfloat16, float16, float32 (TF32 off) and tf32; None: no such units.
# Sources: vendor datasheets (sparse rates halved), stas00/ml-engineering, torchtitan, the Ada whitepaper.
# GeForce parts: the rate with float32 accumulation, which is what training uses.
_TABLE: Sequence[tuple[tuple[str, ...], tuple[float | None, ...]]] = (
    (("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), (None, 125.0, 15.7, None)),
    (("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"), (None, 112.0, 14.0, None)),
    (
        (
            "A100-SXM4-40GB",
            "A100-SXM4-80GB",
            "A100-SXM-80GB",
            "A100-PCIE-40GB",
            "A100 80GB PCIe",
            "A800-SXM4-80GB",
        ),
        (312.0, 312.0, 19.5, 156.0),
    ),
    (("H100 80GB HBM3", "H800", "H200"), (989.4, 989.4, 67.0, 494.7)),
    (("GH200 120GB", "GH200 480GB", "GH200 144G HBM3e"), (989.4, 989.4, 67.0, 494.7)),
    (("H100 PCIe",), (756.0, 756.0, 51.0, 378.0)),
    (("H100 NVL",), (835.0, 835.0, 60.0, 417.5)),
    (("H200 NVL",), (835.0, 835.0, 60.0, 418.0)),
    (("H20",), (148.0, 148.0, 44.0, 74.0)),
    (("B200", "B300 SXM6 AC"), (2250.0, 2250.0, 80.0, 1125.0)),
    (("GB200", "GB300"), (2500.0, 2500.0, 80.0, 1250.0)),
    (("L4",), (121.0, 121.0, 30.3, 60.0)),
    (("L40S",), (362.0, 362.0, 91.6, 183.0)),
    (("A10G",), (70.0, 70.0, 35.0, 35.0)),
    (("A10",), (125.0, 125.0, 31.2, 62.5)),
    (("RTX A6000",), (154.8, 154.8, 38.7, 77.4)),
    (("GeForce RTX 3090",), (71.0, 71.0, 35.6, 35.6)),
    (("GeForce RTX 4090",), (165.2, 165.2, 82.6, 82.6)),
    (("GeForce RTX 5090",), (209.5, 209.5, 104.8, 104.8)),
    # PyTorch shows each of a MI250X's two dies as a device of this name: half of the card's 383.
    (("AMD Instinct MI250X",), (191.5, 191.5, 23.95, None)),
    (("AMD Instinct MI300X", "AMD Instinct MI325X"), (1307.0, 1307.0, 163.4, 653.7)),
    (("AMD Instinct MI355X",), (2516.6, 2516.6, 157.3, None)),
)


def _plain(name: str) -> str:
    """Drop the vendor prefix that drivers before 470 lacked, and the case."""
    return " ".join(name.removeprefix("NVIDIA ").lower().split())


_PEAKS = {_plain(name): dict(zip(_DTYPES, peaks, strict=True)) for names, peaks in _TABLE for name in names}


def dense_peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense matmul peak in FLOP/s, or None where the device or the dtype is not known.

    ``device_name`` is as ``torch.cuda.get_device_name`` gives it. ``dtype`` is bfloat16, float16, float32
    (with TF32 off) or tf32.
    """
    tflops = _PEAKS.get(_plain(device_name), {}).get(dtype)
    return None if tflops is None else float(round(tflops * 1e12))
