"""``fourfold train --init`` and ``fourfold export``: from Hugging Face and back, on the command line."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from fourfold.cli import app
from fourfold.data import ByteTokenizer
from fourfold.specs import ModelSpec, RunSpec
from tests.checkpoint.hugging_face_models import loaded, logits_of, model_of, tokens
from tests.commands import RUN

ONE_STEP = (
    *("train", "run.toml", "--layout", "dp1", "--set", "sample.tokens=4", "--set", "sample.temperature=0"),
    *("--set", "training.steps=1", "--set", "optimizer.learning_rate=1e-9"),
)
"""So small a rate leaves the weights as they were."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file, a corpus and a model of Hugging Face, as the current one."""
    (tmp_path / "run.toml").write_text(RUN.replace("[data]", '[data]\ntokenizer = "bytes"'))
    (tmp_path / "corpus.txt").write_text("def main(): return 1\n" * 40)
    model_of("qwen2", vocab_size=300).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    for name, content in ByteTokenizer().files().items():
        (tmp_path / "theirs" / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def fourfold_(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_from_transformers_to_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[object, ...]] = []
    monkeypatch.setattr("fourfold.cli.telling.Telling.wait", lambda _, *how: shown.append(how))
    trained = fourfold_(*ONE_STEP, "--init", "theirs")
    weight_bytes = 4 * ModelSpec.from_config(folder / "theirs").num_parameters
    assert ("reading the first weights", weight_bytes, weight_bytes) in [how[:3] for how in shown]
    assert trained.exit_code == 0, trained.stderr
    run = RunSpec.load(folder / "runs" / "run" / "run.toml")
    assert (run.model.init, run.data.tokenizer) == ("theirs", "theirs/tokenizer.json")
    assert run.model.overrides["vocab_size"] == 300
    exported = fourfold_("export", "runs/run")
    assert exported.exit_code == 0
    assert exported.stdout == (
        f"runs/run/model: the model after step 1, from runs/run/checkpoints/step-000001; "
        f"{run.model.spec().num_parameters * 4 / 1e6:,.1f} MB of weights in float32, 1 file\n"
    )
    theirs = model_of("qwen2", vocab_size=300)
    expected_BSV = logits_of(theirs, tokens(2))
    found_BSV = logits_of(loaded(folder / "runs" / "run" / "model"), tokens(2))
    torch.testing.assert_close(found_BSV, expected_BSV, rtol=0, atol=1e-5 * float(expected_BSV.abs().max()))
    # A new model would begin with the entropy of a guess, 5.7.
    first = json.loads((folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] > 6.5
    samples = [fourfold_("sample", name, "--tokens", "4", "--temperature", "0", "--prompt", "def").stdout
               for name in ("runs/run", "runs/run/model")]  # fmt: skip
    assert samples[0] == samples[1] != ""


def test_what_import_says_and_writes(folder: Path) -> None:
    spec = ModelSpec.from_config(folder / "theirs")
    said = fourfold_("import", "theirs", "begin.toml").stdout
    assert said == (
        f"theirs: {spec.num_parameters:,} parameters in {spec.num_parameters * 4 / 1e6:,.1f} MB, all there "
        "and finite; a tokenizer of 257 ids\n"
        "begin.toml: begins with it; set data.source, then: fourfold train begin.toml\n"
    )
    run = RunSpec.load("begin.toml")
    assert (run.model.spec(), run.data.tokenizer) == (spec, "theirs/tokenizer.json")
    assert message_of("import", "theirs", "begin.toml") == (
        "error: begin.toml is there already: give a new name\n"
    )
    assert message_of("import", "Qwen/Qwen3-0.6B") == (
        "error: Qwen/Qwen3-0.6B is no folder of a Hugging Face model, with config.json and weights; to fetch "
        "one of the Hub: hf download Qwen/Qwen3-0.6B --local-dir FOLDER\n"
    )
    [path, *_] = sorted((folder / "theirs").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-2:] = b"\xff\x7f"  # the last float32 is not a number
    path.write_bytes(content)
    assert "has values that are not finite in torch.float32" in message_of("import", "theirs")


def test_a_run_that_goes_on_has_its_own_weights(folder: Path) -> None:
    """Not those of --init again, though that is given again."""
    options = ("--init", "theirs", "--set", "training.steps=2", "--set", "optimizer.learning_rate=0.01")
    options += ("--set", "optimizer.schedule=constant")
    assert fourfold_(*ONE_STEP, *options).exit_code == 0
    resumed = fourfold_(*ONE_STEP, *options, "--set", "training.steps=3", "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    straight = fourfold_(*ONE_STEP, *options, "--set", "training.steps=3", "--set", "folder=straight")
    assert straight.exit_code == 0
    losses = [
        [json.loads(line).get("loss") for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
        for name in ("runs/run", "straight")
    ]
    assert [loss for loss in losses[0] if loss] == [loss for loss in losses[1] if loss]


def message_of(*arguments: str) -> str:
    result = fourfold_(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_what_does_not_fit_is_said_before_anything_runs(folder: Path) -> None:
    start = (*ONE_STEP, "--init", "theirs")
    assert message_of(*ONE_STEP, "--init", "Qwen/Qwen3-0.6B") == (
        "error: model.init=Qwen/Qwen3-0.6B is no folder: give one that holds a Hugging Face model; to fetch "
        "one of the Hub: hf download Qwen/Qwen3-0.6B --local-dir FOLDER\n"
    )
    assert "lm_head.weight has shape (300, 32), the model needs (301, 32)" in message_of(
        *start, "--set", "model.vocab_size=301"
    )
    assert "model.preset and model.init are given together: leave only one" in message_of(
        *start, "--set", "model.preset=tiny"
    )
    (folder / "theirs" / "model.safetensors.index.json").unlink()
    assert "error: there is no model in theirs: model.safetensors is missing" in message_of(*start)
    (folder / "theirs" / "tokenizer.json").unlink()
    assert message_of(*start) == (
        "error: data.tokenizer is missing, and theirs/tokenizer.json does not exist: give the tokenizer that "
        "the model was trained with\n"
    )
    assert not (folder / "runs").exists()
    assert message_of("export", "runs/none") == (
        "error: runs/none is no folder: give that of a run, or of one of its checkpoints\n"
    )
    assert message_of("export", "theirs") == (
        "error: theirs is neither the folder of a run nor a checkpoint\n"
    )


def test_the_run_file_can_say_it(folder: Path) -> None:
    text = (folder / "run.toml").read_text().replace('preset = "tiny"\nvocab_size = 257', 'init = "theirs"')
    (folder / "run.toml").write_text(text.replace('tokenizer = "bytes"\n', ""))
    run = RunSpec.load(folder / "run.toml")
    assert (run.model.init, run.data.tokenizer) == ("theirs", "theirs/tokenizer.json")
    assert run.model.spec().hidden_size == 32
    assert RunSpec.load(folder / "run.toml", ["data.tokenizer=bytes"]).data.tokenizer == "bytes"
