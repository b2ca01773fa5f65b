"""The processes of local ranks: forks of one that has imported torch."""

import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from fourfold.errors import RunStopped
from fourfold.launch.failure import Failure, collect, root_cause
from fourfold.launch.local import cores
from fourfold.launch.rank_process import PASSED_ON, place_of, run_rank
from fourfold.launch.watch import Watch
from fourfold.stop import handling

POLL_SECONDS = 0.05
# How long the other ranks get to say what they saw, once one has failed.
WORD_SECONDS = 1.0
# How long the cause is waited for, where all that is known follows from another rank's end.
CAUSE_SECONDS = 10.0
# The fork server has a socket in a folder of temporary files, and the name of a socket has at most 107 bytes.
LONGEST_FOLDER = 60
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# [Note: fork server] Ranks are forks of one process that has imported torch, which takes seconds of a core a
# process, and so a start on few cores takes half as long, and the next one (after a failure) almost nothing.
# It is Python's own fork server: a process that does nothing else, has one thread, and has not touched a
# GPU, so that its forks may. A signal to all processes of a job must not end it, since ranks that save what
# they have would be taken for dead: it ignores what `passed_on` has, and a rank no longer does.
def start_server(module: str, world_size: int) -> None:
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


class Processes:
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

    def __enter__(self) -> "Processes":
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
def passed_on() -> Iterator[list[signal.Signals]]:
    """Yield a list that gets the signals that this process gets, in order, while the context is open."""
    received: list[signal.Signals] = []
    with handling(PASSED_ON, lambda number, _: received.append(signal.Signals(number))):
        yield received


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
