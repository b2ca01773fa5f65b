"""A checkpoint as a folder that Hugging Face's transformers loads."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fourfold
from fourfold.checkpoint.files import NAMES, content_of, header_of, write_all, write_bytes
from fourfold.checkpoint.hugging_face import CONFIG, INDEX, WEIGHTS
from fourfold.checkpoint.manifest import WEIGHT, Damaged, Manifest, read_manifest
from fourfold.checkpoint.model import of_newest_good, spec_of, tokenizer_of
from fourfold.checkpoint.progress import Progress, counting
from fourfold.checkpoint.reader import Reader, damaged_pieces
from fourfold.checkpoint.state import Held
from fourfold.checkpoint.stripes import Stripes
from fourfold.errors import UserError
from fourfold.run_folder import sync, writing
from fourfold.specs import ModelSpec

ABOUT = "fourfold.json"
"""What we wrote the folder from. A folder that has it may be written anew."""
SHARD_BYTES = 5 * 10**9
"""The most that one file of weights holds, where no single weight is larger."""
CHUNK = 2**22
"""So many elements are in memory at a time."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        step: finished training steps of the checkpoint.
        checkpoint: its folder.
        weight_bytes: of all weights.
        files: how many files they are in.
    """

    step: int
    checkpoint: Path
    weight_bytes: int
    files: int


def export_model(
    source: Path,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> Exported:
    """Write the newest good checkpoint of a run, or one checkpoint, as a Hugging Face folder.

    Whole or not at all; an earlier export in ``folder`` stays until the new one is complete. Weights are
    copied a part at a time: memory does not grow with the model.

    Args:
        source: the folder of a run, or of one checkpoint.
        folder: new, empty, or an earlier export.
        dtype: of the weights in the files.
        shard_bytes: the most that a file of weights holds, unless one weight is larger.
        tell: is given a line on each broken checkpoint that is passed over.
        progress: hears how many bytes of the checkpoint are read and written.

    Raises UserError where there is no good checkpoint, or something else is in ``folder``; RunStopped where
    it cannot be written.
    """
    previous = _previous(folder)
    if not folder.exists() and previous.exists() and _may_be_replaced(previous):
        with writing(folder):
            previous.rename(folder)  # an export was killed before the new one had the name
    if folder.exists() and not _may_be_replaced(folder):
        raise UserError(f"{folder} has something else in it than an earlier export: give another folder")
    partial = folder.with_name(f"{folder.name}.partial")

    def write(checkpoint: Path) -> Exported:
        with writing(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return _write(checkpoint, partial, dtype, shard_bytes, progress)

    try:
        done = of_newest_good(source, write, tell)
        with writing(folder):
            _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return done


def _may_be_replaced(folder: Path) -> bool:
    return folder.is_dir() and ((folder / ABOUT).exists() or not any(folder.iterdir()))


def _previous(folder: Path) -> Path:
    """Return what an earlier export is called while the new one gets its name."""
    return folder.with_name(f"{folder.name}.previous")


def _put_in_place(partial: Path, folder: Path) -> None:
    """Give a complete folder its name."""
    sync(partial)
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _write(
    checkpoint: Path, target: Path, dtype: torch.dtype, shard_bytes: int, progress: Progress
) -> Exported:
    """Write all files of the folder. Raises Damaged where the checkpoint is."""
    manifest = read_manifest(checkpoint)
    spec = spec_of(checkpoint, manifest)
    shards = _shards(spec, dtype.itemsize, shard_bytes)
    names = {
        f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else WEIGHTS: shard
        for number, shard in enumerate(shards, 1)
    }
    total = spec.num_parameters * dtype.itemsize
    stored_bytes = sum(
        math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize
        for tensor in manifest.tensors.values()
        if tensor.state == WEIGHT
    )
    with Reader(checkpoint, manifest, counting(stored_bytes, progress)) as reader:
        for name, shard in names.items():
            with writing(target / name):
                _write_weights(target / name, shard, reader, manifest, dtype)
    once = dict.fromkeys(spec.parameter_shapes(), 1)
    if problems := damaged_pieces(checkpoint, manifest, reader.sums, once, states=[WEIGHT]):
        raise Damaged(*problems)
    files = _small_files(checkpoint, manifest, spec, dtype)
    if len(shards) > 1:
        weight_map = {weight: name for name, shard in names.items() for weight in shard}
        files[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": weight_map})
    for name, content in files.items():
        with writing(target / name):
            write_bytes(target / name, content)
    return Exported(manifest.step, checkpoint, total, len(shards))


def _shards(spec: ModelSpec, itemsize: int, most_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Deal the weights to files, in model order: shapes by name."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in spec.parameter_shapes().items():
        size = torch.Size(shape).numel() * itemsize
        if filled and filled + size > most_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    return shards


def _write_weights(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    reader: Reader,
    manifest: Manifest,
    dtype: torch.dtype,
) -> None:
    tensors, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), header_of(tensors))
        for name, shape in shapes.items():
            stored, numel = manifest.tensors[name], torch.Size(shape).numel()
            for first in range(0, numel, CHUNK):
                values = torch.empty(min(CHUNK, numel - first), dtype=getattr(torch, stored.dtype))
                reader.read(Held(stored, (Stripes(first, len(values)),), values, owners=1))
                write_all(file.fileno(), content_of(values.to(dtype)).data)
        os.fsync(file.fileno())


def _small_files(
    checkpoint: Path, manifest: Manifest, spec: ModelSpec, dtype: torch.dtype
) -> dict[str, bytes]:
    """Return what lies beside the weights: the model's config, the tokenizer, and where it comes from."""
    tokenizer = tokenizer_of(checkpoint, manifest)
    config = spec.to_config() | {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": tokenizer.end_of_text,
    }
    about = {"fourfold": fourfold.__version__, "step": manifest.step}
    return {**tokenizer.files(), CONFIG: _json(config), ABOUT: _json(about)}


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n"
