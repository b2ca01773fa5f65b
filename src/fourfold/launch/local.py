"""Local ranks: started, watched, and ended together."""

import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.launch.failure import Failure
from fourfold.launch.job import JobEnvironment, joined_job
from fourfold.launch.rank import DEFAULT_TIMEOUT_SECONDS, Rank, leave_group
from fourfold.launch.watch import Watch
from fourfold.stop import handling

# Ranks of a layout on trial may wait for each other on few cores; with more, a step takes for ever.
RANKS_PER_CORE = 8


def launch(
    world_size: int,
    target: Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Any:
    """Run ``target(rank, *arguments)`` on all ranks and return what it returned on rank 0.

    Under torchrun or Slurm this process is one of the ranks, and None is returned on the others. Without
    them, one rank runs in this process and more are started on this machine. Where this process is one of
    several ranks, whatever the target raises becomes a UserError or RunStopped with one message.

    Args:
        world_size: how many ranks there are.
        target: what a rank runs.
        arguments: for it.
        timeout_seconds: local ranks of which none moves for so long are ended; see `Watch`. Nobody watches
            the one that runs in this process.
    """
    job = joined_job()
    if job is None and world_size > 1:
        return run_on_local_ranks(world_size, target, arguments, timeout_seconds=timeout_seconds)
    if job is None:
        return target(Rank(JobEnvironment.alone()), *arguments)
    # A process that waits inside a collective never sees Python's KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank = Rank(job)
    try:
        result = target(rank, *arguments)
    except Exception as error:
        failure = Failure.of(error, rank=job.rank)
        # What started the job may end the other ranks at once, where one is gone; the word comes first.
        with handling([signal.SIGTERM], signal.SIG_IGN):
            cause = rank.cause_of_loss() if failure.kind == "lost" else ""
            rank.failed("" if failure.kind == "lost" else failure.word())
        raise failure.exception(cause) from None
    leave_group()
    return result if rank.is_first else None


def check_local_ranks(world_size: int) -> None:
    """Raise UserError where so many ranks are more than the cores of this machine can serve."""
    most = RANKS_PER_CORE * cores()
    if world_size > most:
        raise UserError(
            f"{world_size} ranks on this machine are more than {RANKS_PER_CORE} for each of its {cores()} "
            f"cores: use a layout of at most {most} ranks, or start the ranks on more machines with torchrun "
            "or srun"
        )


def run_on_local_ranks(
    world_size: int,
    target: Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Any:
    """Run ``target(rank, *arguments)`` on new local ranks and return what it returned on rank 0.

    The target is a function of a module; arguments and result are pickled. When one rank fails, or none
    moves for ``timeout_seconds``, all end, and what is raised has the message of the cause: the rank's own
    UserError, or RunStopped. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on to the ranks, which may save
    what they have; where they do not, or at the second one, all end. Raises KeyboardInterrupt for Ctrl-C.
    """
    from fourfold.launch.processes import Processes, passed_on, start_server
    from fourfold.launch.rank_process import RESULT

    assert target.__module__ != "__main__", "a rank imports its target from a module"
    start_server(target.__module__, world_size)
    from torch.distributed import TCPStore  # while the server imports it, too

    folder = Path(tempfile.mkdtemp(prefix="fourfold-"))
    try:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        work = pickle.dumps((target, tuple(arguments)))
        with passed_on() as received, Processes(folder, work, world_size, store.port) as ranks:
            ranks.wait(received, Watch(ranks.places, ranks.pids, timeout_seconds=timeout_seconds))
        return pickle.loads((folder / RESULT).read_bytes())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
