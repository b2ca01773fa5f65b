"""Local ranks: started, watched, and ended together."""

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fourfold.errors import RunStopped, UserError
from fourfold.launch.failure import Failure, collect, root_cause
from fourfold.launch.job import JobEnvironment, joined_job
from fourfold.launch.rank import DEFAULT_TIMEOUT_SECONDS, Rank
from fourfold.launch.rank_process import JOB, RESULT, leave_group, place_of
from fourfold.launch.watch import Watch
from fourfold.stop import handling

# Ranks of a layout on trial may wait for each other on few cores; with more, a step takes for ever.
RANKS_PER_CORE = 8
POLL_SECONDS = 0.05
# How long the other ranks get to say what they saw, once one has failed.
WORD_SECONDS = 1.0
# How long the cause is waited for, where all that is known follows from another rank's end.
CAUSE_SECONDS = 10.0
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
    from torch.distributed import TCPStore

    folder = Path(tempfile.mkdtemp(prefix="fourfold-"))
    try:
        script = _write_job(folder, target, arguments)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        with _Ranks(folder, script, world_size, store.port) as ranks, _signals() as received:
            ranks.wait(received, Watch(ranks.places, ranks.pids, timeout_seconds=timeout_seconds))
        return pickle.loads((folder / RESULT).read_bytes())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Ranks:
    """The processes of the ranks, each in a session of its own; a context manager that leaves none.

    Args:
        folder: where they leave word.
        script: what they run.
        world_size: how many they are.
        port: of the store.
    """

    def __init__(self, folder: Path, script: Path, world_size: int, port: int):
        self._folder = folder
        self.places = [place_of(folder, rank) for rank in range(world_size)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env=_environment_of(rank, world_size, port),
                start_new_session=True,
            )
            for rank in range(world_size)
        ]
        self.pids = [process.pid for process in self._processes]

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            # What a rank started is in its group, and may outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

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
        found = {rank: process.poll() for rank, process in enumerate(self._processes)}
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
    with handling(
        (*ENDING_SIGNALS, signal.SIGUSR1), lambda number, _: received.append(signal.Signals(number))
    ):
        yield received


def _write_job(folder: Path, target: Callable[..., Any], arguments: Sequence[Any]) -> Path:
    """Write what a rank runs and return the script that runs it."""
    assert target.__module__ != "__main__", "a rank imports its target from a module"
    (folder / JOB).write_bytes(pickle.dumps((target, tuple(arguments))))
    script = folder / "rank.py"
    # The ranks find their modules where this process does, whatever folder they are started in.
    script.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        f"sys.path[:] = {[entry or os.getcwd() for entry in sys.path]!r}\n"
        "from fourfold.launch.rank_process import run_rank\n"
        f"run_rank({str(folder)!r}, launcher={os.getpid()})\n"
    )
    return script


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank: its place among the ranks, in the words of torchrun, its share of the
    cores, the loopback interface, quiet C++ logs.

    torch takes its number of threads from OMP_NUM_THREADS; what the user set stays.
    """
    values = {"OMP_NUM_THREADS": str(max(1, cores() // world_size)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if "lo" in (name for _, name in socket.if_nameindex()):
        values["GLOO_SOCKET_IFNAME"] = "lo"
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
    return {**values, **os.environ, **{name: str(value) for name, value in job.items()}}
