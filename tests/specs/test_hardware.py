"""Dense peaks by device name: no sparse figures, no wrong variant, no guess."""

import pytest

from fourfold.specs import dense_peak_flops
from fourfold.specs.hardware import accelerator


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_bfloat16(device, tflops):
    # MFU-04
    assert dense_peak_flops(device, "bfloat16") == tflops * 1e12


def test_other_dtypes():
    assert dense_peak_flops("NVIDIA H100 80GB HBM3", "float16") == 989.4e12
    assert dense_peak_flops("NVIDIA H100 80GB HBM3", "float32") == 67e12
    assert dense_peak_flops("NVIDIA H100 80GB HBM3", "tf32") == 494.7e12
    assert dense_peak_flops("Tesla V100-SXM2-32GB", "float16") == 125e12
    assert dense_peak_flops("Tesla V100-SXM2-32GB", "bfloat16") is None
    assert dense_peak_flops("NVIDIA H200", "float64") is None


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "",
        "NVIDIA H100",
        "NVIDIA H300",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA L40",
        "A100-SXM-64GB",
    ],
)
def test_unknown_devices_have_no_peak(device):
    # MFU-04
    assert dense_peak_flops(device, "bfloat16") is None


def test_memory_and_bandwidths():
    h100 = accelerator("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert (h100.memory_bytes, h100.memory_bytes_per_second) == (80e9, 3350e9)
    assert (h100.link_bytes_per_second, h100.link_devices) == (450e9, 8), "900 is the sum of both directions"
    assert h100.network_bytes_per_second == 50e9
    assert h100.peak_flops["float8"] == 1978.9e12
    assert accelerator("NVIDIA H100 PCIe") != h100
    assert accelerator("A100-SXM4-80GB") == accelerator("NVIDIA A100-SXM4-80GB")
    assert accelerator("NVIDIA H300") is None
    die = accelerator("AMD Instinct MI250X")
    assert die is not None
    assert die.memory_bytes == 64e9, "of one of the card's two dies"
