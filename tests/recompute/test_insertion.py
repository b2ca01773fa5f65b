"""Where recomputation stands in a program."""

import pytest

from fourfold.build import Sharding, build
from fourfold.layer.schedules import schedule
from fourfold.program import Action, Kind, Program, clock
from fourfold.program.liveness import Block
from fourfold.specs.recompute_name import RecomputeName
from tests.programs import FSDP, REPLICAS, own_units, written


def step(
    policy: str,
    name: str = "1f1b",
    *,
    ranks: int = 1,
    microbatches: int = 1,
    segments: tuple[int, ...] = (4,),
    sharding: Sharding = REPLICAS,
    lookups: frozenset[int] = frozenset(),
) -> Program:
    count = sum(segments)
    return build(
        schedule(name, ranks=ranks, microbatches=microbatches),
        segments_of_stage=segments,
        units=own_units(count),
        sharding=sharding,
        lookups=lookups,
        recompute=RecomputeName.parse(policy),
        blocks=[Block()] * count,
    )


def compute(program: Program, rank: int = 0) -> str:
    kinds = {Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE}
    return " ".join(str(action) for action in program.ranks[rank] if action.kind in kinds)


def test_on_one_rank_the_backward_comes_at_once() -> None:
    """The last block's forward leaves its tape: it would run again right after it ran."""
    assert compute(step("full")) == "0F0 1F0 2F0 3F0 3B0 2R0 2B0 1R0 1B0 0R0 0B0"
    assert compute(step("min")) == "0F0 1F0 2F0 3F0 3B0 0R0 1R0 2R0 2B0 0R0.1 1R0.1 1B0 0R0.2 0B0"
    assert compute(step("every:2")) == "0F0 1F0 2F0 3F0 3B0 2B0 0R0 1R0 1B0 0B0"


def test_with_all_forwards_first_everything_runs_again() -> None:
    """But the microbatch whose backward follows."""
    assert compute(step("full", "gpipe", microbatches=2, segments=(2,))) == (
        "0F0 1F0 0F1 1F1 1R0 1B0 0R0 0B0 1R1 1B1 0R1 0B1"
    )


def test_a_lookup_is_never_computed_again() -> None:
    program = step("min", microbatches=2, lookups=frozenset({0}))
    assert "0R" not in compute(program)
    assert "1R0 2R0 2B0 1R0.1 1B0 0B0" in compute(program)


def test_before_the_input_gradient_and_never_for_the_weight_gradient() -> None:
    program = step("full", "zb-h1", ranks=2, microbatches=3, segments=(2, 2))
    assert compute(program, 0).startswith("0F0 1F0 0F1 1F1 1R0 1I0 0R0 0I0 1W0 0W0 0F2 1F2 1R1 1I1 0R1 0I1")
    assert compute(program, 1).startswith("2F0 3F0 3I0 2R0 2I0 2F1 3F1 3I1 2R1 2I1 3W0 2W0")
    for rank, expected in enumerate((2 * 3, 3)):
        assert sum(action.kind is Kind.RECOMPUTE for action in program.ranks[rank]) == expected


def test_each_stage_of_a_v_is_planned_for_itself() -> None:
    """The last rank holds stages 1 and 2, neighbours: each keeps its own input."""
    program = step("min", "zbv", ranks=2, microbatches=2, segments=(2, 2, 2, 2))
    order = compute(program, 1).split()
    before = order[: order.index("3I0")]
    assert before[-2:] == ["2R0", "3R0"]
    assert "2R0" not in order[: order.index("4I0")]


def test_weights_are_gathered_for_both_at_once() -> None:
    """One gather serves R and the backward behind it, and is freed after."""
    program = step("full", sharding=Sharding(FSDP), segments=(4,))
    text = written(program)
    assert text.count("1GATHER") == 2
    assert "1R0 1B0" in text.replace(" 0GATHER1", "")
    middle = text[text.index("1GATHER1") : text.index("1FREE1")]
    assert "1R0" in middle
    assert "1B0" in middle


def test_it_runs_while_a_gradient_is_on_its_way() -> None:
    """The first rank computes again while the second has its turn: R takes the bubble's time."""
    program = step("full", ranks=2, microbatches=2, segments=(1, 1))
    spans = {str(span.action): (span.start_seconds, span.end_seconds) for span in clock(program).spans}
    assert (spans["0F1"], spans["0R0"], spans["0B0"]) == ((1, 2), (2, 3), (3, 5))
    assert (spans["1F0"], spans["1I0"]) == ((1, 2), (2, 3)), "what 0B0 waits for ends no sooner than 0R0"


@pytest.mark.parametrize("policy", ["full", "every:2", "sqrt", "slots:2", "min"])
@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved2", "bfs2", "zb-h1", "zb-h2", "zbv", "dualpipev"]
)
def test_every_schedule_takes_every_policy(name: str, policy: str) -> None:
    """`build` checks each: no deadlock, every need met; and each forward is followed by one backward."""
    stages = schedule(name, ranks=2, microbatches=4).num_segments
    program = step(policy, name, ranks=2, microbatches=4, segments=(3,) * stages)
    assert any(action.kind is Kind.RECOMPUTE for _, action in program.actions())
    for m in range(4):
        assert sum(action == Action(Kind.FORWARD, 0, m) for _, action in program.actions()) == 1
