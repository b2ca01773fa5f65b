"""What the planner says of memory, against the walk over the program."""

import pytest

from fourfold.explain import explain
from fourfold.outline import Step
from fourfold.planner.catalogue import machine
from fourfold.planner.plans import Question
from fourfold.planner.practice import OURS, Practice
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


def test_software_of_others() -> None:
    """Scores of all layers in memory; gradients in 16 bits, and of what a rank owns in 32 bits as well."""
    step = Step(SPEC, Layout.parse("fsdp8:zero1"), 8, 2048, 1, "bfloat16")
    other = Practice(fused_attention=False, gradient_bytes=2, owned_gradient_bytes=4, fragmentation=0.12)
    ours, theirs = (
        Search(Question(SPEC, machine("H100-80GB"), 8, 2048, 8, practice=practice)).plan(step).memory
        for practice in (OURS, other)
    )
    assert theirs.activations - ours.activations == 12 * 5 * SPEC.num_attention_heads * 2048**2
    assert theirs.gradients == pytest.approx((2 + 4 / 8) / 4 * ours.gradients)
    assert theirs.reserved - 1.5e9 == pytest.approx(1.12 * theirs.allocated)


def test_both_ends_of_a_pipeline_hold_a_tied_embedding() -> None:
    tied = SPEC.replace({"tie_word_embeddings": True, "num_hidden_layers": 8})
    step = Step(tied, Layout.parse("pp4"), 8, 1024, 8, "bfloat16", recompute=RecomputeName("full"))
    predicted = Search(Question(tied, machine("H100-80GB"), 4, 1024, 8)).plan(step)
    walked = [memory.peak for memory in explain(step).memory]
    assert walked[-1] > 1.5 * walked[1]
    assert abs(predicted.memory.allocated / max(walked) - 1) < 0.05
