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
        ("LOSS", Action(Kind.LOSS)),
        ("UPDATE", Action(Kind.UPDATE)),
    ],
)
def test_an_action_prints_and_parses(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "F0", "2X0", "REDUCE", "2REDUCE1", "UPDATE3", "1UPDATE", "0LOSS"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not an action"):
        Action.parse(text)
