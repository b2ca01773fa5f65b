"""``fourfold plan`` as a command: what it prints, writes and refuses."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fourfold.cli import app
from fourfold.specs import ModelSpec, RunSpec

ASKED = ["plan", "--model", "qwen3-0.6b", "--gpus", "8xA100-80GB", "--sequence", "4096", "--batch", "64"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, [*ASKED, *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_and_the_run_file(tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    printed = run("--out", str(out), "--top", "3")
    assert "596,049,920 parameters on 8 x A100-80GB, 262,144 tokens a step" in printed
    assert "where the time goes" in printed
    assert "memory of the first in GB" in printed
    loaded = RunSpec.load(out)
    loaded.check(vocab_size=257, world_size=8)
    assert f"\n{loaded.layout} " in printed
    assert loaded.training.batch == 64


def test_a_run_file_of_a_config_has_the_positions_that_it_needs(tmp_path: Path) -> None:
    sizes = ModelSpec.preset("tiny").to_config() | {"max_position_embeddings": 64}
    config, out = tmp_path / "config.json", tmp_path / "plan.toml"
    config.write_text(json.dumps(sizes))
    words = ["--model", str(config), "--gpus", "2xL4", "--sequence", "128", "--batch", "4", "--out", str(out)]
    assert CliRunner().invoke(app, ["plan", *words]).exit_code == 0
    loaded = RunSpec.load(out)
    loaded.check(world_size=2)
    assert loaded.model.spec().max_position_embeddings == 128


def test_others_say_how_much_longer_they_take_and_ends_that_were_not_reached_are_named() -> None:
    words = ["plan", "--model", "tiny", "--gpus", "1xL4", "--sequence", "2048", "--batch", "1", "--limits"]
    printed = CliRunner().invoke(app, words).output
    assert re.search(r"\ndp1, 1 x 1, recompute full: \+[\d.]+% time \(", printed)
    assert "the longest sequence that fits: 2,048 tokens (no longer one is looked at: powers" in printed
    assert "(no deeper one is looked at)" in printed


def test_json() -> None:
    found = json.loads(run("--json"))
    assert len(found["plans"]) == 5
    first = found["plans"][0]
    assert first["step_seconds"] == pytest.approx(sum(first["seconds"].values()))
    assert 0.2 < first["mfu"] < first["hfu"] < 0.8
    tokens = 64 * 4096 / first["step_seconds"] / 8
    assert first["tokens_per_second_per_device"] == pytest.approx(tokens)


def test_a_budget_of_tokens_is_answered() -> None:
    answers = json.loads(run("--tokens", "1e9", "--json"))["answers"]
    assert answers["tokens"].startswith("1e+09 tokens: 3,815 steps, ")
    alone = ["plan", "--model", "tiny", "--gpus", "1xL4", "--sequence", "64", "--batch", "1", "--days", "3"]
    result = CliRunner().invoke(app, alone)
    assert result.exit_code == 2
    assert "--days needs --tokens" in result.output


def test_mistakes_are_reported_together() -> None:
    words = ["plan", "--model", "lama3-8b", "--gpus", "8xH101-80GB", "--sequence", "0", "--batch", "8"]
    words += ["--tokens", "nan", "--days", "-1", "--top", "0"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    for part in (
        "--sequence 0 is too small: use more than 0",
        "Did you mean 'llama3-8b'",
        "Did you mean 'H100-80GB'",
        "--tokens nan is not finite: use more than 0",
        "--days -1 is too small",
        "--top 0 is too small",
    ):
        assert part in result.output


def test_what_fits_nowhere_says_why() -> None:
    words = ["plan", "--model", "llama3-405b", "--gpus", "8xH100-80GB", "--sequence", "8192", "--batch", "8"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "does not fit into memory" in result.output


def test_precision_is_what_the_device_has() -> None:
    words = ["plan", "--model", "qwen3-0.6b", "--gpus", "8xV100-32GB", "--sequence", "2048", "--batch", "64"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert {found["dtype"] for found in json.loads(result.output)["plans"]} == {"float32"}
    result = CliRunner().invoke(app, [*words, "--dtype", "bfloat16"])
    assert result.exit_code == 2
    assert "--dtype bfloat16: V100-32GB has no units for it: use --dtype float32" in result.output


def test_what_if_names_what_does_not_fit() -> None:
    words = ["plan", "--model", "llama3-8b", "--gpus", "8xA100-40GB", "--sequence", "8192", "--batch", "8"]
    result = CliRunner().invoke(app, [*words, "--what-if", "--json"])
    answers = json.loads(result.output)["answers"]
    assert answers["twice the memory"].endswith(")")
    assert "float8" not in " ".join(answers)  # an A100 has no units for it
