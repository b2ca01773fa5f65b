"""A model in a Hugging Face folder: whole or not at all, and what does not fit is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

import fourfold.checkpoint.hugging_face
from fourfold.checkpoint import about_files, load_checkpoint, save_checkpoint
from fourfold.data import load_tokenizer
from fourfold.errors import RunStopped, UserError
from fourfold.models import Decoder
from fourfold.specs import ModelSpec

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def tiny(*, tied: bool) -> ModelSpec:
    return ModelSpec.preset("tiny").replace({"tie_word_embeddings": tied})


def saved(folder: Path, *, tied: bool, step: int = 5) -> Decoder:
    torch.manual_seed(step)
    model = Decoder(tiny(tied=tied))
    weights = dict(model.named_parameters(remove_duplicate=False))
    save_checkpoint(folder, weights=weights, spec=model.spec, step=step, tokenizer={})
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_what_was_saved_is_loaded(tied: bool, tmp_path: Path):
    model = saved(tmp_path / "checkpoint", tied=tied)
    found = load_checkpoint(tmp_path / "checkpoint")
    assert found.step == 5
    assert found.tokenizer.name == "bytes"
    assert found.model.spec == model.spec
    assert (found.model.lm_head.weight is found.model.model.embed_tokens.weight) is tied
    for name, weight in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], weight), name
    with safe_open(tmp_path / "checkpoint" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(model.spec.parameter_shapes())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_transformers_loads_it(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model = saved(tmp_path, tied=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, model.lm_head.weight)


def test_a_tokenizer_file_goes_with_the_model(tmp_path: Path):
    original = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"<unk>": 0, "def": 1, "</s>": 2}, unk_token="<unk>")).save(str(original))
    spec = tiny(tied=True)
    files = about_files(spec, load_tokenizer(original))
    del files["config.json"]
    original.unlink()
    weights = dict(Decoder(spec).named_parameters())
    save_checkpoint(tmp_path / "checkpoint", weights=weights, spec=spec, step=1, tokenizer=files)
    tokenizer = load_checkpoint(tmp_path / "checkpoint").tokenizer
    assert tokenizer.encode("def").tolist() == [1]
    assert tokenizer.end_of_text == 2


@pytest.mark.parametrize(
    ("tied", "head", "outcome"),
    [
        (True, "absent", "tied"),
        (True, "equal", "tied"),
        (
            True,
            "different",
            "tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight",
        ),
        (False, "absent", "lm_head.weight is missing"),
        (False, "different", "separate"),
    ],
)
def test_tied_or_not_and_with_a_head_or_without(tied: bool, head: str, outcome: str, tmp_path: Path):
    """Seen in THUDM/slime#345 and others: a random head, or an error in one size of a model only."""
    saved(tmp_path, tied=tied)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop(HEAD, None)
    if head != "absent":
        weights[HEAD] = weights[EMBEDDING] + (1.0 if head == "different" else 0.0)
    save_file(weights, tmp_path / "model.safetensors")
    if outcome in ("tied", "separate"):
        model = load_checkpoint(tmp_path).model
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is (outcome == "tied")
        assert torch.equal(model.lm_head.weight, weights.get(HEAD, weights[EMBEDDING]))
    else:
        with pytest.raises(UserError, match=outcome):
            load_checkpoint(tmp_path)


def test_everything_that_does_not_fit_is_named(tmp_path: Path):
    saved(tmp_path, tied=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    weights["model.extra"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # known, and of no use
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    assert caught.value.messages == (
        f"{path}: model.layers.1.mlp.up_proj.weight is missing",
        f"{path}: model.extra is no parameter of this model",
        f"{path}: model.norm.weight has shape (31,), config.json says (32,)",
    )


def test_missing_and_damaged_files(tmp_path: Path):
    with pytest.raises(UserError, match=r"no checkpoint in .*: model.safetensors is missing"):
        load_checkpoint(tmp_path)
    saved(tmp_path, tied=True)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=r"model.safetensors cannot be read: .*: it is damaged or incomplete"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("I/O error: No space left on device (os error 28)"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_full_disk_leaves_the_old_checkpoint(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = saved(tmp_path / "checkpoint", tied=False, step=5)

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(fourfold.checkpoint.hugging_face, "save_file", full)
    with pytest.raises(RunStopped, match=r"cannot write .*checkpoint.*: .*No space left on device"):
        saved(tmp_path / "checkpoint", tied=False, step=6)
    found = load_checkpoint(tmp_path / "checkpoint")
    assert found.step == 5
    assert torch.equal(found.model.lm_head.weight, old.lm_head.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_newer_checkpoint_takes_the_place_of_the_old_one(tmp_path: Path):
    saved(tmp_path / "checkpoint", tied=False, step=5)
    saved(tmp_path / "checkpoint", tied=False, step=6)
    assert json.loads((tmp_path / "checkpoint" / "fourfold.json").read_text())["step"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
