"""What the ranks of a run have to agree on."""

from platform import python_version

import pytest

from fourfold.cli.train_rank import what_is_run
from fourfold.data import ByteTokenizer
from fourfold.specs import RunSpec


def items(**data: object) -> dict[str, object]:
    run = RunSpec.model_validate(
        {
            "model": {"preset": "tiny"},
            "data": data,
            "training": {"steps": 3, "batch": 4},
            "optimizer": {"learning_rate": 1e-3},
        }
    )
    return what_is_run(run, run.model.spec(257), ByteTokenizer())


def test_content_counts_and_paths_do_not():
    found = items(source="a.txt")
    assert found == items(source="elsewhere/a.txt")
    assert found != items(source="a.txt", field="code")
    assert not {"folder", "data.source", "data.tokenizer", "model.preset", "model.config"} & found.keys()
    assert (found["model.vocab_size"], found["layout"], found["training.steps"]) == (257, "dp1", 3)
    assert found["the content of data.tokenizer"] == "bytes 257"


@pytest.mark.parametrize("source", ["python-stdlib", ["a.txt", "python-stdlib"]])
def test_the_standard_library_is_that_of_one_version_of_python(source: object):
    assert python_version() in items(source=source).values()
    assert python_version() not in items(source="a.txt").values()
