"""Whatever happens to the files of a checkpoint is found, named, and survived by the one before."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.checkpoint import Saving, about_files, load_checkpoint, load_newest_, save
from fourfold.checkpoint.digest import BLOCK_WORDS, digest
from fourfold.checkpoint.loading import load_
from fourfold.checkpoint.manifest import MANIFEST, Damaged, read_manifest
from fourfold.checkpoint.reader import problems_there
from fourfold.data import ByteTokenizer
from fourfold.errors import UserError
from fourfold.training import Trainer
from tests.checkpoint.trainers import SIZES, SPEC, differing, fill_, run_spec, trainer_of
from tests.ranks import RankPool

FILES = about_files(SPEC, ByteTokenizer())
RANK_FILES = ["rank-00000.safetensors", "rank-00001.safetensors"]
EXPECTED_RUN = {"seed": 0, "data.sequence_length": 16}


def saved(trainer: Trainer, checkpoints: Path, step: int) -> Path:
    fill_(trainer, step)
    return save(trainer.parallel, trainer.update, Saving(checkpoints, EXPECTED_RUN, FILES, keep=9), step=step)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return trainer_of(run_spec("dp1"))


@pytest.fixture(scope="module")
def original(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run of two ranks, of steps 3 and 4."""
    checkpoints = tmp_path_factory.mktemp("original")
    ranks(2, save_two, str(checkpoints))
    return checkpoints


def save_two(checkpoints: str) -> None:
    trainer = trainer_of(run_spec("fsdp2", pieces="flat"))
    for step in (3, 4):
        saved(trainer, Path(checkpoints), step)


def checksum(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sign(path: Path, content: dict[str, Any]) -> None:
    """Write a manifest with the right checksum, whatever is in it."""
    path.write_text(json.dumps({**content, "sha256": checksum(content)}))


def is_signed(path: Path) -> bool:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return content.get("sha256") == checksum(content)


def truncate(path: Path, rng: random.Random, _: Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lengthen(path: Path, rng: random.Random, _: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 9)))


def flip(path: Path, rng: random.Random, _: Path) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero(path: Path, rng: random.Random, _: Path) -> None:
    content = bytearray(path.read_bytes())
    first = rng.randrange(len(content) - 512)
    content[first : first + 512] = bytes(512)
    path.write_bytes(content)


def delete(path: Path, rng: random.Random, _: Path) -> None:
    path.unlink()


def swap(path: Path, rng: random.Random, other: Path) -> None:
    """The file of another checkpoint, or that of another rank."""
    if path.name in RANK_FILES and rng.random() < 0.5:
        theirs = path.with_name(RANK_FILES[1 - RANK_FILES.index(path.name)])
        mine = path.read_bytes()
        shutil.copy(theirs, path)
        if rng.random() < 0.5:
            theirs.write_bytes(mine)  # they change places
    else:
        shutil.copy(other / path.name, path)


def exchange(path: Path, rng: random.Random, _: Path) -> None:
    """Two runs of bytes change places: a sum of bytes would not see it."""
    content = bytearray(path.read_bytes())
    first, second = sorted(rng.sample(range(0, len(content) - 64, 64), 2))
    one, two = content[first : first + 64], content[second : second + 64]
    content[first : first + 64], content[second : second + 64] = two, one
    if content == path.read_bytes():
        content[first] ^= 1
    path.write_bytes(content)


def edit(path: Path, rng: random.Random, _: Path) -> None:
    """Change one number of the manifest, and keep it valid JSON; half of them are signed anew."""
    content = json.loads(path.read_text())
    is_signed = rng.random() < 0.5
    piece = rng.choice(content["pieces"])
    keys = ["step", "offset", "digest", "stripes", "shape", "file", "version"]
    key = rng.choice(keys if is_signed else [*keys, "updates"])  # any number of updates can be right
    if key in ("step", "updates", "version"):
        content[key] += 1
    elif key == "shape":
        content["tensors"][piece["tensor"]]["shape"][0] += 1
    elif key == "stripes":
        piece["stripes"][0][0] += 1
    elif key == "file":
        piece["file"] = "config.json"
    else:
        piece[key] = piece[key] + 4 if key == "offset" else piece[key][::-1]
    if is_signed:
        sign(path, content)
    else:
        path.write_text(json.dumps(content))


WAYS: list[Callable[[Path, random.Random, Path], None]]
WAYS = [truncate, lengthen, flip, zero, delete, swap, exchange, edit]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_damage_is_found_and_named(
    way: Callable[[Path, random.Random, Path], None], trainer: Trainer, original: Path, tmp_path: Path
):
    """25 each: 200 in all."""
    rng, found = random.Random(way.__name__), 0
    for _ in range(50):
        if found == 25:
            break
        checkpoints = tmp_path / str(found)
        shutil.copytree(original, checkpoints, dirs_exist_ok=True)
        newest = checkpoints / "step-000004"
        names = sorted(path.name for path in newest.iterdir())
        if way in (zero, exchange):
            names = RANK_FILES  # the others are smaller, or in no fixed order
        if way is swap:
            names.remove("config.json")  # it is the same in both
        name = MANIFEST if way is edit else rng.choice(names)
        before = (newest / name).read_bytes()
        way(newest / name, rng, checkpoints / "step-000003")
        if (newest / name).exists() and (newest / name).read_bytes() == before:
            continue  # zeros where there were zeros: another draw
        signed = is_signed(newest / MANIFEST)
        with pytest.raises(Damaged) as caught:
            load_(trainer.parallel, trainer.update, newest, run=EXPECTED_RUN)
        # A manifest that is signed is good by itself: it is the checkpoint that is wrong.
        named = newest.name if name == MANIFEST and signed else name
        assert any(named in message for message in caught.value.messages)
        told: list[str] = []
        assert (
            load_newest_(trainer.parallel, trainer.update, checkpoints, run=EXPECTED_RUN, tell=told.append)
            == 3
        )
        assert not differing(trainer, 3)
        assert "step-000004" in told[0]
        assert "going back to the checkpoint before" in told[0]
        assert (checkpoints / "step-000004.broken-1").is_dir()
        shutil.rmtree(checkpoints)
        found += 1
    assert found == 25, "almost every draw changes something"


def test_all_is_looked_at_before_a_byte_is_read(trainer: Trainer, original: Path, tmp_path: Path):
    """Pieces that are missing, twice, or not where they could be; and weights are as they were."""
    folder = original / "step-000004"
    manifest = read_manifest(folder)
    assert problems_there(folder, manifest) == []
    piece = manifest.pieces[3]
    others = [other for other in manifest.pieces if other is not piece]
    counts = f"{folder}: the manifest lacks pieces of {piece.tensor}, or has some twice"
    first, size = piece.stripes[0], manifest.files[piece.file].size_bytes
    short = replace(first, length=first.length - 1)
    for pieces, problem in (
        (others, counts),
        ([*manifest.pieces, piece], counts),
        ([*others, replace(piece, stripes=(short, *piece.stripes[1:]))], counts),
        ([*others, replace(piece, offset=size - 4)], f"a piece of {piece.tensor} would not be within"),
        ([*others, replace(piece, offset=0)], f"a piece of {piece.tensor} would not be within"),
        ([*others, replace(piece, file="gone")], f"does not list gone, where a piece of {piece.tensor} is"),
    ):
        changed = replace(manifest, pieces=pieces)
        [found] = problems_there(folder, changed)
        assert problem in found
        shared = [problems_there(folder, changed, share=share, shares=3) for share in range(3)]
        assert sorted(map(len, shared)) == [0, 0, 1], "ranks look at a part each"

    shutil.copytree(folder, tmp_path / "step-000004")
    with (tmp_path / "step-000004" / piece.file).open("ab") as file:
        file.write(b"x")
    fill_(trainer, 9)
    with pytest.raises(Damaged, match=r"rank-00000\.safetensors has \d+ bytes, the manifest says"):
        load_(trainer.parallel, trainer.update, tmp_path / "step-000004", run=EXPECTED_RUN)
    assert not differing(trainer, 9)


def test_loading_tells_how_far_it_is(trainer: Trainer, original: Path):
    shown: list[tuple[int, int, float]] = []
    load_newest_(
        trainer.parallel, trainer.update, original, run=EXPECTED_RUN, progress=lambda *how: shown.append(how)
    )
    total_bytes = 3 * 4 * sum(SIZES.values())
    assert [total for _, total, _ in shown] == [total_bytes] * len(shown)
    assert [done for done, _, _ in shown] == sorted({done for done, _, _ in shown})
    assert shown[-1][0] == total_bytes
    assert shown[-1][2] > shown[0][2] > 0


def test_where_all_are_broken_nothing_is_loaded(trainer: Trainer, original: Path, tmp_path: Path):
    checkpoints = tmp_path / "all"
    shutil.copytree(original, checkpoints)
    for folder in checkpoints.iterdir():
        (folder / "rank-00000.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        load_newest_(trainer.parallel, trainer.update, checkpoints, run=EXPECTED_RUN)
    assert caught.value.messages == (
        f"no checkpoint in {checkpoints} can be loaded",
        *(f"{checkpoints}/step-00000{step}/rank-00000.safetensors is missing" for step in (4, 3)),
    )
    assert len(list(checkpoints.iterdir())) == 2, "both are still there"


def test_another_run_is_refused_with_what_differs(trainer: Trainer, original: Path):
    other = {"seed": 1, "model.hidden_size": 64}
    with pytest.raises(UserError) as caught:
        load_newest_(trainer.parallel, trainer.update, original, run=other)
    assert caught.value.messages == (
        f"{original}/step-000004 is of another run: undo these changes, or start a new run without --resume",
        "data.sequence_length: the checkpoint has 16, the run nothing",
        "model.hidden_size: the checkpoint has nothing, the run 64",
        "seed: the checkpoint has 0, the run 1",
    )
    smaller = SPEC.replace({"vocab_size": 60})
    wrong = trainer_of(run_spec("dp1"), smaller)
    with pytest.raises(UserError) as caught:
        load_newest_(wrong.parallel, wrong.update, original, run=EXPECTED_RUN)
    assert "model.embed_tokens.weight of shape (61, 32) in float32, the run needs (60, 32)" in str(
        caught.value
    )
    muon = trainer_of(run_spec("dp1", optimizer="muon"))
    with pytest.raises(UserError, match=r"has no model\.layers\.\d\..*\.weight\.momentum_buffer"):
        load_newest_(muon.parallel, muon.update, original, run=EXPECTED_RUN)  # CK-05: never fresh moments


def test_one_process_reads_the_model(trainer: Trainer, original: Path, tmp_path: Path):
    shutil.copytree(original, tmp_path / "checkpoints")
    (tmp_path / "run.toml").touch()
    mistaken = tmp_path / "checkpoints" / "step-000005"
    mistaken.mkdir()
    fill_(trainer, 4)
    told: list[str] = []
    for folder in (original / "step-000004", tmp_path):
        shown: list[tuple[int, int, float]] = []
        found = load_checkpoint(folder, told.append, lambda *how, to=shown: to.append(how))
        size = 4 * sum(SIZES.values())
        assert ([total for _, total, _ in shown], shown[-1][0]) == ([size] * len(SIZES), size)
        assert (found.step, found.tokenizer.name) == (4, "bytes")
        for name, weight in trainer.parallel.named_masters():
            assert torch.equal(found.model.get_parameter(name), weight), name
    assert told == [f"{mistaken / MANIFEST} is missing: going back to the checkpoint before"]
    path = tmp_path / "checkpoints" / "step-000004" / "config.json"
    path.write_text(path.read_text().replace("61", "62"))
    assert load_checkpoint(tmp_path).step == 3
    with pytest.raises(UserError, match=f"{path} is damaged or another file: it has another checksum"):
        load_checkpoint(path.parent)


def flip_for_two(folder: str) -> list[str]:
    """A byte that only one rank reads; both hear of it."""
    trainer = trainer_of(run_spec("fsdp2", pieces="flat"))
    checkpoints = Path(folder)
    newest = saved(trainer, checkpoints, 8)
    if trainer.parallel.mesh.rank == 0:
        path = newest / "rank-00001.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_newest_(trainer.parallel, trainer.update, checkpoints, run=EXPECTED_RUN)
    return list(caught.value.messages)


def test_all_ranks_hear_of_what_one_finds(ranks: RankPool, tmp_path: Path):
    [first, second] = ranks(2, flip_for_two, str(tmp_path))
    assert first == second
    assert len(first) == 2
    assert first[1].startswith(f"{tmp_path}/step-000008/rank-00001.safetensors is damaged: its part of ")


def test_the_digest_adds_up_and_tells_places_apart():
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, 4 * (2 * BLOCK_WORDS + 10), dtype=np.uint8)
    whole = digest(content, 0)
    parts = [0, 4, 4 * BLOCK_WORDS - 8, 4 * BLOCK_WORDS + 4, len(content)]
    added = sum(digest(content[a:b], a) for a, b in pairwise(parts)) % 2**64
    assert added == whole
    for first, second in ((0, 4), (0, 4 * BLOCK_WORDS), (8, 4 * BLOCK_WORDS + 12)):
        other = content.copy()
        other[first : first + 4], other[second : second + 4] = (
            content[second : second + 4],
            content[first : first + 4],
        )
        assert digest(other, 0) != whole
    assert digest(np.array([1, 0, 0, 0], np.uint8), 0) % 2 == 1, "an odd factor: no bit is lost"


def test_the_manifest_is_of_this_version(original: Path, tmp_path: Path):
    content = json.loads((original / "step-000003" / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(Damaged, match=r"has version 2 of the format, this fourfold reads 1"):
        read_manifest(tmp_path)
