"""Machines by name, and calibrations on top of them."""

import json
from pathlib import Path

import pytest

from fourfold.errors import UserError
from fourfold.planner.catalogue import SHORT_NAMES, machine
from fourfold.specs.hardware import accelerator
from fourfold.traffic import Event


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_every_short_name_is_a_device(name: str) -> None:
    found = machine(name)
    assert found.name == name
    device = accelerator(SHORT_NAMES[name])
    assert device is not None
    assert 0.9 * device.memory_bytes < found.memory_bytes < device.memory_bytes
    assert all(0.4 < share < 0.95 for share in found.product_efficiency.values())


@pytest.mark.parametrize("text", ["H100-80GB", "h100-80gb", "H100-80GB-SXM", "NVIDIA H100 80GB HBM3"])
def test_a_device_may_be_spelled_in_several_ways(text: str) -> None:
    assert machine(text).peak_flops["bfloat16"] == 989.4e12


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'H100-90GB' is not known\. Did you mean 'H100-"):
        machine("H100-90GB")


def test_a_calibration_replaces_fields_and_comes_back_from_json(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(
        json.dumps(
            {
                "launch_seconds": 1e-5,
                "levels": [{"ranks": 0, "bytes_per_second": 1e9, "latency_seconds": 1e-5}],
            }
        )
    )
    found = machine("A100-80GB").calibrated(file)
    assert found.launch_seconds == 1e-5
    assert found.levels[0].bytes_per_second == 1e9
    assert "calibrated" in found.source
    file.write_text(json.dumps(found.to_json()))
    assert machine("V100-32GB").calibrated(file) == found
    file.write_text(json.dumps({"lunch_seconds": 1.0}))
    with pytest.raises(UserError, match=r"no field 'lunch_seconds'\. Did you mean 'launch_seconds'"):
        found.calibrated(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "is no JSON object"),
        ('{"levels": 3}', "levels is not as fourfold bench writes it"),
        ('{"levels": [{"ranks": 8}]}', "levels is not as"),
        (
            '{"products": [{"m": "1", "n": 1, "k": 1, "dtype": "bfloat16", "seconds": 1}]}',
            "products is not as",
        ),
        ('{"peak_flops": 1e15}', "peak_flops is not as"),
        ('{"launch_seconds": NaN}', "launch_seconds is not as"),
    ],
)
def test_a_calibration_that_nothing_wrote_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        machine("A100-80GB").calibrated(file)


def test_a_product_counts_whole_waves_and_memory() -> None:
    found = machine("A100-80GB")
    one_wave = found.product_seconds(128 * 108, 256, 4096, "bfloat16")
    assert found.product_seconds(128 * 109, 256, 4096, "bfloat16") == pytest.approx(2 * one_wave, rel=1e-6)
    thin = found.product_seconds(1, 8192, 8192, "bfloat16")
    assert thin == pytest.approx(8192 * 8192 * 2 / found.memory_bytes_per_second, rel=1e-3)


def test_ranks_of_a_node_share_its_links_to_the_next() -> None:
    found = machine("H100-80GB")
    event = Event("all_gather", "fsdp", 10**9, "bfloat16")
    near = found.collective_seconds(event, 8)
    both = found.collective_seconds(event, 64)  # eight nodes, eight ranks in each
    far = found.collective_seconds(event, 8, stride=8)  # one rank of each node
    assert near < both < far
    assert far == pytest.approx(7 / 8 * 1e9 / (50e9 * 0.85) + 7 * 12e-6 + found.launch_seconds)
    assert both == pytest.approx(7 / 8 * 1e9 / (8 * 50e9 * 0.85) + 63 * 12e-6 + found.launch_seconds)


def test_a_measured_collective_goes_before_the_formula(tmp_path: Path) -> None:
    rows = [
        {"op": "all_gather", "ranks": 8, "near": 8, "bytes": size, "seconds": size / 1e9}
        for size in (1000, 10**6)
    ]
    (tmp_path / "c.json").write_text(json.dumps({"collectives": rows}))
    found = machine("H100-80GB").calibrated(tmp_path / "c.json")
    assert found.collective_seconds(Event("all_gather", "fsdp", 10**5, ""), 8) == pytest.approx(1e-4)
    assert found.collective_seconds(Event("all_gather", "fsdp", 10**7, ""), 8) == pytest.approx(1e-2)
    assert found.collective_seconds(Event("all_reduce", "fsdp", 10**7, ""), 8) < 1e-3
