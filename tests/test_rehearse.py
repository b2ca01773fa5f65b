"""What a rehearsal says of a rank is what the rank does: events, FLOPs, and bytes at the peak."""

import pytest
import torch

from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.rehearsal.run import Recorded, Watch, rehearse
from fourfold.specs import ModelSpec, RunSpec
from fourfold.training import Trainer
from tests.ranks import RankPool

LENGTH = 64


def a_run(
    layout: str,
    *,
    model: str = "tiny",
    microbatches: int = 2,
    dtype: str = "float32",
    recompute: str = "none",
    optimizer: str = "adamw",
) -> RunSpec:
    return RunSpec.model_validate(
        {
            "layout": layout,
            "model": {"preset": model},
            "data": {"sequence_length": LENGTH},
            "training": {
                "steps": 2,
                "batch": 8,
                "microbatches": microbatches,
                "dtype": dtype,
                "recompute": recompute,
            },
            "optimizer": {"name": optimizer, "learning_rate": 1e-3},
        }
    )


def really(run: RunSpec, model: str) -> Recorded:
    """What a living rank does."""
    watch = Watch(torch.device("cpu"))
    spec = ModelSpec.preset(model)
    data = watch.rows_of(SyntheticDataset(spec.vocab_size, LENGTH, seed=0))
    return watch.second_step(Trainer(run, spec, Mesh(run.layout), data=data))


CASES = [
    ("dp1", {}),
    ("dp2", {}),
    ("dp1", {"recompute": "full"}),
    ("dp1", {"recompute": "sqrt", "dtype": "bfloat16"}),
    ("fsdp2", {}),
    ("fsdp2", {"recompute": "full"}),
    ("fsdp3:zero2", {"dtype": "bfloat16"}),
    ("dp2,fsdp2", {"optimizer": "muon"}),
    ("pp2", {"microbatches": 4}),
    ("pp2", {"microbatches": 4, "recompute": "full"}),
    ("pp2:interleaved2,fsdp2", {}),
    ("tp2", {}),
    ("tp2", {"dtype": "bfloat16", "recompute": "every:2"}),
    ("tp4:allreduce", {}),
    ("cp2:ring", {}),
    ("cp2:ulysses", {}),
]


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_a_rehearsal_is_what_happens(ranks: RankPool, layout: str, options: dict[str, object]) -> None:
    model = "tiny-qwen3" if options.get("dtype") == "bfloat16" else "tiny"
    run = a_run(layout, model=model, **options)  # type: ignore[arg-type]
    spec = ModelSpec.preset(model)
    data = SyntheticDataset(spec.vocab_size, LENGTH, seed=0)
    found = ranks(run.layout.world_size, really, run, model)
    for rank in {0, len(found) - 1}:
        real = found[rank]
        rehearsed = rehearse(run, spec, rank=rank, device_type="cpu", data=data)
        print(
            rank,
            real.peak_bytes,
            rehearsed.peak_bytes,
            sum(real.peak_bytes.values()),
            sum(rehearsed.peak_bytes.values()),
            real.flops,
        )
        assert rehearsed.events == real.events
        assert rehearsed.flops == real.flops > 0
        # AdamW in operations has its counts of steps on the CPU, the fused one on the device: 4 bytes each.
        assert sum(rehearsed.rest_bytes.values()) == pytest.approx(sum(real.rest_bytes.values()), abs=64)
        assert sum(rehearsed.peak_bytes.values()) == pytest.approx(sum(real.peak_bytes.values()), rel=0.01)
