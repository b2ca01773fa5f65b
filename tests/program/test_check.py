"""A right program passes; each way to break it is refused, with the action and the reason."""

from dataclasses import replace
from itertools import product

import pytest

from fourfold.build import Sharding, UnitUse
from fourfold.errors import UserError
from fourfold.layer.schedules import schedule
from fourfold.program import Action, Program, check, clock
from fourfold.program.check import activations_beyond
from fourfold.specs import Placement
from tests.programs import FSDP, REPLICAS, ZERO1, ZERO2, one_stage, own_units, parsed, written


def parse(*ranks: str, rank_of_segment: tuple[int, ...], microbatches: int) -> Program:
    return Program(
        ranks=tuple(parsed(rank) for rank in ranks),
        rank_of_segment=rank_of_segment,
        microbatches=microbatches,
        users=tuple((segment,) for segment in range(len(rank_of_segment))),
    )


def step_program(sharding: Sharding = REPLICAS, replicated: bool = False) -> Program:
    """Two segments on one rank, two microbatches, whole."""
    return one_stage(2, 2, sharding=sharding, lookups=frozenset({0}), replicated=replicated)


def edited(program: Program, old: str, new: str) -> Program:
    """A program with some of its text replaced."""
    text = written(program)
    assert old in text
    return replace(program, ranks=(parsed(text.replace(old, new)),))


def messages(program: Program) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        check(program)
    return error.value.messages


def test_the_step_program_is_right() -> None:
    program = step_program()
    assert written(program) == "0F0 1F0 1B0 0B0 0F1 1F1 LOSS 1B1 1REDUCE 0B1 0REDUCE UPDATE"
    check(program)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("1B0 0B0", "1B0", "the backward of segment 0 on microbatch 0 is B 0, I 0, W 0 times"),
        ("0F1 1F1", "0F1 0F1 1F1", "0F1 stands 2 times: must be once"),
        ("1B0 0B0", "0B0 1B0", "0B0 on rank 0 can never start: it waits for 1B0"),
        ("0F0 1F0", "1F0 0F0", "1F0 on rank 0 can never start: it waits for 0F0"),
        ("1B1 1REDUCE", "1REDUCE 1B1", "rank 0: no REDUCE of unit 1 follows 1B1"),
        (" 0REDUCE", "", "rank 0: no REDUCE of unit 0 follows 0B1"),
        ("1REDUCE", "1REDUCE 1REDUCE", "1REDUCE stands 2 times on rank 0: must be once"),
        ("0REDUCE UPDATE", "UPDATE 0REDUCE", "UPDATE on rank 0 can never start: it waits for 0REDUCE"),
        ("0REDUCE UPDATE", "UPDATE 0REDUCE", "rank 0 ends with 0REDUCE: UPDATE must come last"),
        (" UPDATE", "", "UPDATE stands 0 times on rank 0: must be once"),
        (" LOSS", "", "LOSS stands 0 times on rank 0: must be once"),
        ("1F1 LOSS", "LOSS 1F1", "LOSS on rank 0 can never start: it waits for 1F1"),
        ("1B1 1REDUCE", "1I1 1REDUCE", "B 0, I 1, W 0 times"),
        ("1B1 1REDUCE", "1I1 1REDUCE 1W1", "rank 0: no REDUCE of unit 1 follows 1W1"),
        ("1B1 1REDUCE", "1W1 1I1 1REDUCE", "1W1 on rank 0 can never start: it waits for 1I1"),
        ("0F1", "0F7", "0F7 on rank 0: there are 2 microbatches"),
        ("1F1", "5F1", "5F1 on rank 0: there are 2 segments"),
        ("0REDUCE", "0REDUCE 5REDUCE", "5REDUCE on rank 0: no segment on this rank uses unit 5"),
    ],
)
def test_a_broken_program_is_refused_with_the_reason(old: str, new: str, reason: str) -> None:
    assert reason in "\n".join(messages(edited(step_program(), old, new)))


def test_halves_of_a_backward_may_stand_apart() -> None:
    check(edited(step_program(), "1B1 1REDUCE 0B1 0REDUCE", "1I1 0I1 0W1 0REDUCE 1W1 1REDUCE"))


SHARDED = Sharding(FSDP, prefetch=0)


def test_the_sharded_step_program_is_right() -> None:
    assert written(step_program(SHARDED)) == (
        "0GATHER0 0F0 0FREE0 1GATHER0 1F0 1B0 1REDUCE0 1FREE0 0B0 0REDUCE0 "
        "0GATHER1 0F1 0FREE1 1GATHER1 1F1 LOSS 1B1 1REDUCE1 1FREE1 0B1 0REDUCE1 UPDATE"
    )
    check(step_program(SHARDED))


@pytest.mark.parametrize(
    ("old", "new", "reasons"),
    [
        # Computing on weights that are not there.
        (
            "0GATHER1 0F1 0FREE1",
            "0F1",
            ["0F1 on rank 0: the weights of unit 0 are not there"],
        ),
        (
            "1F0 1B0 1REDUCE0 1FREE0",
            "1F0 1FREE0 1B0 1REDUCE0",
            ["1B0 on rank 0: the weights of unit 1 are not there"],
        ),
        (
            "1GATHER1 1F1",
            "1F1 1GATHER1",
            ["1F1 on rank 0: the weights of unit 1 are not there"],
        ),
        # Gathers and frees that do not belong together.
        (
            "1F0 1B0",
            "1F0 1GATHER2 1B0",
            ["1GATHER2 on rank 0: 1GATHER0 has not been freed"],
        ),
        (
            "1FREE0",
            "1FREE0 1FREE2",
            ["1FREE2 on rank 0: the weights are not there"],
        ),
        (
            "0FREE1",
            "0FREE1 0GATHER2 0FREE2",
            ["0FREE2 on rank 0: nothing used the weights since their GATHER"],
        ),
        (
            " 1FREE1",
            "",
            ["1GATHER1 on rank 0 is never freed"],
        ),
        (
            " 1FREE0",
            "",
            ["1GATHER1 on rank 0: 1GATHER0 has not been freed"],
        ),
        (
            "0GATHER1",
            "0GATHER0",
            ["0GATHER0 stands 2 times on rank 0: must be once"],
        ),
        (
            "0FREE0 1GATHER0",
            "0FREE0 5GATHER0 1GATHER0",
            ["5GATHER0 on rank 0: no segment on this rank uses unit 5", "5GATHER0 on rank 0 is never freed"],
        ),
        # Sums of gradients.
        (
            " 1REDUCE1",
            "",
            ["rank 0: no REDUCE of unit 1 follows 1B1"],
        ),
        (
            "1REDUCE0",
            "1REDUCE0 1REDUCE2",
            ["1REDUCE2 on rank 0 has nothing to sum"],
        ),
        (
            "1B0 1REDUCE0",
            "1REDUCE0 1B0",
            ["1REDUCE0 on rank 0 has nothing to sum"],
        ),
        (
            "0B1 0REDUCE1",
            "0REDUCE1 0B1",
            ["0REDUCE1 on rank 0 has nothing to sum", "rank 0: no REDUCE of unit 0 follows 0B1"],
        ),
        (
            "0REDUCE1 UPDATE",
            "UPDATE 0REDUCE1",
            [
                "rank 0 ends with 0REDUCE1: UPDATE must come last",
                "UPDATE on rank 0 can never start: it waits for 0REDUCE1",
            ],
        ),
    ],
)
def test_a_broken_sharded_program_is_refused_with_the_reason(old: str, new: str, reasons: list[str]) -> None:
    assert messages(edited(step_program(SHARDED), old, new)) == tuple(reasons)


@pytest.mark.parametrize("placement", [ZERO1, ZERO2])
def test_weights_that_stay_whole_are_gathered_and_not_freed(placement: Placement) -> None:
    program = step_program(Sharding(placement, prefetch=0))
    check(program)
    assert messages(edited(program, "1GATHER0 ", "")) == tuple(
        f"{use} on rank 0: the weights of unit 1 are not there" for use in ("1F0", "1B0", "1F1", "1B1")
    )


def test_replicated_weights_are_there_without_a_gather() -> None:
    program = edited(step_program(SHARDED), "0GATHER0 0F0 0FREE0", "0F0")
    assert messages(program) == ("0F0 on rank 0: the weights of unit 0 are not there",)
    text = " ".join(
        word for word in written(step_program(SHARDED)).split() if "GATHER" not in word and "FREE" not in word
    )
    check(replace(step_program(REPLICAS), ranks=(parsed(text),)))


def replicated_pieces() -> Program:
    return step_program(SHARDED, replicated=True)


def test_the_program_of_replicas_is_right() -> None:
    assert written(replicated_pieces()).endswith(
        "1B1 1REDUCE1 1FREE1 0B1 0REDUCE1 1ALLREDUCE 0ALLREDUCE UPDATE"
    )
    check(replicated_pieces())


@pytest.mark.parametrize(
    ("old", "new", "reasons"),
    [
        # The replicas of unit 0 would drift apart.
        (
            " 0ALLREDUCE",
            "",
            ["0ALLREDUCE stands 0 times on rank 0: must be once"],
        ),
        (
            "1ALLREDUCE",
            "1ALLREDUCE 1ALLREDUCE",
            ["1ALLREDUCE stands 2 times on rank 0: must be once"],
        ),
        # Before any sum of its unit, and before the last one: what comes later would be missing.
        (
            "1B0 1REDUCE0",
            "1B0 1ALLREDUCE 1REDUCE0",
            [
                "1ALLREDUCE stands 2 times on rank 0: must be once",
                "1ALLREDUCE on rank 0 must come after the last REDUCE of its unit",
            ],
        ),
        (
            "1REDUCE1 1FREE1 0B1 0REDUCE1 1ALLREDUCE",
            "1ALLREDUCE 1REDUCE1 1FREE1 0B1 0REDUCE1",
            ["1ALLREDUCE on rank 0 must come after the last REDUCE of its unit"],
        ),
        (
            "UPDATE",
            "5ALLREDUCE UPDATE",
            ["5ALLREDUCE on rank 0: no segment on this rank uses unit 5"],
        ),
    ],
)
def test_a_broken_program_of_replicas_is_refused_with_the_reason(
    old: str, new: str, reasons: list[str]
) -> None:
    found = messages(edited(replicated_pieces(), old, new))
    assert found[: len(reasons)] == tuple(reasons)


def test_a_contribution_after_the_sum_over_replicas_is_refused() -> None:
    """The first microbatch's sum alone reaches the replicas."""
    # FS-08
    program = edited(replicated_pieces(), " 1ALLREDUCE", "")
    program = edited(program, "1REDUCE0", "1REDUCE0 1ALLREDUCE")
    assert messages(program) == ("1B1 on rank 0 comes after 1ALLREDUCE, which misses it",)


def test_a_frozen_unit_is_never_reduced() -> None:
    """Unit 1 is frozen: it is gathered and freed, and no sum of it is right."""
    units = [UnitUse((0,)), UnitUse((1,), trained=False)]
    program = one_stage(2, 1, units=units, sharding=SHARDED, replicated=True)
    assert "1REDUCE" not in written(program)
    assert "1ALLREDUCE" not in written(program)
    check(program)
    assert messages(edited(program, "1B0", "1B0 1REDUCE"))[0] == "1REDUCE on rank 0: unit 1 is frozen"
    assert messages(edited(program, "UPDATE", "1ALLREDUCE UPDATE"))[0] == (
        "1ALLREDUCE on rank 0: unit 1 is frozen"
    )


def test_every_sharded_program_is_right() -> None:
    """`build` checks what it writes: here that no combination of its arguments is refused."""
    for placement, segments, microbatches, prefetch, keep, replicated in product(
        (FSDP, ZERO1, ZERO2), (1, 2, 5), (1, 2, 3), (0, 1, 2, 9), (False, True), (False, True)
    ):
        sharding = Sharding(placement, prefetch=prefetch, keep=keep)
        tied = UnitUse(tuple(sorted({0, segments - 1})))
        units = [tied, *own_units(segments)[1:]]
        program = one_stage(segments, microbatches, units=units, sharding=sharding, replicated=replicated)
        assert program.ranks[0][-1] == Action.parse("UPDATE")


def test_two_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    program = parse("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", rank_of_segment=(0, 1), microbatches=2)
    assert messages(program) == (
        "0B0 on rank 0 can never start: it waits for 1B0",
        "1F1 on rank 1 can never start: it waits for 0F1",
    )


def test_an_action_on_the_wrong_rank_is_refused() -> None:
    program = parse("0F0 1B0", "1F0 0B0", rank_of_segment=(0, 1), microbatches=1)
    with pytest.raises(UserError, match="1B0 on rank 0: stage 1 is on rank 1"):
        check(program)


def test_the_bound_on_activations_is_checked() -> None:
    """In microbatches: of the two stages of a rank of ZBV each activation counts half."""
    assert activations_beyond(schedule("1f1b", ranks=4, microbatches=8), 4) == []
    assert activations_beyond(schedule("gpipe", ranks=2, microbatches=8), 4) == [
        f"{action} on rank {rank}: with it the rank holds 5 microbatches' activations of its share of the "
        "model: at most 4 are allowed"
        for rank, action in enumerate(("0F4", "1F4"))
    ]
    zbv = schedule("zbv", ranks=2, microbatches=4)
    assert activations_beyond(zbv, 2) == []
    assert activations_beyond(zbv, 1)[0].startswith("0F2 on rank 0: with it the rank holds 1.5 microbatches'")


# Messages


def two_ranks() -> Program:
    """1F1B on two ranks, two microbatches, with messages."""
    return parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        rank_of_segment=(0, 1),
        microbatches=2,
    )


def with_edit(program: Program, rank: int, old: str, new: str) -> Program:
    ranks = list(program.ranks)
    text = written(program, rank)
    assert old in text
    ranks[rank] = parsed(text.replace(old, new))
    return replace(program, ranks=tuple(ranks))


def test_the_program_with_messages_is_right() -> None:
    check(two_ranks())


@pytest.mark.parametrize(
    ("rank", "old", "new", "reasons"),
    [
        (0, "0SEND_F1 ", "", ["0SEND_F1 stands 0 times: must be once"]),
        (1, " 1RECV_F1", "", ["1RECV_F1 stands 0 times: must be once"]),
        (0, "0SEND_F0", "0SEND_F0 0SEND_F0", ["0SEND_F0 stands 2 times: must be once"]),
        (1, "1SEND_B0", "1SEND_B0 1SEND_F0", ["1SEND_F0 stands 1 times: must be left out"]),
        (
            0,
            "0F0 0SEND_F0",
            "0SEND_F0 0F0",
            [
                "0SEND_F0 on rank 0 can never start: it waits for 0F0",
                "1F0 on rank 1 can never start: it waits for 0SEND_F0",
            ],
        ),
        (
            1,
            "1RECV_F0 1F0 1RECV_F1",
            "1RECV_F1 1RECV_F0 1F0",
            ["from rank 0 to rank 1 0SEND_F0 is sent where 0SEND_F1 is received: the order must be the same"],
        ),
        (
            1,
            "1RECV_F0 1F0",
            "1F0 1RECV_F0",
            [
                "0B0 on rank 0 can never start: it waits for 1SEND_B0",
                "1F0 on rank 1 can never start: it waits for 1RECV_F0",
            ],
        ),
    ],
)
def test_a_program_with_broken_messages_is_refused(rank: int, old: str, new: str, reasons: list[str]) -> None:
    found = messages(with_edit(two_ranks(), rank, old, new))
    assert list(found) == reasons


def test_a_circle_of_sends_is_refused_though_buffers_would_hide_it() -> None:
    """Each rank sends before it makes room for what the other sends: right only while buffers take it."""
    # PP-16
    first = (
        "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1 "
        "0RECV_B0 2B0 2SEND_B0 0RECV_B1 2B1 2SEND_B1 0B0 0B1"
    )
    second = "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1"
    program = parse(first, second, rank_of_segment=(0, 1, 0), microbatches=2)
    assert not clock(program).stuck
    assert messages(program) == (
        "0SEND_F1 on rank 0 can never start: it waits for 1RECV_F1",
        "1SEND_F0 on rank 1 can never start: it waits for 2RECV_F0",
    )
    first = first.replace("0F1 0SEND_F1 2RECV_F0 2F0 2RECV_F1", "2RECV_F0 0F1 2RECV_F1 0SEND_F1 2F0")
    check(parse(first, second, rank_of_segment=(0, 1, 0), microbatches=2))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0R0 0B0", "0R0 0R0 0B0", "0R0 stands twice on rank 0: number what is computed again"),
        ("0F0 1F0", "0R0 0F0 1F0", "0R0 on rank 0 comes before 0F0"),
        ("0R0 0B0", "0B0 0R0", "0R0 on rank 0 comes after the backward that it is for"),
        ("0R0 0B0", "0R0 0R0.1 0B0", "0R0 on rank 0: nothing goes on with what it computes"),
    ],
)
def test_a_broken_recomputation_is_refused(old: str, new: str, reason: str) -> None:
    program = edited(step_program(), "0B0 0F1", "0R0 0B0 0F1")
    check(program)
    assert any(reason in message for message in messages(edited(program, old, new)))


def test_a_backward_needs_the_forward_that_left_its_tape() -> None:
    program = edited(step_program(), "1B0 0B0", "0R0 1R0 1B0 0R0.1 0B0")
    check(program)
    needs = {str(a): [str(need) for need in program.needs(0, a)] for a in program.ranks[0]}
    assert needs["1R0"] == ["1F0", "0R0"]
    assert needs["0R0.1"] == ["0F0"]
    assert needs["1B0"] == ["1R0"]
    assert needs["0B0"] == ["0R0.1", "1B0"]
    assert needs["1B1"] == ["1F1"]
