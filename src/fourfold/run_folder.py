"""The run folder: a new one for every run, checked before the run starts."""

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from fourfold.errors import RunStopped, Unreadable, UserError
from fourfold.specs import RunSpec

RUN_FILE = "run.toml"
METRICS = "metrics.jsonl"
LOCK = "lock"


def make_run_folder(wanted: Path, run: RunSpec) -> Path:
    """Make the folder of a run, write its run file there, and return it.

    A folder that another run wrote into is left alone: the new one is then called ``<wanted>-2``, and so on.
    Raises UserError where nothing can be written there.
    """
    number = 1
    folder = wanted
    try:
        while not _taken(folder):
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        write_run_file(folder, run)
    except OSError as error:
        raise UserError(
            f"cannot write into the run folder {folder}: {error.strerror}: use another one with "
            "--set folder=PATH"
        ) from error
    return folder


def write_run_file(folder: Path, run: RunSpec) -> None:
    """Write the run file of a run whose sizes are spelled out, for the folder to stand alone.

    Of a schedule from a file the folder gets a copy, which the run file then names from wherever it is read.
    """
    layout, copy = run.layout, (folder / f"schedule{Path(run.layout.schedule.name).suffix}").absolute()
    if layout.schedule.is_file and "," not in str(copy):  # a comma would end the path in a layout
        with contextlib.suppress(shutil.SameFileError):  # where the run goes on by the file in its folder
            shutil.copyfile(layout.schedule.name, copy)
        layout = replace(layout, options={**layout.options, "pp": str(copy)})
    (folder / RUN_FILE).write_text(run.model_copy(update={"layout": layout}).to_toml())


def resumed_run_folder(wanted: Path, run: RunSpec) -> Path:
    """Return the folder of a run to go on in it; where there is none, or an empty one, it is made.

    The run file in it stays until the run goes on. Raises UserError where something else is in the folder, or
    another run is at work in it.
    """
    if wanted.is_dir() and any(wanted.iterdir()):
        if not (wanted / RUN_FILE).exists():
            raise UserError(
                f"{wanted} is not the folder of a run, for it has no {RUN_FILE}: to resume a run in another "
                "folder use --set folder=PATH"
            )
        if (wanted / LOCK).exists():
            with holding(wanted):
                pass  # it was left by a run that was killed
        return wanted
    return make_run_folder(wanted, run)


def _taken(folder: Path) -> bool:
    """Take the folder for this run if it is new, or empty and nobody else takes it at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        if any(folder.iterdir()):
            return False
    with contextlib.suppress(FileExistsError):
        (folder / METRICS).open("x").close()
        return True
    return False


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder while the context is open, or until this process is gone.

    Raises UserError where another run is at work in it, and says which.
    """
    path = folder / LOCK
    with _locked(path) as file:
        with writing(path):
            file.truncate(0)
            began = time.strftime("%Y-%m-%d %H:%M:%S %Z")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {began}\n")
            file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> TextIO:
    """Return the file, opened and locked. Closing it, or the end of the process, lets go of it."""
    while True:
        with writing(path):
            file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise UserError(
                f"another run is at work in {path.parent}, {holder}: wait for its end or end it, or use "
                "another folder with --set folder=PATH"
            ) from None
        except OSError:
            return file  # a file system without locks: nobody is kept out
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # its last holder removed it just now


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a file of the run into a message that names it.

    Raises RunStopped: the run cannot go on when its results cannot be kept.
    """
    try:
        yield
    except OSError as error:
        raise RunStopped(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn what keeps a file of the run from being read into a message that names it.

    Raises Unreadable. A file that is not there is another matter, and passes.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise
    except OSError as error:
        raise Unreadable(
            f"cannot read {path}: {error.strerror or error}: it may be whole, so nothing was changed: try "
            "again, and if it stays so, move that checkpoint away to go on from the one before"
        ) from error


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
