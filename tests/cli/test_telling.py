"""What a run says of its stages."""

import pytest

from fourfold.cli.telling import stage_lines
from fourfold.mesh import RehearsedMesh, StandIn
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.training import initialized


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_stage_is_on_its_rank(recompute: str) -> None:
    """Also where small blocks of a stage are one segment, so that there are fewer segments than blocks."""
    parallel = initialized(
        ModelSpec.preset("tiny"),
        RehearsedMesh(Layout.parse("pp2:zbv"), 0, StandIn("gloo")),
        microbatches=4,
        dtype="float32",
        seed=0,
        sequence_length=16,
        recompute=RecomputeName.parse(recompute),
    )
    assert (len(parallel.stages.segments) < 6) == (recompute == "none")
    assert stage_lines(parallel).splitlines() == [
        "stage 0 on pipeline rank 0: embed to layer.0",
        "stage 1 on pipeline rank 1: layer.1",
        "stage 2 on pipeline rank 1: layer.2",
        "stage 3 on pipeline rank 0: layer.3 to head",
    ]
