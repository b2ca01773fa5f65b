"""When the weights of each unit come and go: whole programs, written out."""

from itertools import product

import pytest

from fourfold.batch.gathers import with_gathers
from fourfold.build import Sharding, UnitUse, build, evaluation
from fourfold.layer.schedules import one_forward_one_backward
from fourfold.program import Kind, Program
from fourfold.specs import Placement
from tests.programs import FSDP, REPLICAS, ZERO1, ZERO2, one_stage, own_units, units_with_users, written

EMBEDDING = frozenset({0})
ONE_STEP = "LOSS 3B0 3REDUCE 2B0 2REDUCE 1B0 1REDUCE 0B0 0REDUCE UPDATE"


def program_of(
    microbatches: int,
    placement: Placement = FSDP,
    *,
    prefetch: int = 1,
    keep: bool = False,
    users: list[UnitUse] | None = None,
    lookups: frozenset[int] = EMBEDDING,
    segments: int = 4,
) -> Program:
    """An embedding, two blocks and a head."""
    sharding = Sharding(placement, prefetch=prefetch, keep=keep)
    return one_stage(segments, microbatches, units=users, sharding=sharding, lookups=lookups)


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        # Each use alone; only the head stays, whose backward follows its forward.
        (
            0,
            "0GATHER0 0F0 0FREE0 1GATHER0 1F0 1FREE0 2GATHER0 2F0 2FREE0 3GATHER0 3F0 LOSS "
            "3B0 3REDUCE 3FREE0 2GATHER1 2B0 2REDUCE 2FREE1 1GATHER1 1B0 1REDUCE 1FREE1 0B0 0REDUCE UPDATE",
        ),
        # Two units at once: at the turn those are the head and the block before it.
        (
            1,
            "0GATHER0 1GATHER0 0F0 0FREE0 2GATHER0 1F0 1FREE0 3GATHER0 2F0 3F0 LOSS 3B0 3REDUCE 3FREE0 "
            "1GATHER1 2B0 2REDUCE 2FREE0 1B0 1REDUCE 1FREE1 0B0 0REDUCE UPDATE",
        ),
        (
            2,
            "0GATHER0 1GATHER0 2GATHER0 0F0 0FREE0 3GATHER0 1F0 2F0 3F0 LOSS 3B0 3REDUCE 3FREE0 "
            "2B0 2REDUCE 2FREE0 1B0 1REDUCE 1FREE0 0B0 0REDUCE UPDATE",
        ),
    ],
)
def test_fully_sharded_weights_come_before_a_use_and_go_after_it(prefetch: int, expected: str) -> None:
    assert written(program_of(1, prefetch=prefetch)) == expected


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (
            0,
            "0GATHER0 0F0 0FREE0 1GATHER0 1F0 1FREE0 2GATHER0 2F0 2FREE0 3GATHER0 3F0 3B0 3REDUCE0 3FREE0 "
            "2GATHER1 2B0 2REDUCE0 2FREE1 1GATHER1 1B0 1REDUCE0 1FREE1 0B0 0REDUCE0 "
            "0GATHER1 0F1 0FREE1 1GATHER2 1F1 1FREE2 2GATHER2 2F1 2FREE2 3GATHER1 3F1 LOSS "
            "3B1 3REDUCE1 3FREE1 2GATHER3 2B1 2REDUCE1 2FREE3 1GATHER3 1B1 1REDUCE1 1FREE3 0B1 "
            "0REDUCE1 UPDATE",
        ),
        # Block 1 stays from its backward to its next forward: only the embedding computes in between.
        (
            1,
            "0GATHER0 1GATHER0 0F0 0FREE0 2GATHER0 1F0 1FREE0 3GATHER0 2F0 3F0 3B0 3REDUCE0 3FREE0 "
            "1GATHER1 2B0 2REDUCE0 2FREE0 1B0 1REDUCE0 0GATHER1 0B0 0REDUCE0 "
            "0F1 0FREE1 2GATHER1 1F1 1FREE1 3GATHER1 2F1 3F1 LOSS 3B1 3REDUCE1 3FREE1 "
            "1GATHER2 2B1 2REDUCE1 2FREE1 1B1 1REDUCE1 1FREE2 0B1 0REDUCE1 UPDATE",
        ),
        (
            2,
            "0GATHER0 1GATHER0 2GATHER0 0F0 0FREE0 3GATHER0 1F0 2F0 3F0 3B0 3REDUCE0 3FREE0 "
            "2B0 2REDUCE0 0GATHER1 1B0 1REDUCE0 0B0 0REDUCE0 "
            "0F1 0FREE1 3GATHER1 1F1 2F1 3F1 LOSS 3B1 3REDUCE1 3FREE1 "
            "2B1 2REDUCE1 2FREE0 1B1 1REDUCE1 1FREE0 0B1 0REDUCE1 UPDATE",
        ),
    ],
)
def test_each_microbatch_gathers_and_reduces_anew(prefetch: int, expected: str) -> None:
    assert written(program_of(2, prefetch=prefetch)) == expected


@pytest.mark.parametrize(
    ("prefetch", "forwards"),
    [
        (0, "0GATHER0 0F0 1GATHER0 1F0 2GATHER0 2F0 3GATHER0 3F0"),
        (1, "0GATHER0 1GATHER0 0F0 2GATHER0 1F0 3GATHER0 2F0 3F0"),
        (2, "0GATHER0 1GATHER0 2GATHER0 0F0 3GATHER0 1F0 2F0 3F0"),
        (99, "0GATHER0 1GATHER0 2GATHER0 3GATHER0 0F0 1F0 2F0 3F0"),
    ],
)
def test_with_whole_weights_one_gather_after_the_update_is_enough(prefetch: int, forwards: str) -> None:
    """ZeRO-1 and ZeRO-2: once before the first use of a step, for all microbatches, and never freed."""
    for placement in (ZERO1, ZERO2):
        assert written(program_of(1, placement, prefetch=prefetch)) == f"{forwards} {ONE_STEP}"
    later = "0F1 1F1 2F1 3F1"
    assert written(program_of(2, ZERO1, prefetch=prefetch)) == (
        f"{forwards} 3B0 2B0 1B0 0B0 {later} {ONE_STEP.replace('B0', 'B1')}"
    )
    # ZeRO-2 keeps only pieces of gradients, so every microbatch's are reduced.
    assert written(program_of(2, ZERO2, prefetch=prefetch)) == (
        f"{forwards} 3B0 3REDUCE0 2B0 2REDUCE0 1B0 1REDUCE0 0B0 0REDUCE0 {later} "
        "LOSS 3B1 3REDUCE1 2B1 2REDUCE1 1B1 1REDUCE1 0B1 0REDUCE1 UPDATE"
    )


def test_weights_that_are_kept_come_once_a_step_and_gradients_go_once() -> None:
    assert written(program_of(2, keep=True)) == (
        "0GATHER0 1GATHER0 0F0 2GATHER0 1F0 3GATHER0 2F0 3F0 3B0 2B0 1B0 0B0 0F1 0FREE0 1F1 2F1 3F1 "
        "LOSS 3B1 3REDUCE 3FREE0 2B1 2REDUCE 2FREE0 1B1 1REDUCE 1FREE0 0B1 0REDUCE UPDATE"
    )
    zero1 = written(program_of(2, ZERO1))
    assert written(program_of(2, ZERO1, keep=True)) == written(program_of(2, ZERO2, keep=True)) == zero1


def test_the_head_is_gathered_once_a_microbatch() -> None:
    """Its backward follows its forward, whatever the prefetch."""
    for prefetch, microbatches in product((0, 1, 2, 5), (1, 2, 3)):
        words = written(program_of(microbatches, prefetch=prefetch)).split()
        for microbatch in range(microbatches):
            between = words[words.index(f"3F{microbatch}") + 1 : words.index(f"3B{microbatch}")]
            assert between == (["LOSS"] if microbatch == microbatches - 1 else [])
        assert sum(word.startswith("3GATHER") for word in words) <= microbatches


def test_an_embedding_is_not_gathered_for_its_backward() -> None:
    """A lookup's weight gradient needs the ids alone; any other first segment needs its weights."""
    assert "0FREE0 1GATHER0 1F0" in written(program_of(1, prefetch=0, segments=2))
    assert written(program_of(1, prefetch=0, segments=2)).endswith("1FREE0 0B0 0REDUCE UPDATE")
    assert written(program_of(1, prefetch=0, segments=2, lookups=frozenset())).endswith(
        "1FREE0 0GATHER1 0B0 0REDUCE 0FREE1 UPDATE"
    )


def test_a_tied_head_gathers_the_embedding_and_its_own_norm() -> None:
    tied = units_with_users((0, 3), (1,), (2,), (3,))
    # Gathered for the lookup, again for the head, and not for the embedding's backward.
    assert written(program_of(1, prefetch=0, users=tied)) == (
        "0GATHER0 0F0 0FREE0 1GATHER0 1F0 1FREE0 2GATHER0 2F0 2FREE0 0GATHER1 3GATHER0 3F0 LOSS 3B0 3REDUCE "
        "0FREE1 3FREE0 2GATHER1 2B0 2REDUCE 2FREE1 1GATHER1 1B0 1REDUCE 1FREE1 0B0 0REDUCE UPDATE"
    )
    # Only one block computes between the first use and the gather for the second: the embedding stays.
    assert written(program_of(1, prefetch=1, users=tied)) == (
        "0GATHER0 1GATHER0 0F0 2GATHER0 1F0 1FREE0 3GATHER0 2F0 3F0 LOSS 3B0 3REDUCE 0FREE0 3FREE0 "
        "1GATHER1 2B0 2REDUCE 2FREE0 1B0 1REDUCE 1FREE1 0B0 0REDUCE UPDATE"
    )


def test_frozen_weights_come_and_go_but_are_not_reduced() -> None:
    """Segment 1 has a frozen and a trained unit."""
    units = [UnitUse((0,)), UnitUse((1,), trained=False), UnitUse((1,)), UnitUse((2,))]
    assert written(program_of(1, prefetch=0, users=units, segments=3)) == (
        "0GATHER0 0F0 0FREE0 1GATHER0 2GATHER0 1F0 1FREE0 2FREE0 3GATHER0 2F0 LOSS 2B0 3REDUCE 3FREE0 "
        "1GATHER1 2GATHER1 1B0 2REDUCE 1FREE1 2FREE1 0B0 0REDUCE UPDATE"
    )


def test_replicated_weights_are_never_gathered() -> None:
    program = one_stage(4, 2, lookups=EMBEDDING)
    assert not {action.kind for _, action in program.actions()} & {Kind.GATHER, Kind.FREE}
    assert with_gathers(program, prefetch=1, keep=False) is program


def most_present(program: Program) -> int:
    """The most units whose weights are there at once, while nothing is kept that is not asked for."""
    present: set[int] = set()
    most = 0
    for action in program.ranks[0]:
        if action.kind is Kind.GATHER:
            present.add(action.unit)
        elif action.kind is Kind.FREE:
            present.remove(action.unit)
        most = max(most, len(present))
    assert not present
    return most


@pytest.mark.parametrize("lookups", [frozenset(), EMBEDDING])
@pytest.mark.parametrize("segments", range(1, 8))
def test_no_more_weights_are_there_than_asked_for(segments: int, lookups: frozenset[int]) -> None:
    """The weights of prefetch + 1 units at once, and of one more where the head is tied to the embedding."""
    for microbatches, prefetch in product((1, 2, 3), range(6)):
        sharding = Sharding(FSDP, prefetch=prefetch)
        program = one_stage(segments, microbatches, sharding=sharding, lookups=lookups)
        assert most_present(program) == min(segments, prefetch + 1)
        users = [(0, segments - 1), *((segment,) for segment in range(1, segments))]
        if segments > 2:
            tied = one_stage(
                segments, microbatches, units=units_with_users(*users), sharding=sharding, lookups=lookups
            )
            assert most_present(tied) <= min(segments, prefetch + 2)


def test_each_stage_gathers_its_own_units() -> None:
    program = build(
        one_forward_one_backward(ranks=2, microbatches=1),
        segments_of_stage=[2, 1],
        units=own_units(3),
        sharding=Sharding(FSDP, prefetch=1),
        lookups=EMBEDDING,
    )
    assert written(program, 0) == (
        "0GATHER0 1GATHER0 0F0 0FREE0 1RECV_B0 1F0 1SEND_F0 LOSS 1B0 1REDUCE 1FREE0 0B0 0REDUCE UPDATE"
    )
    # Weights are not read by a weight gradient.
    assert written(program, 1) == "2GATHER0 2RECV_F0 2F0 LOSS 2I0 2SEND_B0 2FREE0 2W0 2REDUCE UPDATE"


def test_an_evaluation_gathers_and_frees_too() -> None:
    sharding = Sharding(FSDP, prefetch=0)
    training = one_stage(2, 1, sharding=sharding, lookups=EMBEDDING)
    assert written(evaluation(training, microbatches=2, sharding=sharding)) == (
        "0GATHER0 0F0 0FREE0 1GATHER0 1F0 1FREE0 0GATHER1 0F1 0FREE1 1GATHER1 1F1 1FREE1"
    )
    zero1 = Sharding(ZERO1, prefetch=1)
    training = one_stage(2, 1, sharding=zero1, lookups=EMBEDDING)
    assert written(evaluation(training, microbatches=2, sharding=zero1)) == (
        "0GATHER0 1GATHER0 0F0 1F0 0F1 1F1"
    )
    assert written(evaluation(one_stage(2, 1), microbatches=2, sharding=REPLICAS)) == "0F0 1F0 0F1 1F1"
