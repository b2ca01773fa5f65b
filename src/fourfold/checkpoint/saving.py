"""Saving: every rank writes what it owns, rank 0 the manifest."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fourfold
from fourfold.checkpoint.files import write_bytes, write_tensors
from fourfold.checkpoint.folders import begin_, complete_, folder_of, part_of, rotate_
from fourfold.checkpoint.manifest import (
    MANIFEST,
    WEIGHT,
    FileEntry,
    Manifest,
    Piece,
    Stored,
    piece_of,
    piece_values,
)
from fourfold.checkpoint.ranks import messages_of_all
from fourfold.checkpoint.state import Held, held
from fourfold.errors import RunStopped
from fourfold.mesh import Mesh
from fourfold.optimizer import Update
from fourfold.parallel_model import ParallelModel
from fourfold.run_folder import writing


@dataclass(frozen=True)
class Saving:
    """Where and how a run saves; the same on all ranks.

    Attributes:
        checkpoints: the folder of the run's checkpoints, which all ranks share.
        run: what a run that goes on from here must have alike.
        files: small files that lie beside the tensors, by name.
        keep: how many of the newest checkpoints stay.
        keep_every: those of every so many steps stay as well; 0 for none.
    """

    checkpoints: Path
    run: Mapping[str, Any]
    files: Mapping[str, bytes]
    keep: int = 1
    keep_every: int = 0


def save(parallel: ParallelModel, update: Update, saving: Saving, *, step: int) -> Path:
    """Write a checkpoint after ``step`` finished steps, and return its folder. All ranks call it.

    Raises RunStopped on all ranks where one cannot write, or where a weight is not finite; the checkpoints
    that were there are untouched then.
    """
    mesh, folder = parallel.mesh, folder_of(step, saving.checkpoints)
    parts = list(held(parallel, update, divided=True))
    bad = [
        f"the weights after step {step} are not finite, first in {part.tensor.name}: no checkpoint is written"
        for part in parts
        if part.tensor.state == WEIGHT and not part.values.isfinite().all()
    ]
    _all_or_none(bad[:1], mesh)
    _step(mesh, lambda: begin_(folder), first_only=True)
    _step(mesh, lambda: _write_own(part_of(folder), parts, mesh.rank))
    _step(
        mesh,
        lambda: _finish(folder, parallel, update, saving, step),
        first_only=True,
    )
    return folder


def _step(mesh: Mesh, task: Callable[[], None], *, first_only: bool = False) -> None:
    """Do a part of the saving on every rank or on rank 0; raise on all ranks where it fails on one."""
    messages = []
    if mesh.rank == 0 or not first_only:
        try:
            task()
        except RunStopped as stopped:
            messages = [str(stopped)]
    _all_or_none(messages, mesh)


def _all_or_none(messages: list[str], mesh: Mesh) -> None:
    found = messages_of_all(messages, mesh)
    if found:
        raise RunStopped("; ".join(found))


def _write_own(part: Path, parts: list[Held], rank: int) -> None:
    """Write what this rank writes, and a note on it for rank 0."""
    path = part / f"rank-{rank:05}.safetensors"
    with writing(path):
        entry, pieces = write_tensors(path, parts)
        note = {
            "file": asdict(entry),
            "tensors": [asdict(part.tensor) for part in parts],
            "pieces": [piece_values(piece) for piece in pieces],
        }
        _note(part, rank).write_text(json.dumps(note))


def _note(part: Path, rank: int) -> Path:
    return part / f"rank-{rank:05}.json"


def _finish(folder: Path, parallel: ParallelModel, update: Update, saving: Saving, step: int) -> None:
    """Write the manifest from all ranks' notes, and give the checkpoint its name."""
    part, layout = part_of(folder), parallel.mesh.layout
    with writing(part):
        files = {name: write_bytes(part / name, content) for name, content in saving.files.items()}
        tensors, pieces = list[Stored](), list[Piece]()
        for rank in range(layout.world_size):
            note = json.loads(_note(part, rank).read_text())
            files[f"rank-{rank:05}.safetensors"] = FileEntry(**note["file"])
            tensors += map(Stored.of, note["tensors"])
            pieces += map(piece_of, note["pieces"])
            _note(part, rank).unlink()
        manifest = Manifest(
            step,
            update.updates,
            saving.run,
            {"fourfold": fourfold.__version__, "layout": str(layout)},
            {tensor.name: tensor for tensor in tensors},
            pieces,
            files,
        )
        write_bytes(part / MANIFEST, manifest.text().encode())
    complete_(folder)
    rotate_(saving.checkpoints, written=step, keep=saving.keep, keep_every=saving.keep_every)
