"""What the doctor measures."""

import pytest
import torch

import fourfold
from fourfold import doctor
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.outline import Step
from fourfold.specs import Layout, ModelSpec


def test_facts():
    found = doctor.facts()
    assert found["fourfold"] == fourfold.__version__
    assert found["torch"] == torch.__version__
    assert "gloo yes" in found["backends"]
    assert found["memory"].endswith("GB available")


def test_measured_rates_are_of_this_machine():
    """No core does less than 0.1 GFLOP/s or more than 10 TFLOP/s, nor copies slower than 0.1 GB/s."""
    before = torch.get_num_threads()
    assert 1e8 < doctor.measured_peak_flops("float32", threads=1, seconds=0.05) < 1e13
    assert 1e8 < doctor.measured_copy_bytes_per_second(seconds=0.05) < 1e13
    assert torch.get_num_threads() == before


def test_the_peak_of_a_device_without_a_datasheet_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "measured_peak_flops", lambda dtype, device: 5e9)
    assert doctor.peak_of(Mesh(Layout()), "float32") == doctor.Peak(
        5e9, "float32 matmul peak measured on this machine"
    )


def test_what_cp_means_here_follows_from_the_devices(monkeypatch: pytest.MonkeyPatch):
    """From those of the table what they do; of others, and of a CPU, which ranks share a node."""
    step = Step(ModelSpec.named("llama3-8b"), Layout(cp=8), 1, 8192, dtype="bfloat16")

    def option(device_type: str, local_world_size: int) -> str:
        found = doctor.chosen_here(step, device_type, local_rank=0, local_world_size=local_world_size)
        return found.layout.options["cp"]

    found = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA GB200", "Other"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank, name=name: name)
        found[name] = option("cuda", 8), option("cuda", 4)
    assert found == {
        "NVIDIA H100 80GB HBM3": ("ulysses8", "ulysses4"),
        "NVIDIA GB200": ("ulysses8", "ulysses8"),
        "Other": ("ulysses8", "ulysses4"),
    }
    assert (option("cpu", 8), option("cpu", 2)) == ("ulysses8", "ulysses2")


def peak_of_two(layout: str) -> float:
    return doctor.peak_of(Mesh(Layout.parse(layout)), "float32").flops_per_second


def test_all_ranks_count_in_the_peak(ranks):
    first, second = ranks(2, peak_of_two, "dp2")
    assert first == second
    assert 1e8 < first < 1e13


def test_the_peak_of_a_known_gpu_is_its_datasheet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    mesh = Mesh(Layout())
    mesh.device = torch.device("cuda", 0)
    mesh.world_size = 4
    peak = doctor.peak_of(mesh, "bfloat16")
    assert peak == doctor.Peak(4 * 989.4e12, "dense bfloat16 peak of NVIDIA H100 80GB HBM3")
    given = doctor.peak_of(mesh, "bfloat16", given_tflops=750)
    assert given == doctor.Peak(3e15, "peak of logging.peak_tflops=750 a device")


def test_ranks_need_as_many_gpus(monkeypatch: pytest.MonkeyPatch):
    assert doctor.device_type(64) == ("cuda" if torch.cuda.device_count() >= 64 else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert doctor.device_type(2) == "cuda"
    with pytest.raises(UserError, match="4 ranks need 4 GPUs and this machine has 2"):
        doctor.device_type(4)
