"""Meeting the other ranks: what goes wrong has one message."""

import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import fourfold
from fourfold.errors import RunStopped, UserError
from fourfold.launch import connect as meeting
from fourfold.launch.connect import FAILED, agree, connect, wait_for
from fourfold.launch.job import JobEnvironment


def job(rank: int, *, host: str = "localhost", port: int, world_size: int = 2) -> JobEnvironment:
    return JobEnvironment(rank, world_size, rank, world_size, 0, host, port)


@pytest.fixture
def taken_port():
    with socket.create_server(("localhost", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def meet(job: JobEnvironment, seconds: float = 0.3) -> None:
    connect(job, device_type="cpu", agree_on={}, timeout_seconds=5, meeting_seconds=seconds)


def test_a_port_in_use(taken_port: int):
    with pytest.raises(UserError, match=f"port {taken_port} on localhost is in use: .*MASTER_PORT"):
        meet(job(0, port=taken_port))


def test_a_port_at_which_something_else_answers(taken_port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fourfold.launch.connect.ANSWER_SECONDS", 0.5)
    with pytest.raises(
        UserError, match=f"something else than rank 0 of this job answers at localhost:{taken_port}"
    ):
        meet(job(1, port=taken_port))


def test_a_rank_0_that_is_not_there(free_port: int):
    with pytest.raises(UserError, match=f"rank 0 cannot be reached at localhost:{free_port}"):
        meet(job(1, port=free_port))


def test_an_unknown_host(free_port: int):
    with pytest.raises(UserError, match=r"MASTER_ADDR=no-such-host.invalid is not a known host"):
        meet(job(1, host="no-such-host.invalid", port=free_port))


def test_ranks_that_do_not_come(free_port: int):
    with pytest.raises(UserError, match=r"2 of 3 ranks did not come within 0 s \(ranks 1, 2\)"):
        meet(job(0, port=free_port, world_size=3))


def test_a_gpu_for_each_local_rank(free_port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="local rank 1 has no GPU: this machine has 1"):
        connect(job(1, port=free_port), device_type="cuda", agree_on={}, timeout_seconds=5)


@pytest.mark.parametrize(
    ("item", "on_1"),
    [("model.hidden_size", 65), ("version of torch", "2.11.0"), ("version of fourfold", "0.0.1")],
)
def test_every_rank_hears_what_differs(item: str, on_1: object):
    """Seen in horovod/horovod#2640: ranks that run different configurations hang."""
    store = dist.HashStore()
    items = {
        "model.hidden_size": 64,
        "version of torch": torch.__version__,
        "version of fourfold": fourfold.__version__,
    }
    heard: dict[int, tuple[str, ...]] = {}

    def one_rank(rank: int) -> None:
        try:
            agree(store, job(rank, port=0), {**items, item: on_1} if rank == 1 else items, seconds=5)
        except UserError as error:
            heard[rank] = error.messages

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(2)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    message = f"ranks differ in {item}: {on_1} on rank 1, {items[item]} on rank 0: give all ranks the same"
    assert heard == {0: (message,), 1: (message,)}
    assert time.monotonic() - started < 5


def test_who_waits_says_for_what(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(meeting, "MESSAGE_SECONDS", 0.2)
    store = dist.HashStore()
    with pytest.raises(RunStopped, match="waited 0 s for rank 0, which is preparing the data: end all ranks"):
        wait_for(store, "key", seconds=0.5, what="rank 0, which is preparing the data", aloud=True)
    assert set(capfd.readouterr().err.splitlines()) == {"waited 0 s for rank 0, which is preparing the data"}
    store.set("key", "done")
    assert wait_for(store, "key", seconds=0.5, aloud=True) == b"done"
    assert capfd.readouterr().err == ""


def test_a_rank_that_failed_ends_the_wait():
    store = dist.HashStore()
    store.set(FAILED, "3")
    with pytest.raises(RunStopped, match="rank 3 failed"):
        wait_for(store, "key", seconds=60)
