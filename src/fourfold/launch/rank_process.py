"""The process of a local rank: it runs its target, leaves word of what went wrong, and ends."""

import contextlib
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from fourfold.launch.failure import Failure
from fourfold.launch.job import joined_job
from fourfold.launch.rank import Rank
from fourfold.place import HERE

RESULT = "result.pickle"
JOB = "job.pickle"


def place_of(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says where it is."""
    return folder / f"place-{rank}"


def run_rank(folder_name: str, *, launcher: int) -> None:
    """Run the job of a local rank in this process, and end the process."""
    # [Note: no orphans] A rank whose launcher is gone ends itself, however it went: nobody else would
    # end it, and it would wait in a collective until that times out.
    folder = Path(folder_name)
    threading.Thread(target=_end_with, args=(launcher, folder), daemon=True).start()
    job = joined_job()
    assert job is not None
    HERE.share(place_of(folder, job.rank))
    rank = Rank(job, is_watched=True)
    try:
        target, arguments = pickle.loads((folder / JOB).read_bytes())
        result = target(rank, *arguments)
        if rank.is_first:
            (folder / RESULT).write_bytes(pickle.dumps(result))
        leave_group()
    except BaseException as error:
        failure = Failure.of(error, rank=job.rank)
        with contextlib.suppress(OSError):  # the disk of temporary files can be the full one
            failure.write(folder)
        rank.failed()  # last: what other ranks say of it comes later than the cause
        _end(2 if failure.kind == "user" else 1)
    _end(0)


def leave_group() -> None:
    """Destroy the process group, if there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _end(status: int) -> None:
    """End this process at once: gloo's threads now and then abort an orderly interpreter exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_with(launcher: int, folder: Path) -> None:
    """End this process, what it started, and the launcher's folder, once the launcher is gone."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
