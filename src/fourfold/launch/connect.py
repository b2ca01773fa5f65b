"""Meeting the other ranks: the store, the agreement on what is run, the process group."""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from platform import python_version

import torch
import torch.distributed as dist

import fourfold
from fourfold.errors import RunStopped, UserError
from fourfold.launch.job import JobEnvironment
from fourfold.launch.within import within

# How long ranks may take to appear: nodes of one job start minutes apart.
MEETING_SECONDS = 300.0
# How long ranks wait for one that works for all of them, on a task that may be long.
TASK_SECONDS = 24 * 3600.0
# Who waits says so this often.
MESSAGE_SECONDS = 30.0
# A rank that fails says so under this key.
FAILED = "failed"
# How long a store may take to answer once its port does. Something else listens there after that.
ANSWER_SECONDS = 20.0


def connect(
    job: JobEnvironment,
    *,
    device_type: str,
    agree_on: Mapping[str, object],
    timeout_seconds: float,
    meeting_seconds: float = MEETING_SECONDS,
) -> dist.Store:
    """Make the default process group of a job, once all ranks agree on what they are about to run.

    The backend is gloo on CPU; on CUDA, NCCL for CUDA tensors and gloo for CPU tensors, with the device
    of the local rank. ``timeout_seconds`` holds for every collective.

    Raises UserError where the port is taken, rank 0 cannot be reached, ranks do not come, there are fewer
    GPUs than local ranks, or the ranks differ in an item of ``agree_on``, in fourfold, Python or torch.
    """
    device = _device(job, device_type)
    store = dist.PrefixStore(_prefix(), _store(job, meeting_seconds))
    agree(store, job, {**agree_on, **versions()}, seconds=meeting_seconds)
    job.export()
    dist.init_process_group(
        backend="gloo" if device is None else "cpu:gloo,cuda:nccl",
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device,
    )
    # One that ends while others still connect would break their connections: nobody goes on before all are.
    if store.add("connected", 1) == job.world_size:
        store.set("all are connected", "")
    wait_for(store, "all are connected", seconds=timeout_seconds, what="all ranks to connect")
    return store


def another_client(job: JobEnvironment) -> dist.Store:
    """Return a client of a job's store for another thread, once the ranks are connected."""
    return dist.PrefixStore(_prefix(), _tcp_store(job, is_master=False, seconds=MEETING_SECONDS))


def _prefix() -> str:
    """Return what keeps the keys of one start of the ranks from those of the next."""
    return f"fourfold/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def versions() -> dict[str, object]:
    """Return what must be the same on all ranks whatever they run."""
    return {
        "version of fourfold": fourfold.__version__,
        "version of torch": torch.__version__,
        "version of Python": python_version().rpartition(".")[0],
    }


def agree(
    store: dist.Store,
    job: JobEnvironment,
    items: Mapping[str, object],
    *,
    seconds: float,
    name: str = "what is run",
) -> None:
    """Compare the items of all ranks with those of rank 0. Each agreement has a name of its own.

    Raises UserError on all ranks, naming each differing item with a rank that has it, and where a rank
    does not come in time. Seen in horovod#2640: ranks with different configurations hang.
    """
    # [Note: agreement] No collective is needed, so this works before any group exists. The items of rank 0
    # travel to every rank, which compares them with its own and answers with the lines that differ: on
    # agreement an empty list. Rank 0 puts the answers together, so that all ranks say the same.
    mine = {name: str(value) for name, value in items.items()}
    if job.rank == 0:
        store.set(f"{name}/items", json.dumps(mine))
        store.set(f"{name}/verdict", json.dumps(_all_verdicts(store, job, seconds, name)))
    else:
        reference = json.loads(wait_for(store, f"{name}/items", seconds=seconds))
        store.set(f"{name}/verdict/{job.rank}", json.dumps(_differences(reference, mine, job.rank)))
    # Rank 0 may have started to wait for the others only now.
    problems = json.loads(wait_for(store, f"{name}/verdict", seconds=2 * seconds))
    if problems:
        raise UserError(*problems)


def _all_verdicts(store: dist.Store, job: JobEnvironment, seconds: float, name: str) -> list[str]:
    """Return what is wrong according to any rank. Only rank 0 asks."""
    keys = {rank: f"{name}/verdict/{rank}" for rank in range(1, job.world_size)}
    verdicts: list[str] = []
    deadline = time.monotonic() + seconds
    for rank, key in keys.items():
        try:
            left = max(deadline - time.monotonic(), 0.0)
            what = f"rank {rank} of {job.world_size}"
            verdicts += json.loads(wait_for(store, key, seconds=left, what=what, aloud=True))
        except WaitedTooLong:
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            return [
                f"{len(missing)} of {job.world_size} ranks did not come within {seconds:.0f} s "
                f"(ranks {shown}): start one process a rank (under Slurm: with srun), all with the same "
                "MASTER_ADDR and MASTER_PORT"
            ]
    return verdicts[:10]


def _differences(reference: dict[str, str], mine: dict[str, str], rank: int) -> list[str]:
    """Return a line for each item in which this rank differs from rank 0."""
    lines = []
    for name in sorted({*reference, *mine}):
        theirs, ours = reference.get(name, "absent"), mine.get(name, "absent")
        if theirs != ours:
            lines.append(
                f"ranks differ in {name}: {ours} on rank {rank}, {theirs} on rank 0: give all ranks the same"
            )
    return lines


class WaitedTooLong(RunStopped):
    """Another rank did not do its part in time."""


def wait_for(
    store: dist.Store, key: str, *, seconds: float, what: str = "another rank", aloud: bool = False
) -> bytes:
    """Return the value of a key once another rank has set it.

    ``what`` is waited for; ``aloud`` says so on stderr every ``MESSAGE_SECONDS``. Raises WaitedTooLong
    after ``seconds``, and RunStopped when a rank failed or the store, and so rank 0, went away.
    """
    began = said = time.monotonic()
    try:
        while not store.check([key]):
            # A rank that failed may have set the key before, between these questions: all hear what it said.
            if store.check([FAILED]) and not store.check([key]):
                raise RunStopped(f"rank {store.get(FAILED).decode()} failed")
            now = time.monotonic()
            if now - began > seconds:
                raise WaitedTooLong(f"waited {seconds:.0f} s for {what}: end all ranks and start them again")
            if aloud and now - said >= MESSAGE_SECONDS:
                print(f"waited {now - began:.0f} s for {what}", file=sys.stderr, flush=True)
                said = now
            # Many ranks may ask one store for hours: who waits long asks seldom.
            time.sleep(min(0.01 + (now - began) / 20, 0.5))
        return store.get(key)
    except dist.DistError as error:
        raise RunStopped("rank 0 went away") from error


def _device(job: JobEnvironment, device_type: str) -> torch.device | None:
    """Return this rank's GPU and make it the current one; None on CPU."""
    if device_type != "cuda":
        return None
    if job.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {job.local_rank} has no GPU: this machine has {torch.cuda.device_count()}, and each "
            f"rank needs its own: use at most {torch.cuda.device_count()} ranks on a machine"
        )
    device = torch.device("cuda", job.local_rank)
    torch.cuda.set_device(device)
    return device


def _store(job: JobEnvironment, seconds: float) -> dist.TCPStore:
    """Return the store at which the ranks meet. Rank 0 serves it unless the launcher does."""
    host, port = job.master_address, job.master_port
    if job.rank == 0 and not job.store_is_served:
        try:
            return _tcp_store(job, is_master=True, seconds=seconds)
        except (dist.DistError, RuntimeError) as error:
            reason = "is in use" if "EADDRINUSE" in str(error) else "cannot be opened"
            raise UserError(
                f"port {port} on {host} {reason}: rank 0 needs it to meet the other ranks; set MASTER_PORT "
                "to a free port, the same on all ranks"
            ) from error
    _wait_for_port(host, port, seconds)
    # The constructor waits without limit for a server that accepts and then says nothing.
    try:
        return within(ANSWER_SECONDS, lambda: _tcp_store(job, is_master=False, seconds=seconds))
    except (dist.DistError, RuntimeError, TimeoutError) as error:
        raise UserError(
            f"something else than rank 0 of this job answers at {host}:{port}: set MASTER_PORT to a free "
            "port, the same on all ranks"
        ) from error


def _tcp_store(job: JobEnvironment, *, is_master: bool, seconds: float) -> dist.TCPStore:
    """Return a store at the job's address, without waiting for the other ranks."""
    return dist.TCPStore(
        job.master_address,
        job.master_port,
        job.world_size,
        is_master=is_master,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


def _wait_for_port(host: str, port: int, seconds: float) -> None:
    """Wait until something listens at the address. Raises UserError where nothing does in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except socket.gaierror as error:
            raise UserError(
                f"MASTER_ADDR={host} is not a known host: set it to the address of rank 0's machine"
            ) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank 0 cannot be reached at {host}:{port} for {seconds:.0f} s "
                    f"({error.strerror or error}): check that rank 0 runs, and that MASTER_ADDR and "
                    "MASTER_PORT are right and not blocked"
                ) from error
        time.sleep(0.1)
