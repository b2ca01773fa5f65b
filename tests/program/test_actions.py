import pytest

from fourfold.errors import UserError
from fourfold.program import Action, Kind


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Kind.FORWARD, 2, 0)),
        ("11B13", Action(Kind.BACKWARD, 11, 13)),
        ("0I7", Action(Kind.INPUT_GRADIENT, 0, 7)),
        ("3W1", Action(Kind.WEIGHT_GRADIENT, 3, 1)),
        ("4REDUCE", Action(Kind.REDUCE, 4)),
        ("4REDUCE1", Action(Kind.REDUCE, 4, 1)),
        ("3ALLREDUCE", Action(Kind.ALL_REDUCE, 3)),
        ("0GATHER0", Action(Kind.GATHER, 0, 0)),
        ("12GATHER10", Action(Kind.GATHER, 12, 10)),
        ("2FREE1", Action(Kind.FREE, 2, 1)),
        ("LOSS", Action(Kind.LOSS)),
        ("UPDATE", Action(Kind.UPDATE)),
    ],
)
def test_an_action_prints_and_parses(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "", "F", "2F", "F0", "2X0", "2F0 ,", "REDUCE", "REDUCE1", "UPDATE3", "1UPDATE", "0LOSS", "LOSS0",
        "GATHER", "2GATHER", "GATHER0", "FREE", "2FREE", "FREE0", "ALLREDUCE", "2ALLREDUCE0", "2ALL_REDUCE",
    ],
)  # fmt: skip
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not an action"):
        Action.parse(text)


def test_a_refusal_says_how_it_is_written() -> None:
    with pytest.raises(UserError, match="'2FREE' is not an action: FREE is written 2FREE0"):
        Action.parse("2FREE")
    with pytest.raises(UserError, match="'2ALLREDUCE1' is not an action: ALLREDUCE is written 2ALLREDUCE"):
        Action.parse("2ALLREDUCE1")


def test_a_place_is_a_segment_or_a_unit() -> None:
    backward, gather = Action.parse("2B1"), Action.parse("3GATHER1")
    assert (backward.segment, backward.microbatch) == (2, 1)
    assert gather.unit == 3
    for mistaken in (lambda: backward.unit, lambda: gather.segment, lambda: gather.microbatch):
        with pytest.raises(AssertionError):
            mistaken()


def test_what_runs_again_is_numbered() -> None:
    for text in ("2R0", "2R0.1", "12R3.10"):
        assert str(Action.parse(text)) == text
    assert Action.parse("2R0.1") == Action(Kind.RECOMPUTE, 2, 0, 1)
    for wrong in ("2F0.1", "2R0.0", "2R", "R0"):
        with pytest.raises(UserError, match="is not an action"):
            Action.parse(wrong)
