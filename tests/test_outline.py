"""The outline of a model is what `parallelize` makes of it, on every rank."""

import pytest
import torch

from fourfold.assembly import parallelize
from fourfold.mesh import Mesh
from fourfold.models import Decoder
from fourfold.outline import Step, outline
from fourfold.specs import Layout, ModelSpec, ShardingSection
from fourfold.specs.recompute_name import RecomputeName
from tests.ranks import RankPool

LENGTH = 16


def step_of(model: str, layout: str, dtype: str, pieces: str, recompute: str) -> Step:
    return Step(
        ModelSpec.preset(model),
        Layout.parse(layout),
        batch=24,
        sequence_length=LENGTH,
        microbatches=3,
        dtype=dtype,
        sharding=ShardingSection(pieces=pieces),
        recompute=RecomputeName.parse(recompute),
    )


def differences(step: Step) -> list[str]:
    """What a rank's parallel model has otherwise than its outline."""
    mesh = Mesh(step.layout)
    with torch.device("meta"):
        model = Decoder(step.spec)
    parallel = parallelize(
        model,
        mesh=mesh,
        microbatches=step.microbatches,
        dtype=getattr(torch, step.dtype),
        sharding=step.sharding,
        sequence_length=step.sequence_length,
        rows=step.rows,
        recompute=step.recompute,
    )
    expected = outline(step, tp_rank=mesh.tp.rank)
    sizes = {number: unit.size for number, unit in parallel.units_by_number.items()}
    names = [list(piece.blocks) for piece in parallel.stages.segments]
    found = {
        "program": parallel.program == expected.program,
        "units": sizes == expected.units_on(mesh.pp.rank, mesh.shards.rank),
        "blocks": names == [list(blocks) for blocks in expected.blocks],
    }
    return [what for what, same in found.items() if not same]


@pytest.mark.parametrize("model", ["tiny", "tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize(
    ("layout", "dtype", "pieces", "recompute"),
    [
        ("dp2", "float32", "auto", "none"),
        ("fsdp4", "bfloat16", "auto", "full"),
        ("fsdp2:zero1", "float64", "flat", "none"),
        ("dp2,fsdp2:zero2", "bfloat16", "rows", "every:2"),
        ("pp2,fsdp2", "float32", "blocks", "none"),
        ("pp4:zb-h1", "bfloat16", "auto", "min"),
        ("pp2:interleaved2", "float32", "auto", "full"),
        ("tp2", "float32", "auto", "none"),
        ("tp8:allreduce", "bfloat16", "auto", "none"),
        ("fsdp2,tp4", "bfloat16", "auto", "full"),
        ("cp2:ring,tp2", "float32", "auto", "none"),
        ("fsdp2,cp3", "float64", "auto", "budget:0.001"),
        ("pp2,fsdp2,tp2", "bfloat16", "matrices", "none"),
    ],
)
def test_the_outline_is_what_is_built(
    ranks: RankPool, model: str, layout: str, dtype: str, pieces: str, recompute: str
) -> None:
    step = step_of(model, layout, dtype, pieces, recompute)
    size = step.layout.world_size
    assert ranks(size, differences, step) == [[]] * size


def test_the_largest_layout_takes_one_rank_of_each_stage() -> None:
    """Llama 3 405B on 16,384 ranks as published (arXiv:2407.21783, table 4): 16 pipeline ranks."""
    step = Step(
        ModelSpec.preset("llama3-405b"),
        Layout.parse("pp16,fsdp128,tp8"),
        batch=2048,
        sequence_length=8192,
        microbatches=16,
        dtype="bfloat16",
    )
    found = outline(step)
    assert len(found.program.ranks) == 16
    assert step.rows == 1
    held = sum(unit.pieces.counts[0] for unit in found.units)
    assert held * 8 * 128 == pytest.approx(step.spec.num_parameters, rel=0.01)
