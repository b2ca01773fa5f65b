import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.layer.schedule_file import read_schedule, write_schedule
from fourfold.layer.schedules import named_schedules, schedule
from fourfold.program import Program
from tests.layer.random_schedules import right_schedules


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_every_named_schedule_comes_back(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"schedule{suffix}"
    for program in named_schedules(ranks=3, microbatches=4).values():
        write_schedule(program, path)
        assert read_schedule(path) == program
        assert schedule(str(path), ranks=3, microbatches=4) == program


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(right_schedules(), st.sampled_from([".csv", ".json"]))
def test_every_schedule_comes_back(tmp_path: Path, program: Program, suffix: str) -> None:
    path = tmp_path / f"schedule{suffix}"
    write_schedule(program, path)
    assert read_schedule(path) == program


def test_the_files_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    program = schedule("1f1b", ranks=2, microbatches=2)
    write_schedule(program, tmp_path / "s.csv")
    write_schedule(program, tmp_path / "s.json")
    assert (tmp_path / "s.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert json.loads((tmp_path / "s.json").read_text()) == {
        "microbatches": 2,
        "rank_of_stage": [0, 1],
        "ranks": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
    }


def test_empty_cells_and_spaces_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("0F0, 0F1,,,0B0,0B1\n,1F0,1B0, 1F1,1B1,\n\n")
    assert read_schedule(path) == schedule("1f1b", ranks=2, microbatches=2)


GOOD: dict[str, Any] = {"microbatches": 1, "rank_of_stage": [0, 1], "ranks": [["0F0", "0B0"], ["1F0", "1B0"]]}


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("0F0,0B1\n", ["the backward of stage 0 on microbatch 0 is B 0", "0F1 stands 0 times"]),
        (
            "0F0,0B0\n1B0,1F0\n",
            ["0B0 on rank 0 can never start: it waits for 1B0", "1B0 on rank 1 can never"],
        ),
        ("0F0,0X0,SEND\n1F0,LOSS\n", ["rank 0: '0X0' is not an action of a schedule", "'SEND'", "'LOSS'"]),
        ("0F0,0B0,1F0\n1B0\n", ["1B0 on rank 1: stage 1 is on rank 0"]),
        ("0F0,0B0\n2F0,2B0\n", ["nothing is done on stage 1"]),
        ("\n", ["there are no actions in it"]),
        ("", ["there are no actions in it"]),
        (f'"{131_073 * "0"}', ["it is not CSV: field larger than field limit"]),
    ],
)
def test_a_broken_csv_is_refused_with_the_reason(text: str, messages: list[str], tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_schedule(path)
    assert all(message.startswith(f"{path}: ") for message in error.value.messages)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("{", ["it is not JSON"]),
        (9_999 * "[", ["it is not JSON"]),
        (5_000 * "9", ["it is not JSON"]),
        ("[1, 2]", ["it must be an object of 'microbatches', 'rank_of_stage' and 'ranks'"]),
        ({"ranks": []}, ["it must be an object of"]),
        (
            {**GOOD, "microbatches": 0, "rank_of_stage": [0, 2]},
            [
                "'microbatches' is 0: must be a number, at least 1",
                "puts stage 1 on rank 2: there are 2 ranks",
            ],
        ),
        ({**GOOD, "microbatches": True}, ["'microbatches' is True"]),
        ({**GOOD, "rank_of_stage": "01"}, ["'rank_of_stage' must be a list"]),
        ({**GOOD, "ranks": [["0F0", 7]]}, ["'ranks' must be a list that holds, for each rank, a list"]),
        ({**GOOD, "ranks": [["0F0", "0B0"], ["1F0"]]}, ["the backward of stage 1 on microbatch 0 is B 0"]),
        ({**GOOD, "microbatches": 2}, ["0F1 stands 0 times"]),
    ],
)
def test_a_broken_json_is_refused_with_the_reason(content: Any, messages: list[str], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError) as error:
        read_schedule(path)
    for message in messages:
        assert message in str(error.value)


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    write_schedule(schedule("gpipe", ranks=2, microbatches=3), path)
    with pytest.raises(UserError) as error:
        schedule(str(path), ranks=4, microbatches=8)
    assert error.value.messages == (
        f"{path} is a schedule for 2 pipeline ranks: 4 were asked for, use pp=2",
        f"{path} is a schedule for 3 microbatches: 8 were asked for, use microbatches=3",
    )


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the schedule nowhere\.csv: No such file"):
        read_schedule("nowhere.csv")
    (tmp_path / "s.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not text"):
        read_schedule(tmp_path / "s.csv")
