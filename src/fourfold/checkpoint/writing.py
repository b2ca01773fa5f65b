"""What a save brings onto the disk: the file of a rank; then the manifest, and the checkpoint's name."""

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fourfold
from fourfold.checkpoint.files import write_bytes, write_tensors
from fourfold.checkpoint.folders import complete_, part_of, rotate_
from fourfold.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Piece,
    Stored,
    piece_of,
    piece_values,
)
from fourfold.checkpoint.state import Held
from fourfold.errors import RunStopped
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


@dataclass(frozen=True)
class Written:
    """A checkpoint that is complete.

    Attributes:
        folder: of it.
        size_bytes: of the tensors of all ranks.
        seconds: the longest that a rank wrote.
        paused_seconds: the longest that training stood still on a rank.
        problem: why older ones could not be removed; empty where they could.
    """

    folder: Path
    size_bytes: int
    seconds: float
    paused_seconds: float
    problem: str = ""

    def __str__(self) -> str:
        unit, name = (1e9, "GB") if self.size_bytes >= 1e8 else (1e6, "MB")
        problem = f"; {self.problem}" if self.problem else ""
        return (
            f"saved {self.folder.name}: {self.size_bytes / unit:.2f} {name} in {self.seconds:.2f} s "
            f"({self.size_bytes / self.seconds / 1e9:.2f} GB/s), training stood still for "
            f"{self.paused_seconds:.3f} s{problem}"
        )


def write_own(
    part: Path, parts: Sequence[Held], rank: int, paused_seconds: float, wrote: Callable[[int], None]
) -> None:
    """Write what this rank writes, and a note on it for rank 0. Raises RunStopped where it cannot."""
    path, began = own_file(part, rank), time.perf_counter()
    with writing(path):
        entry, pieces = write_tensors(path, parts, wrote)
        with _without_collector():
            note = {
                "file": vars(entry),
                "tensors": [vars(part.tensor) for part in parts],
                "pieces": [piece_values(piece) for piece in pieces],
                "seconds": time.perf_counter() - began,
                "paused_seconds": paused_seconds,
            }
            _note(part, rank).write_text(json.dumps(note))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Make thousands of small values without the garbage collector.

    They would let it look through all objects of the process, 60 ms with the interpreter's lock held: as long
    as all else that a save does besides writing, and training stands still meanwhile.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def own_file(part: Path, rank: int) -> Path:
    """Return the file with what a rank writes of a checkpoint."""
    return part / f"rank-{rank:05}.safetensors"


def _note(part: Path, rank: int) -> Path:
    return part / f"rank-{rank:05}.json"


def finish(folder: Path, saving: Saving, layout: object, *, ranks: int, step: int, updates: int) -> Written:
    """Write the manifest from all ranks' notes, give the checkpoint its name, and remove older ones.

    Raises RunStopped where the manifest or the name cannot be written.
    """
    part = part_of(folder)
    tensors, pieces, notes = list[Stored](), list[Piece](), []
    with writing(part), _without_collector():
        files = {name: write_bytes(part / name, content) for name, content in saving.files.items()}
        for rank in range(ranks):
            note = json.loads(_note(part, rank).read_text())
            files[own_file(part, rank).name] = FileEntry(**note["file"])
            tensors += map(Stored.of, note["tensors"])
            pieces += map(piece_of, note["pieces"])
            notes.append(note)
            _note(part, rank).unlink()
        manifest = Manifest(
            step,
            updates,
            saving.run,
            {"fourfold": fourfold.__version__, "layout": str(layout)},
            {tensor.name: tensor for tensor in tensors},
            pieces,
            files,
        )
        write_bytes(part / MANIFEST, manifest.text().encode())
    complete_(folder)
    problem = ""
    try:
        rotate_(saving.checkpoints, written=step, keep=saving.keep, keep_every=saving.keep_every)
    except RunStopped as stopped:
        problem = f"older ones stay: {stopped}"
    return Written(
        folder,
        sum(note["file"]["size_bytes"] for note in notes),
        max(note["seconds"] for note in notes),
        max(note["paused_seconds"] for note in notes),
        problem,
    )
