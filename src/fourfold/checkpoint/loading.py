"""Loading: every rank reads what it owns, on whatever layout, and all of it is checked before it is used."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fourfold.checkpoint.folders import bring_back_, folder_of, newest_good, set_aside_, steps_there
from fourfold.checkpoint.manifest import Damaged, Manifest, read_manifest
from fourfold.checkpoint.progress import Progress, counting
from fourfold.checkpoint.ranks import added_up, messages_of_all, texts_of_all
from fourfold.checkpoint.reader import Reader, damaged_pieces, problems_there, unlike
from fourfold.checkpoint.state import held, owners_of
from fourfold.errors import Unreadable, UserError
from fourfold.mesh import Mesh
from fourfold.optimizer import Update
from fourfold.parallel_model import ParallelModel

SHOWN_PROBLEMS = 4
"""Of so many files that ranks cannot read the message tells."""


def load_newest_(
    parallel: ParallelModel,
    update: Update,
    checkpoints: Path,
    *,
    run: Mapping[str, Any],
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> int:
    """Load the newest checkpoint that is good; return its step, 0 where there is none. All ranks call it.

    A broken one is set aside and ``tell`` is given a line on it, on rank 0; ``progress`` hears how far this
    rank is. Raises UserError, on all ranks, where all that are there are broken, or where the run differs in
    what must be alike; Unreadable where one could not be read now, which says nothing of what is in it.
    """
    mesh = parallel.mesh
    if mesh.rank == 0:
        bring_back_(checkpoints)
    told = texts_of_all(json.dumps(steps_there(checkpoints)) if mesh.rank == 0 else "", mesh)
    steps: list[int] = json.loads(told[0])
    found = newest_good(
        checkpoints,
        steps,
        lambda folder: load_(parallel, update, folder, run=run, progress=progress),
        tell if mesh.rank == 0 else lambda _: None,
    )
    if found is None:
        return 0
    step, _ = found
    if mesh.rank == 0:
        for broken in steps[: steps.index(step)]:
            tell(f"set aside as {set_aside_(folder_of(broken, checkpoints))}")
    return step


def load_(
    parallel: ParallelModel,
    update: Update,
    folder: Path,
    *,
    run: Mapping[str, Any],
    progress: Progress = lambda *_: None,
) -> Manifest:
    """Load a checkpoint into this rank's weights and moments. All ranks call it.

    Raises Damaged, Unreadable or UserError on all ranks alike. Weights and moments are untouched after
    it, but for a checksum of bytes that differs, or a read that fails: then they are of no use.
    """
    mesh = parallel.mesh
    manifest = _agreed_manifest(folder, mesh)
    differences = differing(manifest.run, run)
    if differences:
        raise UserError(
            f"{folder} is of another run: undo these changes, or start a new run without --resume",
            *differences,
        )
    times, parts = owners_of(parallel), list(held(parallel, update))
    unknown = {tensor.parameter for tensor in manifest.tensors.values()} - times.keys()
    with _together(mesh) as problems:
        problems += [f"{folder} has {name}, which is no parameter of the model" for name in sorted(unknown)]
        problems += unlike(folder, manifest, parts)
        problems += problems_there(folder, manifest, share=mesh.rank, shares=mesh.world_size)
    total = sum(part.values.numel() * part.values.itemsize for part in parts)
    with _together(mesh), Reader(folder, manifest, counting(total, progress)) as reader:
        for part in parts:
            reader.read(part)
    if damaged := damaged_pieces(folder, manifest, added_up(reader.sums, mesh), times):
        raise Damaged(*damaged)
    update.continue_(manifest.updates)
    parallel.publish_()
    return manifest


def _agreed_manifest(folder: Path, mesh: Mesh) -> Manifest:
    """Read the manifest on every rank; raise on all where one cannot, or reads another."""
    with _together(mesh) as problems:
        manifest = read_manifest(folder)
        if folder_of(manifest.step, folder.parent) != folder:
            problems.append(f"{folder} holds the manifest of step {manifest.step}")
    return manifest


@contextmanager
def _together(mesh: Mesh) -> Iterator[list[str]]:
    """Raise what a rank raises on all of them: Unreadable before Damaged; problems in the list are damage.

    Of a file that one could not read nobody knows whether it is damaged.
    """
    problems, unreadable = list[str](), list[str]()
    try:
        yield problems
    except Damaged as damaged:
        problems += damaged.messages
    except Unreadable as error:
        unreadable.append(str(error))
    if found := messages_of_all(unreadable, mesh):
        raise Unreadable("; ".join(found[:SHOWN_PROBLEMS]))
    if found := messages_of_all(problems, mesh):
        raise Damaged(*found)


def differing(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Return a message for each key in which a run is not the one that was saved."""
    asked = json.loads(json.dumps(dict(asked)))  # as they come back from a file
    return [
        f"{key}: the checkpoint has {_shown(saved, key)}, the run {_shown(asked, key)}"
        for key in sorted(saved.keys() | asked.keys())
        if _shown(saved, key) != _shown(asked, key)
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "nothing"
