"""What the planner says of memory, against the walk over the program."""

import pytest
from fourfold.planner.plans import Question

from fourfold.explain import explain
from fourfold.outline import Step
from fourfold.planner.catalogue import machine
from fourfold.planner.search import Search
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName

SPEC = ModelSpec.preset("qwen3-8b").replace({"num_hidden_layers": 12})
LAYOUTS = [
    ("dp8", 2),
    ("fsdp8", 2),
    ("dp2,fsdp4", 2),
    ("fsdp8:zero1", 2),
    ("fsdp8:zero2", 2),
    ("fsdp4,cp2", 2),
    ("fsdp4,tp2", 2),
    ("fsdp4,tp2:allreduce", 2),
    ("pp4,fsdp2", 8),
    ("pp4,dp2", 8),
    ("pp2:interleaved3,fsdp4:zero1", 8),
    ("pp4:interleaved3,tp2", 8),
    ("pp2,fsdp2:zero2,tp2", 4),
    ("pp4:zb-h1,fsdp2:zero1", 8),
]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("layout", "microbatches"), LAYOUTS)
def test_the_closed_form_agrees_with_the_walk(layout: str, microbatches: int, recompute: str) -> None:
    if "zb" in layout and recompute != "none":
        recompute = "none"  # the planner does not try the others
    step = Step(
        SPEC,
        Layout.parse(layout),
        batch=32,
        sequence_length=4096,
        microbatches=microbatches,
        dtype="bfloat16",
        recompute=RecomputeName.parse(recompute),
    )
    predicted = Search(Question(SPEC, machine("H100-80GB"), 8, 4096, 32)).plan(step).memory.allocated
    walked = max(memory.peak for memory in explain(step).memory)
    assert -0.05 < predicted / walked - 1 < 0.15
