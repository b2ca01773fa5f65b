"""A model that is too large for one rank trains on four: resident memory of real processes."""

import ctypes
import gc
from pathlib import Path

import pytest

from fourfold.launch import Rank, run_on_local_ranks
from fourfold.specs import ModelSpec, RunSpec

MODEL = ModelSpec(
    vocab_size=64, hidden_size=384, intermediate_size=1024, num_hidden_layers=9, num_attention_heads=8
)
WHOLE_BYTES = 4 * 4 * MODEL.num_parameters
"""Weights, gradients and both moments of AdamW in float32: 256 MB, with 64 MB of weights."""
LIMIT_BYTES = 128 * 10**6
"""What each of 4 ranks may use: half of it."""
LENGTH = 4
"""So short that activations are nothing."""
STEPS = {"fsdp4": 2, "dp4": 1}
"""Optimizer state is made at the end of the first step. In dp4 that is the peak already."""

# From glibc's <malloc.h>: mallopt(3).
_M_MMAP_THRESHOLD, _M_MMAP_MAX = -3, -4


def give_freed_memory_back() -> None:
    """Let glibc take blocks above 64 KiB from the system and give each back when it is freed.

    So resident memory is what is in use. A training process keeps what it freed, in a heap with gaps.
    """
    from fourfold import training

    training.keep_freed_memory = lambda: True
    mallopt = ctypes.CDLL(None).mallopt
    assert mallopt(_M_MMAP_THRESHOLD, 2**16)
    assert mallopt(_M_MMAP_MAX, 2**16)


def resident_bytes(key: str) -> int:
    """Of this process: VmRSS is now, VmHWM at most. (``ru_maxrss`` counts what its parent had, too.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def trained(model: ModelSpec, layout: str) -> int:
    """Train a few steps; return the bytes that are predicted for weights, gradients and optimizer state."""
    from fourfold.batch.costs import held_bytes
    from fourfold.data import SyntheticDataset
    from fourfold.mesh import Mesh
    from fourfold.training import Trainer

    values = {
        "layout": layout,
        "model": {"preset": "tiny"},
        "data": {"sequence_length": LENGTH},
        "training": {"steps": STEPS[layout], "batch": 4},
        "optimizer": {"learning_rate": 1e-3},
    }
    run = RunSpec.model_validate(values)
    data = SyntheticDataset(model.vocab_size, LENGTH, seed=0)
    trainer = Trainer(run, model, Mesh(run.layout), data=data)
    for step in range(STEPS[layout]):
        trainer.step(step)
    parallel = trainer.parallel
    units = {number: unit.size for number, unit in parallel.units_by_number.items()}
    held = held_bytes(parallel.program, rank=0, units=units, temporary=True)
    return held.peak + 2 * held.owned


def growth_on_a_rank(rank: Rank) -> list[list[list[int]]]:
    """For each layout and rank, how much the process grew at most, and how much is predicted."""
    import torch

    from fourfold.collectives import all_gather
    from fourfold.mesh import Mesh
    from fourfold.specs import Layout

    rank.connect(device_type="cpu", agree_on={})
    give_freed_memory_back()
    for layout in STEPS:  # what is loaded and connected on first use is not the model's
        trained(ModelSpec.preset("tiny"), layout)
    results = []
    for layout in STEPS:
        gc.collect()
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        assert resident_bytes("VmHWM") < before + 10**6
        predicted = trained(MODEL, layout)
        mine = torch.tensor([[resident_bytes("VmHWM") - before, predicted]])
        results.append(all_gather(mine, Mesh(Layout(dp=4)).world).tolist())
    return results


@pytest.mark.usefixtures("warm")
def test_a_model_trains_where_half_of_it_fits() -> None:
    """Under 128 MB a rank, sharded over 4; each rank of plain data parallelism uses 256 MB.

    The peak is what the program of the step predicts, to 5 %.
    """
    assert 1.99 * LIMIT_BYTES < WHOLE_BYTES
    sharded, replicated = run_on_local_ranks(4, growth_on_a_rank)
    assert len(sharded) == len(replicated) == 4
    for measured, predicted in sharded:
        assert measured < LIMIT_BYTES
        assert measured == pytest.approx(predicted, rel=0.05)
    for measured, predicted in replicated:
        assert predicted == WHOLE_BYTES
        assert measured > 0.95 * WHOLE_BYTES
