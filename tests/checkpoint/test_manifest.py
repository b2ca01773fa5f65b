"""A manifest that no fourfold wrote is damage too: the checkpoint before is taken."""

import json
import shutil
from pathlib import Path

import pytest

from fourfold.checkpoint import load_checkpoint
from fourfold.checkpoint.manifest import MANIFEST
from fourfold.errors import UserError
from tests.checkpoint.test_damage import saved, sign
from tests.checkpoint.trainers import run_spec, trainer_of


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run, of steps 3 and 4."""
    trainer, checkpoints = trainer_of(run_spec("dp1")), tmp_path_factory.mktemp("original")
    for step in (3, 4):
        saved(trainer, checkpoints, step)
    return checkpoints


MALFORMED = (
    (("step",), None, "cannot be read: it lacks 'step'"),
    (("pieces",), None, "cannot be read: it lacks 'pieces'"),
    (("tensors", "model.norm.weight", "shape"), None, "cannot be read: it lacks 'shape'"),
    (("step",), "4", "cannot be read: '4' is no int"),
    (("updates",), True, "cannot be read: True is no int"),
    (("run",), [], r"cannot be read: \[\] is no dict"),
    (("tensors",), [], "cannot be read: 'list' object has no attribute 'items'"),
    (("pieces", 0), 5, "cannot be read: 'int' object is not subscriptable"),
    (("pieces", 0, "digest"), "no number", "cannot be read: invalid literal for int"),
    (("pieces", 0, "tensor"), "gone", "cannot be read: it has pieces of gone, but no such tensor"),
    (("pieces", 0, "stripes", 0), [0, 1, 10**12, 1], "the manifest lacks pieces of .*, or has some twice"),
    (("pieces", 0, "stripes", 0), [0, 0, 10**12, 0], "the manifest lacks pieces of .*, or has some twice"),
    (("pieces", 0, "stripes", 0), [10**30, 1, 1, 0], "the manifest lacks pieces of .*, or has some twice"),
    (("pieces", 0, "stripes", 0), [0] * 5, r"cannot be read: .* takes from 3 to 5 positional arguments"),
    (
        ("tensors", "model.norm.weight", "dtype"),
        "load",
        "model.norm.weight in load, which no checkpoint is in",
    ),
    (("files", "config.json", "head_bytes"), 10**12, f"cannot be read: a file has .* and {10**12} of them"),
    (("files", "../config.json"), {"size_bytes": 0, "head_bytes": 0, "sha256": ""}, "is no name of a file"),
)
"""Places in the manifest, what is there instead (None: nothing), and what is said of it."""


@pytest.mark.parametrize(("place", "value", "message"), MALFORMED)
def test_what_is_signed_but_no_manifest_is_damaged(
    place: tuple[str | int, ...], value: object, message: str, original: Path, tmp_path: Path
):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(original, checkpoints)
    path = checkpoints / "step-000004" / MANIFEST
    within = content = json.loads(path.read_text())
    *ways, last = place
    for key in ways:
        within = within[key]
    if value is None:
        del within[last]
    else:
        within[last] = value
    sign(path, content)
    with pytest.raises(UserError, match=message):
        load_checkpoint(path.parent)
    assert load_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\xff", "9" * 5000, "null"])
def test_what_no_reader_can_read_is_damaged(text: str, original: Path, tmp_path: Path):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(original, checkpoints)
    (checkpoints / "step-000004" / MANIFEST).write_bytes(text.encode("latin-1"))
    assert load_checkpoint(tmp_path).step == 3
