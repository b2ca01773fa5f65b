"""Local ranks: started through torch's launcher, watched, and ended together."""

import contextlib
import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fourfold.errors import RunStopped, UserError
from fourfold.launch.failure import Failure, collect, root_cause
from fourfold.launch.job import JobEnvironment, joined_job
from fourfold.launch.rank import Rank, read_step

# Ranks of a layout on trial may wait for each other on few cores; with more, a step takes for ever.
RANKS_PER_CORE = 8
# How long a rank that lost another one waits before it ends, so that the launcher sees the cause first.
_CAUSE_FIRST_SECONDS = 1.0
# The launcher kills a rank that ignored its SIGTERM this much later at the earliest: not a cause.
_CAUSES_WITHIN_SECONDS = 5


def launch(world_size: int, target: Callable[..., Any], arguments: Sequence[Any] = ()) -> Any:
    """Run ``target(rank, *arguments)`` on all ranks and return what it returned on rank 0.

    Under torchrun or Slurm this process is one of the ranks, and None is returned on the others. Without
    them, one rank runs in this process and more are started on this machine. Where this process is one of
    several ranks, whatever the target raises becomes a UserError or RunStopped with one message.
    """
    job = joined_job()
    if job is None and world_size > 1:
        return run_on_local_ranks(world_size, target, arguments)
    if job is None:
        return target(Rank(JobEnvironment.alone()), *arguments)
    # A process that waits inside a collective never sees Python's KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank = Rank(job)
    try:
        result = target(rank, *arguments)
    except Exception as error:
        failure = Failure.of(error, rank=job.rank, step=rank.step)
        rank.failed()
        raise failure.exception() from None
    _leave_group()
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


def run_on_local_ranks(world_size: int, target: Callable[..., Any], arguments: Sequence[Any] = ()) -> Any:
    """Run ``target(rank, *arguments)`` on new local ranks and return what it returned on rank 0.

    The target is a function of a module; arguments and result are pickled. When one rank fails, all end,
    and what is raised has the message of the cause: the rank's own UserError, or RunStopped. Raises
    KeyboardInterrupt on Ctrl-C, with all ranks ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import DefaultLogsSpecs, LaunchConfig, elastic_launch

    folder = Path(tempfile.mkdtemp(prefix="fourfold-"))
    try:
        script = _write_job(folder, target, arguments)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torch")),
        )
        with _quiet_launcher(), _environment_of_ranks(world_size):
            elastic_launch(config, sys.executable)(str(script))
        return pickle.loads((folder / "result.pickle").read_bytes())
    except ChildFailedError as error:
        first = min(failure.timestamp for failure in error.failures.values())
        statuses = {
            rank: failure.exitcode
            for rank, failure in error.failures.items()
            if failure.timestamp - first <= _CAUSES_WITHIN_SECONDS
        }
        steps = {rank: read_step(folder / f"step-{rank}") for rank in statuses}
        raise root_cause(collect(folder, statuses, steps)).exception() from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RunStopped(f"stopped by {error.sigval.name}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_job(folder: Path, target: Callable[..., Any], arguments: Sequence[Any]) -> Path:
    """Write what a rank runs and return the script that runs it."""
    assert target.__module__ != "__main__", "a rank imports its target from a module"
    (folder / "job.pickle").write_bytes(pickle.dumps((target, tuple(arguments))))
    script = folder / "rank.py"
    # The ranks find their modules where this process does, whatever folder they are started in.
    script.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        f"sys.path[:] = {[entry or os.getcwd() for entry in sys.path]!r}\n"
        "from fourfold.launch.local import run_rank\n"
        f"run_rank({str(folder)!r}, launcher={os.getpid()})\n"
    )
    return script


def run_rank(folder_name: str, *, launcher: int) -> None:
    """Run the job of a local rank in this process, and end the process."""
    # [Note: no orphans] A rank whose launcher is gone ends itself, however it went: nobody else would
    # end it, and it would wait in a collective until that times out.
    folder = Path(folder_name)
    threading.Thread(target=_end_with, args=(launcher, folder), daemon=True).start()
    job = joined_job()
    assert job is not None
    rank = Rank(job, folder / f"step-{job.rank}")
    try:
        target, arguments = pickle.loads((folder / "job.pickle").read_bytes())
        result = target(rank, *arguments)
        if rank.is_first:
            (folder / "result.pickle").write_bytes(pickle.dumps(result))
        _leave_group()
    except BaseException as error:
        failure = Failure.of(error, rank=job.rank, step=rank.step)
        with contextlib.suppress(OSError):  # the disk of temporary files can be the full one
            failure.write(folder)
        rank.failed()  # last: what other ranks say of it comes later than the cause
        if failure.kind == "lost":
            time.sleep(_CAUSE_FIRST_SECONDS)
        _end(2 if failure.kind == "user" else 1)
    _end(0)


def _end(status: int) -> None:
    """End this process at once: gloo's threads now and then abort an orderly interpreter exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _leave_group() -> None:
    """Destroy the process group, if there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _end_with(launcher: int, folder: Path) -> None:
    """End this process, what it started, and the launcher's folder, once the launcher is gone."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _environment_of_ranks(world_size: int) -> Iterator[None]:
    """Set what the ranks inherit: their share of the cores, the loopback interface, quiet C++ logs.

    torch takes its number of threads from OMP_NUM_THREADS; what the user set stays.
    """
    values = {"OMP_NUM_THREADS": str(max(1, cores() // world_size)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if "lo" in (name for _, name in socket.if_nameindex()):
        values["GLOO_SOCKET_IFNAME"] = "lo"
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep torch's launcher from logging, and give back the signal handlers that it replaces."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()
    propagates = logger.propagate
    handlers = {number: signal.getsignal(number) for number in _LAUNCHER_SIGNALS}
    logger.addHandler(silence)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagates
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


_LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
