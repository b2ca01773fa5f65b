import pytest

from fourfold.errors import UserError
from fourfold.layer.schedules import schedule


def test_gpipe_runs_all_forwards_first() -> None:
    program = schedule("gpipe", ranks=2, microbatches=2)
    assert [" ".join(map(str, actions)) for actions in program.ranks] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
    ]


def test_1f1b_warms_up_then_alternates() -> None:
    program = schedule("1f1b", ranks=3, microbatches=4)
    assert [" ".join(map(str, actions)) for actions in program.ranks] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_accumulation_is_1f1b_on_one_stage() -> None:
    program = schedule("1f1b", ranks=1, microbatches=3)
    assert " ".join(map(str, program.ranks[0])) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(UserError) as error:
        schedule("1f1bb", ranks=0, microbatches=-1)
    assert error.value.messages == (
        "there is no schedule '1f1bb': use gpipe or 1f1b. Did you mean '1f1b'?",
        "stages=0: must be at least 1",
        "microbatches=-1: must be at least 1",
    )
