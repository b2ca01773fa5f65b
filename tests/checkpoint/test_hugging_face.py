"""A model of Hugging Face as first weights: the same on every layout, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fourfold.checkpoint import check_hugging_face, load_checkpoint, read_hugging_face_
from fourfold.data import ByteTokenizer
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.models.batch import IGNORE, Microbatch
from fourfold.specs import Layout, ModelSpec
from fourfold.training import initialized
from tests.checkpoint.hugging_face_models import FAMILIES, LENGTH, loaded, logits_of, model_of, tokens
from tests.ranks import RankPool

HEAD, EMBEDDING, WEIGHTS = "lm_head.weight", "model.embed_tokens.weight", "model.safetensors"
INDEX = "model.safetensors.index.json"
LAYOUTS = ("dp1", "tp2", "pp2", "fsdp2", "pp2,tp2", "fsdp2,tp2")
PREFIXES = (2, 7, LENGTH)
"""Logits are taken after so many tokens: where only the first is read, positions do not show."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family, every second one in several files."""
    made = {}
    for number, family in enumerate(FAMILIES):
        made[family] = tmp_path_factory.mktemp(family)
        model_of(family).save_pretrained(made[family], max_shard_size="20KB" if number % 2 else "5GB")
        for name, content in ByteTokenizer().files().items():
            (made[family] / name).write_bytes(content)
    return made


def read_by_one(folder: Path) -> dict[str, Tensor]:
    parallel = initialized(
        ModelSpec.from_config(folder), Mesh(Layout()), microbatches=1, dtype="float32", seed=0, init=folder
    )
    return dict(parallel.named_masters())


def row(ids_BS: Tensor) -> Microbatch:
    return Microbatch(
        ids_BS,
        torch.full_like(ids_BS, IGNORE),
        torch.arange(ids_BS.shape[1]).expand_as(ids_BS),
        ((ids_BS.shape[1],),) * len(ids_BS),
    )


Imported = tuple[dict[str, Tensor], list[Tensor], float]
"""The weights, whole; logits after some tokens; how many bytes were read for each that the rank owns."""


def imported(layout: str, folders: dict[str, Path]) -> dict[str, Imported]:
    mesh = Mesh(Layout.parse(layout))
    found = {}
    for family, folder in folders.items():
        parallel = initialized(
            ModelSpec.from_config(folder),
            mesh,
            microbatches=2,
            dtype="float32",
            seed=0,
            sequence_length=LENGTH,
            init=folder,
        )
        weights = {name: value.clone() for name, value in parallel.named_masters()}
        parallel.gather_()
        ids_BS = tokens(1)
        logits = [parallel.last_logits(row(ids_BS[:, :length])) for length in PREFIXES]
        owned = sum(4 * part.target.numel() for part in parallel.weights.masters())
        shown: list[tuple[int, int, float]] = []
        read = read_hugging_face_(parallel, folder, lambda *how, to=shown: to.append(how))
        assert not owned or shown[-1][:2] == (read, read), "it says how far it is"
        found[family] = weights, logits, read / max(owned, 1)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_logits_are_those_of_transformers(
    layout: str, folders: dict[str, Path], ranks: RankPool
) -> None:
    """Llama, Qwen2, Qwen3, Mistral; kinds of RoPE, biases, tied or not, heads of any size, many files."""
    # HF-01
    for answer in ranks(Layout.parse(layout).world_size, imported, layout, folders):
        for family, (weights, logits, times_read) in answer.items():
            theirs = model_of(family)
            parameters = dict(theirs.named_parameters())
            assert weights.keys() == parameters.keys()
            for name, weight in parameters.items():
                assert torch.equal(weights[name], weight), (family, name)
            expected_SV = logits_of(theirs, tokens(1))[0]
            for length, found_V in zip(PREFIXES, logits, strict=True):
                error = (found_V - expected_SV[length - 1]).abs().max() / expected_SV.abs().max()
                assert error < 1e-5, (family, length)
            assert times_read == 1, f"{family}: a rank reads what it owns, and that once"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_files_of_other_precisions(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of("qwen2").to(dtype)
    model.save_pretrained(tmp_path)
    parallel = initialized(
        ModelSpec.from_config(tmp_path),
        Mesh(Layout()),
        microbatches=1,
        dtype="float32",
        seed=0,
        init=tmp_path,
    )
    for name, weight in parallel.named_masters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, model.state_dict()[name].float()), name


def saved(folder: Path, *, tied: bool) -> dict[str, Tensor]:
    """Write a model with a tokenizer, and return its weights."""
    model_of("qwen2-tied" if tied else "qwen2").save_pretrained(folder)
    for name, content in ByteTokenizer().files().items():
        (folder / name).write_bytes(content)
    return load_file(folder / WEIGHTS)


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def read_on_ranks(layout: str, folder: Path, spec: ModelSpec) -> str:
    mesh = Mesh(Layout.parse(layout))
    try:
        initialized(spec, mesh, microbatches=2, dtype="float32", seed=0, sequence_length=LENGTH, init=folder)
    except UserError as error:
        return str(error)
    return "no error"


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
def test_tied_or_not_and_with_a_head_or_without(tied: bool, head: str, outcome: str, tmp_path: Path) -> None:
    """Seen in THUDM/slime#345 and others: a random head, or an error in one size of a model only."""
    # HF-02
    weights = saved(tmp_path, tied=tied)
    weights.pop(HEAD, None)
    if head != "absent":
        weights[HEAD] = weights[EMBEDDING] + (1.0 if head == "different" else 0.0)
    rewrite(tmp_path, weights)
    if outcome in ("tied", "separate"):
        model = load_checkpoint(tmp_path).model
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is (outcome == "tied")
        assert torch.equal(model.lm_head.weight, weights.get(HEAD, weights[EMBEDDING]))
    else:
        with pytest.raises(UserError, match=outcome):
            load_checkpoint(tmp_path)


def test_what_is_wrong_is_said_on_every_rank(tmp_path: Path, ranks: RankPool) -> None:
    """Also what only one rank can see: a head that differs, a number in a piece of the other one."""
    weights = saved(tmp_path, tied=True)
    spec = ModelSpec.from_config(tmp_path)
    rewrite(tmp_path, weights | {HEAD: weights[EMBEDDING] + 1})
    [first, second] = ranks(2, read_on_ranks, "pp2", tmp_path, spec)
    assert first == second
    assert f"{HEAD} differs from {EMBEDDING}" in first
    for name, row_number in ((EMBEDDING, 0), ("model.norm.weight", -1)):
        bad = weights[name].clone()
        bad[row_number] = float("nan")
        rewrite(tmp_path, weights | {name: bad})
        found = ranks(2, read_on_ranks, "fsdp2", tmp_path, spec)
        assert found == [f"{tmp_path / WEIGHTS}: {name} has values that are not finite in torch.float32"] * 2


def test_everything_that_does_not_fit_is_named(tmp_path: Path) -> None:
    weights = saved(tmp_path, tied=True)
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    weights["model.extra"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    weights["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # known, and of no use
    rewrite(tmp_path, weights)
    with pytest.raises(UserError) as caught:
        check_hugging_face(tmp_path, ModelSpec.from_config(tmp_path))
    assert caught.value.messages == (
        f"{tmp_path}: model.layers.1.mlp.up_proj.weight is missing",
        f"{tmp_path}: model.extra is no parameter of this model (and 1 more)",
        f"{tmp_path / WEIGHTS}: model.norm.weight has shape (31,), the model needs (32,)",
    )


def problems(folder: Path, tell: Any = lambda _: None) -> str:
    try:
        check_hugging_face(folder, ModelSpec.from_config(folder), tell)
    except UserError as error:
        return str(error)
    return "no error"


def test_damaged_files_are_named(tmp_path: Path) -> None:
    weights = saved(tmp_path, tied=True)
    path = tmp_path / WEIGHTS
    whole = path.read_bytes()
    for content in (whole[:-7], whole[:-5000]):
        path.write_bytes(content)
        assert f"{path} is damaged or incomplete: " in problems(tmp_path)
    for content in (b"", whole[:5], whole[:100], b"\xff" * 8 + whole[8:]):
        path.write_bytes(content)
        assert problems(tmp_path) == f"{path} is damaged or incomplete: its header is longer than the file"
    path.write_bytes(whole[:8] + b"x" + whole[9:])
    assert "its header cannot be read" in problems(tmp_path)
    rewrite(tmp_path, weights | {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    assert problems(tmp_path) == (
        f"{path}: model.norm.weight is stored as I8, which is not supported: use F32, BF16, F16 or F64"
    )
    path.unlink()
    assert problems(tmp_path).endswith(f"{WEIGHTS} is missing, and {INDEX} too")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pickled weights (.bin) are not read" in problems(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(whole)
    assert "model-00001-of-00002.safetensors alone does not say whether it is all of it" in problems(tmp_path)


def test_an_index_and_its_files(tmp_path: Path) -> None:
    """A file that is gone, one too many, weights that lie elsewhere, other names than usual."""
    # HF-10
    model_of("qwen2").save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2
    told: list[str] = []
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes((tmp_path / names[0]).read_bytes())
    assert problems(tmp_path, told.append) == "no error"
    assert told == [f"{tmp_path}/model-00009-of-00009.safetensors is not read, for {INDEX} does not name it"]
    first = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[0]).unlink()
    assert problems(tmp_path) == f"{tmp_path / names[0]} is missing"
    (tmp_path / names[0]).write_bytes((tmp_path / names[1]).read_bytes())
    assert f"{tmp_path / names[0]}: " in problems(tmp_path)
    assert f"is not where {INDEX} says" in problems(tmp_path)
    (tmp_path / names[0]).write_bytes(first)
    odd = {"weight_map": index["weight_map"] | {"model.none": names[0]}}
    (tmp_path / INDEX).write_text(json.dumps(odd))
    assert problems(tmp_path) == f"{tmp_path / INDEX}: model.none is in none of the files"
    (tmp_path / names[0]).rename(tmp_path / "a b.safetensors")
    odd = {
        "weight_map": {n: "a b.safetensors" if f == names[0] else f for n, f in index["weight_map"].items()}
    }
    (tmp_path / INDEX).write_text(json.dumps(odd))
    assert problems(tmp_path) == "no error"
    for content in ("[1]", "{", '{"weight_map": {"a": 1}}'):
        (tmp_path / INDEX).write_text(content)
        assert f"{tmp_path / INDEX} " in problems(tmp_path)


def test_where_a_folder_has_both_the_one_file_counts_as_in_transformers(tmp_path: Path) -> None:
    """An index left over from an earlier, sharded save."""
    model_of("qwen2").save_pretrained(tmp_path, max_shard_size="20KB")
    weights = {
        name: weight + 1.0
        for path in tmp_path.glob("*.safetensors")
        for name, weight in load_file(path).items()
    }
    rewrite(tmp_path, weights)
    told: list[str] = []
    assert problems(tmp_path, told.append) == "no error"
    assert len(told) > 2
    assert told[0].endswith(f"model-00001-of-{len(told):05}.safetensors is not read, for {WEIGHTS} is there")
    theirs = loaded(tmp_path)
    assert torch.equal(theirs.lm_head.weight, weights[HEAD])
    parallel = initialized(
        ModelSpec.from_config(tmp_path),
        Mesh(Layout()),
        microbatches=1,
        dtype="float32",
        seed=0,
        init=tmp_path,
    )
    assert torch.equal(dict(parallel.named_masters())[HEAD], weights[HEAD])
