"""The examples in Python, as they are: on several layouts they give the losses of one process."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.hugging_face_models import loaded, model_of
from tests.ranks import RankPool

EXAMPLES = Path(__file__).parent.parent / "examples"
IMPORT_SECONDS = 200.0
"""What ranks get for their first example: importing transformers takes a minute on a busy machine."""


def run(name: str, *arguments: str) -> list[float]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments)


@cache
def alone(name: str, *arguments: str) -> list[float]:
    return run(name, *arguments)


def check(ranks: RankPool, world_size: int, name: str, layout: str, *arguments: str) -> None:
    expected = alone(name, *arguments, "dp1")
    assert expected[-1] < expected[0] - 0.3
    for found in ranks(world_size, run, name, *arguments, layout, limit_seconds=IMPORT_SECONDS):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("layout", ["fsdp2", "dp2"])
def test_own_model(layout: str, ranks: RankPool) -> None:
    check(ranks, 2, "own_model", layout)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, "tp2"), (4, "fsdp2,cp2"), (4, "fsdp2,tp2"), (4, "cp2,tp2")]
)
def test_hugging_face_gpt2(world_size: int, layout: str, ranks: RankPool) -> None:
    check(ranks, world_size, "hugging_face_gpt2", layout)


@pytest.mark.parametrize("layout", ["pp2,tp2"])
def test_hugging_face_llama(layout: str, tmp_path: Path, ranks: RankPool) -> None:
    """From a folder of transformers to one that transformers loads, trained alike on both layouts."""
    from fourfold.data import ByteTokenizer

    start: Any = model_of("qwen2-tied", vocab_size=257)
    start.save_pretrained(tmp_path / "start")
    for name, content in ByteTokenizer().files().items():
        (tmp_path / "start" / name).write_bytes(content)
    folder, one, four = (str(tmp_path / name) for name in ("start", "one", "four"))
    expected = run("hugging_face_llama", folder, "dp1", one)
    assert expected[-1] < expected[0] - 0.3
    for found in ranks(4, run, "hugging_face_llama", folder, layout, four):
        assert found == pytest.approx(expected, rel=1e-4)
    ours, theirs = (loaded(tmp_path / name / "model").state_dict() for name in ("four", "one"))
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() < 1e-3, name
    assert (theirs["model.norm.weight"] - start.model.norm.weight).abs().max() > 1e-4
