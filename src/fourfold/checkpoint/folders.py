"""The checkpoints of a run: their names, which are complete, which stay.

[Note: whole or not at all] A checkpoint is written into ``step-000100.part``: the files of all ranks, then
its manifest, each brought onto the disk; then the folder gets its name. So a folder called ``step-000100`` is
complete, whatever died when, and the newest of them is where a run goes on. Nothing points at it that could
be out of date. One that makes room for another of the same step is called ``step-000100.old`` until that has
the name, and gets its own back where that never came. What is being removed is called ``step-000100.gone``.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from fourfold.checkpoint.manifest import Damaged
from fourfold.errors import UserError
from fourfold.run_folder import reading, sync, writing

Result = TypeVar("Result")
CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")


def folder_of(step: int, checkpoints: Path) -> Path:
    """Return the folder of the checkpoint after ``step`` finished steps."""
    return checkpoints / f"step-{step:06}"


def part_of(folder: Path) -> Path:
    """Return where a checkpoint is written before it is complete."""
    return folder.with_name(f"{folder.name}.part")


def steps_there(checkpoints: Path) -> list[int]:
    """Return the steps of which there are complete checkpoints, the newest first.

    Raises Unreadable where the folder does not let us look.
    """
    with reading(checkpoints):
        if not checkpoints.is_dir():
            return []
        found = [_NAME.fullmatch(path.name) for path in checkpoints.iterdir()]
    return sorted((int(name[1]) for name in found if name), reverse=True)


def begin_(folder: Path) -> None:
    """Make an empty place for a new checkpoint, and remove what an earlier save left unfinished."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        bring_back_(folder.parent)
        for left in (*folder.parent.glob("step-*.part"), *folder.parent.glob("step-*.gone")):
            shutil.rmtree(left)
        part_of(folder).mkdir()


def complete_(folder: Path) -> None:
    """Give a complete checkpoint its name. One of the same step makes room."""
    old = folder.with_name(f"{folder.name}.old")
    with writing(folder):
        sync(part_of(folder))
        if folder.exists():
            folder.rename(old)
        part_of(folder).rename(folder)
        sync(folder.parent)
        if old.exists():
            shutil.rmtree(_without_name(old), ignore_errors=True)


def bring_back_(checkpoints: Path) -> None:
    """Give those their names back that made room for others which never came; only who saves may call it."""
    with writing(checkpoints):
        for old in sorted(checkpoints.glob("step-*.old")):
            if (folder := old.with_suffix("")).exists():
                shutil.rmtree(_without_name(old))
            else:
                old.rename(folder)
                sync(checkpoints)


def _without_name(folder: Path) -> Path:
    """Rename a checkpoint that goes, and return its new name: half of one must not look like one."""
    gone = folder.with_suffix(".gone")
    shutil.rmtree(gone, ignore_errors=True)
    return folder.rename(gone)


def newest_good(
    checkpoints: Path,
    steps: Sequence[int],
    use: Callable[[Path], Result],
    tell: Callable[[str], None],
) -> tuple[int, Result] | None:
    """Return the first step, and what ``use`` makes of its checkpoint, where that does not raise Damaged.

    None where there are no steps. Raises UserError where all are damaged.

    Args:
        checkpoints: the folder in which they are.
        steps: of the checkpoints to try, in this order.
        use: is given the folder of a checkpoint.
        tell: is given a line on each broken one that is passed over.
    """
    problems: list[str] = []
    for step in steps:
        try:
            return step, use(folder_of(step, checkpoints))
        except Damaged as damaged:
            problems += damaged.messages
            if step != steps[-1]:
                tell(f"{damaged.messages[0]}: going back to the checkpoint before")
    if problems:
        raise UserError(f"no checkpoint in {checkpoints} can be loaded", *problems[:10])
    return None


def set_aside_(folder: Path) -> Path:
    """Take a broken checkpoint out of the row, and return its new name; it is kept for a look at it."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.broken-{number}")).exists():
        number += 1
    with writing(aside):
        folder.rename(aside)
    return aside


def superfluous(steps: Sequence[int], *, written: int, keep: int, keep_every: int) -> list[int]:
    """Return the steps whose checkpoints go, once that of step ``written`` is complete.

    Args:
        steps: those that are there.
        written: the newest one, which never goes. Later ones are not this run's and are let alone.
        keep: how many of the newest stay, at least 1.
        keep_every: those of every so many steps stay as well; 0 for none.
    """
    earlier = sorted((step for step in steps if step < written), reverse=True)
    return [step for step in earlier[keep - 1 :] if not keep_every or step % keep_every]


def rotate_(checkpoints: Path, *, written: int, keep: int, keep_every: int) -> None:
    """Remove the checkpoints that are superfluous."""
    there = steps_there(checkpoints)
    for step in superfluous(there, written=written, keep=keep, keep_every=keep_every):
        folder = folder_of(step, checkpoints)
        with writing(folder):
            shutil.rmtree(_without_name(folder))
