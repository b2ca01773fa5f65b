"""A checkpoint as a Hugging Face folder: transformers loads it and computes the same."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from fourfold.checkpoint import (
    Saving,
    about_files,
    export,
    export_model,
    load_checkpoint,
    read_hugging_face_,
    save,
)
from fourfold.checkpoint.manifest import read_manifest
from fourfold.checkpoint.reader import Reader
from fourfold.checkpoint.state import Held
from fourfold.data import ByteTokenizer, load_tokenizer
from fourfold.errors import RunStopped, UserError
from fourfold.models.batch import IGNORE, Microbatch
from fourfold.specs import Layout, ModelSpec
from tests.checkpoint.hugging_face_models import (
    FAMILIES,
    LLAMA3,
    loaded,
    logits_of,
    model_of,
    tokens,
)
from tests.checkpoint.trainers import fill_, run_spec, trained, trainer_of
from tests.ranks import RankPool

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SPEC = ModelSpec.preset("tiny-qwen3").replace({"vocab_size": 61, "num_hidden_layers": 2})


def checkpoint_of(folder: Path, spec: ModelSpec = SPEC, *, seed: int = 5, step: int = 5) -> Path:
    """Write a checkpoint with numbers of its own into the folder of a run."""
    trainer = trainer_of(run_spec("dp1"), spec)
    fill_(trainer, seed)
    saving = Saving(folder / "checkpoints", {}, about_files(spec, ByteTokenizer()), keep=9)
    return save(trainer.parallel, trainer.update, saving, step=step)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for path in sorted(folder.glob("*.safetensors"))
        for name, weight in load_file(path).items()
    }


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out_again_is_the_same_model(family: str, tmp_path: Path) -> None:
    """Bitwise, and transformers has nothing missing and nothing left over."""
    # HF-04
    model_of(family).save_pretrained(tmp_path / "theirs")
    spec = ModelSpec.from_config(tmp_path / "theirs")
    trainer = trainer_of(run_spec("dp1"), spec)
    read_hugging_face_(trainer.parallel, tmp_path / "theirs")
    saving = Saving(tmp_path / "checkpoints", {}, about_files(spec, ByteTokenizer()))
    save(trainer.parallel, trainer.update, saving, step=1)
    shown: list[tuple[int, int, float]] = []
    export_model(tmp_path, tmp_path / "ours", progress=lambda *how: shown.append(how))
    size = 4 * spec.num_parameters
    assert {total for _, total, _ in shown} == {size}
    assert [done for done, _, _ in shown] == sorted({done for done, _, _ in shown})
    assert shown[-1][0] == size
    ours, theirs = loaded(tmp_path / "ours"), loaded(tmp_path / "theirs")
    assert equal(ours.state_dict(), theirs.state_dict())
    assert torch.equal(logits_of(ours, tokens(2)), logits_of(theirs, tokens(2)))
    for key in ("rope_parameters", "vocab_size", "head_dim", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours.config, key, None) == getattr(theirs.config, key, None) or key == "head_dim"


def trained_and_saved(layout: str, spec: ModelSpec, folder: Path) -> None:
    trainer = trained(run_spec(layout), steps=1, spec=spec)
    save(
        trainer.parallel,
        trainer.update,
        Saving(folder / "checkpoints", {}, about_files(spec, ByteTokenizer())),
        step=1,
    )


def batch_of(ids_BS: torch.Tensor) -> Microbatch:
    length = ids_BS.shape[1]
    return Microbatch(
        ids_BS, torch.full_like(ids_BS, IGNORE), torch.arange(length)[None], ((length,),) * len(ids_BS)
    )


@pytest.mark.parametrize("layout", ["pp2,tp2", "fsdp2,tp2"])
def test_trained_on_a_layout_and_exported(layout: str, tmp_path: Path, ranks: RankPool) -> None:
    """The logits are ours, also at position 3000, which tells kinds of RoPE apart."""
    config = model_of("llama", rope_parameters=LLAMA3, max_position_embeddings=4096, vocab_size=61).config
    config.save_pretrained(tmp_path / "config")
    spec = ModelSpec.from_config(tmp_path / "config")
    ranks(Layout.parse(layout).world_size, trained_and_saved, layout, spec, tmp_path)
    done = export_model(tmp_path, tmp_path / "model")
    assert (done.step, done.files) == (1, 1)
    ids_BS = tokens(1, 3001, vocab_size=61)
    theirs = loaded(tmp_path / "model")
    theirs.set_attn_implementation("sdpa")
    expected_V = logits_of(theirs, ids_BS)[0, -1]
    model = load_checkpoint(tmp_path).model
    with torch.no_grad():
        found_V = model(batch_of(ids_BS))[0, -1]
    torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-5 * float(expected_V.abs().max()))
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    assert content["rope_theta"] == LLAMA3["rope_theta"]
    assert content["rope_scaling"] == {key: LLAMA3[key] for key in LLAMA3 if key != "rope_theta"}


def test_in_several_files_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by the part, whatever the model's size; and no file of an earlier export stays."""
    read: list[int] = []
    original = Reader.read

    def counted(self: Reader, part: Held) -> None:
        read.append(len(part.values))
        original(self, part)

    checkpoint_of(tmp_path)
    export_model(tmp_path, tmp_path / "whole")
    expected = weights_of(tmp_path / "whole")
    monkeypatch.setattr(Reader, "read", counted)
    monkeypatch.setattr(export, "CHUNK", 999)
    target = tmp_path / "model"
    for shard_bytes, least in ((20000, 4), (60000, 2), (10**9, 1)):
        done = export_model(tmp_path, target, shard_bytes=shard_bytes)
        files = sorted(target.glob("*.safetensors"))
        assert len(files) == done.files >= least
        assert (target / INDEX).exists() == (done.files > 1)
        assert equal(weights_of(target), expected)
        assert loaded(target).num_parameters() == SPEC.num_parameters == done.weight_bytes // 4
        if done.files > 1:
            index = json.loads((target / INDEX).read_text())
            assert index["metadata"]["total_size"] == sum(w.nbytes for w in expected.values())
            assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
            largest = max(w.nbytes for w in expected.values())
            assert all(path.stat().st_size < max(shard_bytes, largest) + 4096 for path in files)
    assert max(read) == 999
    assert sum(read) == 3 * SPEC.num_parameters


def test_in_bfloat16(tmp_path: Path) -> None:
    checkpoint_of(tmp_path)
    export_model(tmp_path, tmp_path / "whole")
    export_model(tmp_path, tmp_path / "half", dtype=torch.bfloat16)
    expected = {name: weight.bfloat16() for name, weight in weights_of(tmp_path / "whole").items()}
    assert equal(weights_of(tmp_path / "half"), expected)
    assert loaded(tmp_path / "half").dtype == torch.bfloat16


def test_the_vocabulary_is_the_models_own_whatever_the_tokenizer_and_the_ranks(
    tmp_path: Path, ranks: RankPool
) -> None:
    """Three numbers that others mix up: 10 tokens, 13 rows, and the 15 that three ranks would fill up to."""
    # HF-11
    sizes = {"vocab_size": 13, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 42}
    model_of("qwen3", **sizes).save_pretrained(tmp_path / "theirs")
    answers = ranks(3, rows_exported, tmp_path)
    assert answers == [True] * 3
    export_model(tmp_path, tmp_path / "ours")
    assert equal(weights_of(tmp_path / "ours"), weights_of(tmp_path / "theirs"))
    assert weights_of(tmp_path / "ours")["model.embed_tokens.weight"].shape[0] == 13


def rows_exported(folder: Path) -> bool:
    spec = ModelSpec.from_config(folder / "theirs")
    words = {f"w{number}": number for number in range(9)} | {"</s>": 9}
    if torch.distributed.get_rank() == 0:
        Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    torch.distributed.barrier()
    trainer = trainer_of(run_spec("tp3:allreduce"), spec)
    read_hugging_face_(trainer.parallel, folder / "theirs")
    files = about_files(spec, load_tokenizer(folder / "tokenizer.json"))
    save(trainer.parallel, trainer.update, Saving(folder / "checkpoints", {}, files), step=1)
    return True


@pytest.mark.parametrize("kind", ["bytes", "file", "file with settings"])
def test_the_tokenizer_goes_along(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec, text = SPEC.replace({"vocab_size": 300}), "def h\u00e9llo():\n\treturn 1"
    tokenizer: Any = ByteTokenizer()
    beside: dict[str, bytes] = {}
    if kind != "bytes":
        path = tmp_path / "somewhere" / "tokenizer.json"
        path.parent.mkdir()
        path.write_bytes(ByteTokenizer().files()["tokenizer.json"])
        if kind == "file with settings":
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "\u0120"}
            beside["tokenizer_config.json"] = json.dumps(settings).encode()
            beside["chat_template.jinja"] = b"{{ messages }}"
        for name, content in beside.items():
            path.with_name(name).write_bytes(content)
        tokenizer = load_tokenizer(path)
    trainer = trainer_of(run_spec("dp1"), spec)
    saving = Saving(tmp_path / "checkpoints", {}, about_files(spec, tokenizer))
    save(trainer.parallel, trainer.update, saving, step=1)
    export_model(tmp_path, tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == tokenizer.end_of_text
    assert loaded(tmp_path / "model").config.eos_token_id == tokenizer.end_of_text
    ours = load_checkpoint(tmp_path / "model").tokenizer
    assert (ours.encode(text).tolist(), ours.end_of_text) == (
        tokenizer.encode(text).tolist(),
        tokenizer.end_of_text,
    )
    for name, content in beside.items():
        assert (tmp_path / "model" / name).read_bytes() == content


def test_what_is_in_the_folder_already(tmp_path: Path) -> None:
    """An earlier export makes room once the new one is complete; anything else is left alone."""
    # HF-10
    checkpoint_of(tmp_path, seed=5, step=5)
    target = tmp_path / "model"
    target.mkdir()
    export_model(tmp_path, target)
    (target / "left over").write_text("of an earlier export")
    checkpoint_of(tmp_path, seed=6, step=6)
    export_model(tmp_path, target)
    assert json.loads((target / "fourfold.json").read_text())["step"] == 6
    assert not (target / "left over").exists()
    export_model(tmp_path / "checkpoints" / "step-000005", target)
    assert json.loads((target / "fourfold.json").read_text())["step"] == 5
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "model"}
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("irreplaceable")
    for folder in (mine, mine / "thesis.txt"):
        with pytest.raises(UserError, match="has something else in it than an earlier export"):
            export_model(tmp_path, folder)
    assert os.listdir(mine) == ["thesis.txt"]


def test_a_full_disk_leaves_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_of(tmp_path, seed=5, step=5)
    export_model(tmp_path, tmp_path / "model")
    expected = weights_of(tmp_path / "model")
    checkpoint_of(tmp_path, seed=6, step=6)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_all", full)
    with pytest.raises(RunStopped, match=r"cannot write .*model.safetensors: No space left on device"):
        export_model(tmp_path, tmp_path / "model")
    assert equal(weights_of(tmp_path / "model"), expected)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "model"}


def test_a_broken_checkpoint_is_passed_over_or_refused(tmp_path: Path) -> None:
    """A flipped bit is found before the folder has its name."""
    checkpoint_of(tmp_path, seed=5, step=5)
    newest = checkpoint_of(tmp_path, seed=6, step=6)
    [piece] = [piece for piece in read_manifest(newest).pieces if piece.tensor == "model.norm.weight"]
    content = bytearray((newest / piece.file).read_bytes())
    content[piece.offset + 5] ^= 1
    (newest / piece.file).write_bytes(content)
    told: list[str] = []
    assert export_model(tmp_path, tmp_path / "model", tell=told.append).step == 5
    assert len(told) == 1
    assert "has another checksum than the manifest says: going back to the checkpoint before" in told[0]
    with pytest.raises(UserError, match="has another checksum"):
        export_model(newest, tmp_path / "other")
    with pytest.raises(UserError, match="is neither the folder of a run nor a checkpoint"):
        export_model(tmp_path / "model", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_earlier_export_is_back_after_a_kill_between_two_renames(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        export_model(tmp_path / "no-run", tmp_path / "out")
    (tmp_path / "out.previous").mkdir()
    (tmp_path / "out.previous" / "fourfold.json").write_text("{}")
    with pytest.raises(UserError, match="neither the folder of a run nor a checkpoint"):
        export_model(tmp_path / "no-run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
