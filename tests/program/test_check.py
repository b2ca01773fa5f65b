"""A right program passes; each way to break it is refused, with the action and the reason."""

from dataclasses import replace

import pytest

from fourfold.build import build
from fourfold.errors import UserError
from fourfold.layer.schedules import one_forward_one_backward, schedule
from fourfold.program import Action, Program, check


def parse(*ranks: str, rank_of_segment: tuple[int, ...], microbatches: int) -> Program:
    return Program(
        ranks=tuple(tuple(Action.parse(word) for word in rank.split()) for rank in ranks),
        rank_of_segment=rank_of_segment,
        microbatches=microbatches,
        users=tuple((segment,) for segment in range(len(rank_of_segment))),
    )


def step_program() -> Program:
    """Two segments on one rank, two microbatches, whole."""
    return build(
        one_forward_one_backward(stages=1, microbatches=2), segments_of_stage=[2], users=[(0,), (1,)]
    )


def edited(old: str, new: str) -> Program:
    """The step program with some of its text replaced."""
    program = step_program()
    text = " ".join(map(str, program.ranks[0]))
    assert old in text
    return replace(program, ranks=(tuple(Action.parse(word) for word in text.replace(old, new).split()),))


def test_the_step_program_is_right() -> None:
    program = step_program()
    assert " ".join(map(str, program.ranks[0])) == (
        "0F0 1F0 1B0 0B0 0F1 1F1 LOSS 1B1 1REDUCE 0B1 0REDUCE UPDATE"
    )
    check(program)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 16])
def test_every_named_schedule_is_right(name: str, stages: int, microbatches: int) -> None:
    check(schedule(name, stages=stages, microbatches=microbatches))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("1B0 0B0", "1B0", "the backward of segment 0 on microbatch 0 is B 0, I 0, W 0 times"),
        ("0F1 1F1", "0F1 0F1 1F1", "0F1 stands 2 times: must be once"),
        ("1B0 0B0", "0B0 1B0", "0B0 on rank 0 can never start: it waits for 1B0"),
        ("0F0 1F0", "1F0 0F0", "1F0 on rank 0 can never start: it waits for 0F0"),
        ("1B1 1REDUCE", "1REDUCE 1B1", "1REDUCE on rank 0 can never start: it waits for 1B1"),
        (" 0REDUCE", "", "0REDUCE stands 0 times on rank 0"),
        ("0REDUCE UPDATE", "UPDATE 0REDUCE", "UPDATE on rank 0 can never start: it waits for 0REDUCE"),
        ("1F1 LOSS", "LOSS 1F1", "LOSS on rank 0 can never start: it waits for 1F1"),
        ("1B1 1REDUCE", "1I1 1REDUCE", "B 0, I 1, W 0 times"),
        ("1B1 1REDUCE", "1I1 1REDUCE 1W1", "1REDUCE on rank 0 can never start: it waits for 1W1"),
        ("1B1 1REDUCE", "1W1 1I1 1REDUCE", "1W1 on rank 0 can never start: it waits for 1I1"),
        ("0F1", "0F7", "0F7 on rank 0: there are 2 microbatches"),
        ("1F1", "5F1", "5F1 on rank 0: there are 2 segments"),
    ],
)
def test_a_broken_program_is_refused_with_the_reason(old: str, new: str, reason: str) -> None:
    with pytest.raises(UserError) as error:
        check(edited(old, new))
    assert reason in str(error.value)


def test_halves_of_a_backward_may_stand_apart() -> None:
    check(edited("1B1 1REDUCE 0B1 0REDUCE", "1I1 0I1 0W1 0REDUCE 1W1 1REDUCE"))


def test_two_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    program = parse("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", rank_of_segment=(0, 1), microbatches=2)
    with pytest.raises(UserError) as error:
        check(program)
    assert error.value.messages == (
        "0B0 on rank 0 can never start: it waits for 1B0",
        "1F1 on rank 1 can never start: it waits for 0F1",
    )


def test_an_action_on_the_wrong_rank_is_refused() -> None:
    program = parse("0F0 1B0", "1F0 0B0", rank_of_segment=(0, 1), microbatches=1)
    with pytest.raises(UserError, match="1B0 on rank 0: segment 1 is on rank 1"):
        check(program)


def test_the_bound_on_activations_is_checked() -> None:
    check(schedule("1f1b", stages=4, microbatches=8), max_in_flight=4)
    with pytest.raises(UserError, match="rank 0 holds 8 activations at once: at most 4 are allowed"):
        check(schedule("gpipe", stages=4, microbatches=8), max_in_flight=4)
