"""Local ranks: started, watched, and ended together."""

import contextlib
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from fourfold.errors import RunStopped, UserError
from fourfold.launch.failure import Failure, collect, root_cause
from fourfold.launch.job import JobEnvironment, joined_job
from fourfold.launch.rank import DEFAULT_TIMEOUT_SECONDS, Rank
from fourfold.launch.rank_process import PASSED_ON, RESULT, leave_group, place_of, run_rank
from fourfold.launch.watch import Watch
from fourfold.stop import handling

# Ranks of a layout on trial may wait for each other on few cores; with more, a step takes for ever.
RANKS_PER_CORE = 8
POLL_SECONDS = 0.05
# How long the other ranks get to say what they saw, once one has failed.
WORD_SECONDS = 1.0
# How long the cause is waited for, where all that is known follows from another rank's end.
CAUSE_SECONDS = 10.0
# The fork server has a socket in a folder of temporary files, and the name of a socket has at most 107 bytes.
LONGEST_FOLDER = 60
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
        timeout_seconds: local ranks of which none moves for so long are ended; see `Watch`.
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
        rank.failed()
        raise failure.exception() from None
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
    assert target.__module__ != "__main__", "a rank imports its target from a module"
    _start_server(target.__module__, world_size)
    from torch.distributed import TCPStore  # while the server imports it, too

    folder = Path(tempfile.mkdtemp(prefix="fourfold-"))
    try:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        work = pickle.dumps((target, tuple(arguments)))
        with _signals() as received, _Ranks(folder, work, world_size, store.port) as ranks:
            ranks.wait(received, Watch(ranks.places, ranks.pids, timeout_seconds=timeout_seconds))
        return pickle.loads((folder / RESULT).read_bytes())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# [Note: fork server] Ranks are forks of one process that has imported torch, which takes seconds of a core a
# process, and so a start on few cores takes half as long, and the next one (after a failure) almost nothing.
# It is Python's own fork server: a process that does nothing else, has one thread, and has not touched a
# GPU, so that its forks may. A signal to all processes of a job must not end it, since ranks that save what
# they have would be taken for dead: it ignores what `_signals` passes on, and a rank no longer does.
def _start_server(module: str, world_size: int) -> None:
    """Start the process that ranks are forks of, unless it runs: it imports what they will need."""
    # torch's optimizers import torch._dynamo at their first step.
    get_context("forkserver").set_forkserver_preload(["torch", "torch._dynamo", module])
    before, folder = dict(os.environ), tempfile.gettempdir()
    # NVML counts GPUs without the driver's initialization, which would not survive the fork.
    os.environ.update({**_defaults(world_size), "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **before})
    try:
        if len(folder) > LONGEST_FOLDER:
            tempfile.tempdir = "/tmp"
        with handling(PASSED_ON, signal.SIG_IGN):
            forkserver.ensure_running()
    finally:
        tempfile.tempdir = folder
        os.environ.clear()
        os.environ.update(before)


class _Ranks:
    """The processes of the ranks, each in a session of its own; a context manager that leaves none.

    Args:
        folder: where they leave word.
        work: what they run, pickled.
        world_size: how many they are.
        port: of the store.
    """

    def __init__(self, folder: Path, work: bytes, world_size: int, port: int):
        self._folder = folder
        self.places = [place_of(folder, rank) for rank in range(world_size)]
        # As connections, since those can be handed over.
        outputs = [Connection(os.dup(descriptor), readable=False) for descriptor in (1, 2)]
        self._processes = [
            get_context("forkserver").Process(
                target=run_rank, args=(folder, work, _environment_of(rank, world_size, port), outputs)
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> "_Ranks":
        try:
            for process in self._processes:
                process.start()
        except BaseException:
            self.__exit__()
            raise
        self.pids = [_pid(process) for process in self._processes]
        return self

    def __exit__(self, *_: object) -> None:
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            # What a rank started is in its group, and may outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(_pid(process), signal.SIGKILL)
            process.kill()  # it has no group of its own in its first moment
        for process in started:
            process.join()

    def wait(self, received: list[signal.Signals], watch: Watch) -> None:
        """Wait until all ranks have ended well. Raises what is wrong where they do not."""
        passed_on = 0
        while True:
            statuses = self._statuses()
            if any(statuses.values()):
                failure = self._cause()
                if failure.kind == "signal" and failure.messages[0] in {_forwarded(n).name for n in received}:
                    _raise_ended(received[0])
                raise failure.exception()
            if len(statuses) == len(self.pids):
                return
            for number in received[passed_on:]:
                if number in ENDING_SIGNALS and any(n in ENDING_SIGNALS for n in received[:passed_on]):
                    _raise_ended(number)
                for pid in self.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, _forwarded(number))
                passed_on += 1
            watch.look()
            time.sleep(POLL_SECONDS)

    def _statuses(self) -> dict[int, int]:
        """Return the exit statuses of the ranks that have ended."""
        found = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        return {rank: status for rank, status in found.items() if status is not None}

    def _cause(self) -> Failure:
        """Return the failure that the others follow from, once it is likely to be known.

        A rank that lost another one may have ended before that one has: it took longer to be cleared away.
        """
        began = time.monotonic()
        while True:
            statuses = self._statuses()
            cause = root_cause(collect(self._folder, statuses, self.places))
            seconds = time.monotonic() - began
            limit = CAUSE_SECONDS if cause.is_consequence else WORD_SECONDS
            if len(statuses) == len(self.pids) or seconds > limit:
                return cause
            time.sleep(POLL_SECONDS)


def _pid(process: BaseProcess) -> int:
    """Return the number of a process that was started."""
    assert process.pid is not None
    return process.pid


def _forwarded(number: signal.Signals) -> signal.Signals:
    """Return the signal that ranks get for one that the launcher got."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _raise_ended(number: signal.Signals) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise RunStopped(f"stopped by {number.name}")


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Yield a list that gets the signals that this process gets, in order, while the context is open."""
    received: list[signal.Signals] = []
    with handling(PASSED_ON, lambda number, _: received.append(signal.Signals(number))):
        yield received


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _defaults(world_size: int) -> dict[str, str]:
    """Return what the environment of a rank has where the user set nothing: its share of the cores, the
    loopback interface, quiet C++ logs.
    """
    values = {"OMP_NUM_THREADS": str(max(1, cores() // world_size)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if "lo" in (name for _, name in socket.if_nameindex()):
        values["GLOO_SOCKET_IFNAME"] = "lo"
    return values


def _environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank, with its place among the ranks in the words of torchrun."""
    job = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {**_defaults(world_size), **os.environ, **{name: str(value) for name, value in job.items()}}
