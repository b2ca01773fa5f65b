"""Names of recomputation policies."""

import pytest

from fourfold.errors import UserError
from fourfold.specs import RunSpec
from fourfold.specs.recompute_name import RecomputeName, written_policies


@pytest.mark.parametrize(
    ("text", "name", "number"),
    [
        ("none", "none", None),
        ("full", "full", None),
        ("sqrt", "sqrt", None),
        ("min", "min", None),
        ("every:4", "every", 4),
        ("slots:12", "slots", 12),
        ("budget:1.5", "budget", 1.5),
        ("budget:80", "budget", 80),
    ],
)
def test_a_name_is_read_and_printed_back(text: str, name: str, number: float | None) -> None:
    found = RecomputeName.parse(text)
    assert (found.name, found.number) == (name, number)
    assert str(found) == text
    assert found.is_none == (text == "none")


def test_every_written_policy_is_one() -> None:
    assert [str(RecomputeName.parse(text)) for text in written_policies()] == [
        "none", "full", "every:2", "sqrt", "selective", "slots:3", "min", "budget:1.5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ful", "recompute='ful' does not exist. Did you mean 'full'? Use none, full, every:2, sqrt, "),
        ("full:2", "recompute='full:2': full takes no number, write full"),
        ("every", "recompute='every' needs a number (every how many blocks): write e.g. every:2"),
        ("selective:", "recompute='selective:': '' is nothing that can be kept."),
        ("selective:q_prj", "'q_prj' is nothing that can be kept. Did you mean 'q_proj'? Use attention, q_"),
        ("slots:0", "the number (inputs kept) must be a whole number from 1: write e.g. slots:3"),
        ("slots:1.5", "the number (inputs kept) must be a whole number from 1: write e.g. slots:3"),
        ("budget:-1", "the number (gigabytes (10^9 bytes)) must be more than 0: write e.g. budget:1.5"),
        ("budget:nan", "must be more than 0"),
    ],
)
def test_a_wrong_name_says_what_works(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        RecomputeName.parse(text)
    assert message in str(error.value)


def test_what_is_kept_is_a_list_of_names() -> None:
    """Given, or by default: attention and products that a tape needs; with tp a sum, not a part of it."""
    found = RecomputeName.parse("selective:attention+sum+attention")
    assert str(found) == "selective:attention+sum"
    assert found.keeps(tp=1) == found.keeps(tp=2) == {"attention", "sum"}
    for text in ("selective", "selective:attention"):
        assert RecomputeName.parse(text).unread(tp=1) == {"down_proj"}
    assert RecomputeName.parse("selective").unread(tp=2) == {"down_proj", "o_proj"}
    assert RecomputeName.parse("selective:o_proj+sum").keeps(tp=2) == {"sum"}
    assert RecomputeName.parse("full").unread(tp=2) == frozenset()
    default = {"attention", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert str(RecomputeName.parse("selective")) == "selective"
    assert RecomputeName.parse("selective").keeps(tp=1) == default | {"o_proj"}
    assert RecomputeName.parse("selective").keeps(tp=2) == default | {"sum"}
    assert RecomputeName.parse("full").keeps(tp=2) == frozenset()


def run_file(recompute: object) -> dict[str, object]:
    return {
        "model": {"preset": "tiny"},
        "training": {"steps": 1, "batch": 1, "recompute": recompute},
        "optimizer": {"learning_rate": 0.1},
    }


def test_a_run_file_names_its_policy() -> None:
    run = RunSpec.model_validate(run_file("slots:3"))
    assert run.training.recompute == RecomputeName("slots", 3)
    assert 'recompute = "slots:3"' in run.to_toml()
    for wrong, message in (("every", "training.recompute='every' needs a number"), (True, "in quotes")):
        with pytest.raises(UserError) as error:
            RunSpec.model_validate(run_file(wrong))
        assert message in str(error.value)
