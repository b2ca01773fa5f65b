"""The process of a local rank: it runs its target, leaves word of what went wrong, and ends."""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from fourfold.launch.failure import Failure
from fourfold.launch.job import joined_job
from fourfold.launch.rank import Rank, leave_group
from fourfold.place import HERE

RESULT = "result.pickle"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""The signals that the launcher passes on to its ranks."""


def place_of(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says where it is."""
    return folder / f"place-{rank}"


def run_rank(
    folder: Path, work: bytes, environment: Mapping[str, str], outputs: Sequence[Connection]
) -> None:
    """Run the work of a local rank in this process, and end the process.

    Args:
        folder: where this rank leaves word.
        work: the target and its arguments, pickled.
        environment: of this rank.
        outputs: the launcher's stdout and stderr.
    """
    os.setsid()
    for output, descriptor in zip(outputs, (1, 2), strict=True):
        os.dup2(output.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    for number in PASSED_ON:  # the server ignored them, see [Note: fork server]
        signal.signal(number, signal.SIG_DFL)
    import torch

    with contextlib.suppress(ValueError, RuntimeError):  # OpenMP says nothing either of what is no number
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # the server was started for fewer or more
    # [Note: no orphans] A rank whose launcher is gone ends itself, however it went: nobody else would
    # end it, and it would wait in a collective until that times out.
    threading.Thread(target=_end_with_launcher, args=(folder,), daemon=True).start()
    job = joined_job()
    assert job is not None
    HERE.share(place_of(folder, job.rank))
    rank = Rank(job, is_watched=True)
    try:
        target, arguments = pickle.loads(work)
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


def _end(status: int) -> None:
    """End this process at once: gloo's threads now and then abort an orderly interpreter exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_with_launcher(folder: Path) -> None:
    """End this process, what it started, and the launcher's folder, once the launcher is gone."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
