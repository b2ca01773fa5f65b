"""What cp is where its option is not given: from the heads, from where ranks stand, from what links do."""

from dataclasses import replace

import pytest

from fourfold.outline import Step
from fourfold.planner.attention import moved_bytes
from fourfold.planner.catalogue import machine
from fourfold.planner.context import chosen
from fourfold.specs import Layout, ModelSpec

TINY, LLAMA = ModelSpec.preset("tiny"), ModelSpec.named("llama3-8b")


def step(layout: str, spec: ModelSpec = TINY, sequence_length: int = 64) -> Step:
    return Step(spec, Layout.parse(layout), 1, sequence_length, dtype="bfloat16")


def option(asked: Step, **known: object) -> str:
    return chosen(asked, **known).layout.options.get("cp", "")  # type: ignore[arg-type]


def test_what_is_written_stays() -> None:
    for layout in ("dp2", "cp4:ring", "cp4:ulysses"):
        choice = chosen(step(layout), node=2)
        assert (str(choice.layout), choice.why) == (layout, "")


def test_of_heads_alone_it_is_what_sends_least() -> None:
    """And the same as where no command asks."""
    for layout in ("cp2", "cp3", "cp4", "cp6", "fsdp2,cp8", "cp4,tp2"):
        choice = chosen(step(layout))
        assert choice.layout == Layout.parse(layout).resolved(TINY)
    assert chosen(step("cp4")).why == "cp=4 is ulysses4: ring or ulysses2 would send no less"
    assert chosen(step("cp3")).why == "cp=3 is ring: the heads allow no other"


@pytest.mark.parametrize(
    ("layout", "node", "found"),
    [
        ("cp4", 4, "ulysses4"),
        ("cp4", 2, "ulysses2"),
        ("cp4", 1, "ring"),
        ("cp4", 8, "ulysses4"),
        ("cp4", 3, "ring"),  # no group of 2 neighbours lies within every node
        ("dp2,cp4", 4, "ulysses4"),
        ("cp4,tp2", 4, "ulysses2"),  # two ranks of tp stand between neighbours of cp
    ],
)
def test_heads_are_exchanged_within_a_node(layout: str, node: int, found: str) -> None:
    assert option(step(layout), node=node) == found


def test_a_window_speaks_for_the_ring() -> None:
    """It shrinks the messages of a ring, and not what Ulysses exchanges."""
    for window, found in ((None, "ulysses8"), (1024, "ring"), (4096, "ring"), (32768, "ulysses8")):
        spec = LLAMA.replace({"sliding_window": window})
        assert option(step("cp8", spec, 32768)) == found


def test_of_nodes_it_is_said() -> None:
    assert chosen(step("cp4"), node=2).why == (
        "cp=4 is ulysses2: ring would send no less, ulysses4 would exchange heads between nodes of 2 ranks"
    )


def test_links_that_are_known_decide() -> None:
    """Over the bus of a host an exchange stands in the way, over NVLink it hardly does."""
    bus = chosen(step("cp4", LLAMA, 8192), machine=machine("L40S"))
    assert bus.layout.options["cp"] == "ring"
    assert bus.why == "cp=4 is ring: ulysses2 or ulysses4 would be slower on L40S"
    for nodes_of, found in ((8, "ulysses8"), (4, "ulysses4"), (2, "ulysses2")):
        cluster = machine("H100-80GB", nodes_of=nodes_of)
        assert option(step("cp8", LLAMA, 8192), machine=cluster) == found


def test_the_batch_and_the_other_axes_do_not_matter() -> None:
    """A layout means the same whatever it is trained with."""
    bus = machine("L40S")
    asked = replace(step("pp2,fsdp2,cp4", LLAMA, 8192), batch=16, microbatches=4)
    assert chosen(asked, machine=bus).why == chosen(step("cp4", LLAMA, 8192), machine=bus).why


def test_what_cp_moves_in_memory() -> None:
    """Of 16 tokens a rank with 8 query heads and 4 key/value heads of 16 channels, in 2 and 4 bytes."""
    queries = keys = 16 * 16 * 8
    assert moved_bytes(step("dp1")) == (0, 0)
    steps = 3 * 0.75
    forward = queries * (5 * 4 + 2 + 4) + keys * 2 * 2
    backward = queries * (2 * 4 + 2) + keys * (6 * 4 + 5 * 2)
    assert moved_bytes(step("cp4:ring")) == (steps * forward, steps * backward)
    assert moved_bytes(step("cp4:ulysses")) == (6 * 2 * (2 * queries + keys),) * 2
