"""Real local ranks: what they return, and how they end together when one of them fails."""

import getpass
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourfold.errors import OutputClosed, RankFailed, RunStopped, UserError
from fourfold.launch import Rank, check_local_ranks, launch, run_on_local_ranks
from fourfold.launch.local import cores
from fourfold.place import HERE, encoded

pytestmark = pytest.mark.usefixtures("warm")
SECONDS_TO_END = 30.0
MESSAGE = r"waited (\d+) s for the first rank of node 0, which is preparing the data"


def connect(rank: Rank, **agree_on: object) -> None:
    rank.connect(device_type="cpu", agree_on=agree_on, timeout_seconds=60)


def add_up_ranks(rank: Rank, offset: int, folder: str) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    connect(rank)
    rank.once_per_node("making a file", lambda: Path(folder, str(rank.job.rank)).touch())
    assert os.listdir(folder) == ["0"], "the data was there before any rank went on"
    total = torch.tensor([rank.job.rank + offset])
    dist.all_reduce(total)
    return int(total), torch.get_num_threads()


def rank_1_fails(rank: Rank, kind: str) -> None:
    HERE.begin("in step 36")
    HERE.act(encoded("2B0"))
    if rank.job.rank != 1:
        time.sleep(600)
    if kind == "user":
        raise UserError("tp=3 does not divide 8", "batch=9 is odd")
    if kind == "bug":
        raise ZeroDivisionError("by hand")
    os._exit(7)


def rank_1_is_killed_in_a_collective(rank: Rank) -> None:
    import torch
    import torch.distributed as dist

    connect(rank)
    HERE.begin("in step 36")
    HERE.act(encoded("2B0"))
    if rank.job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def train_with_too_little_on_rank_1(rank: Rank) -> None:
    """The logits take 64 MiB, and rank 1 gets 16 MiB once the model is there."""
    from fourfold.data import SyntheticDataset
    from fourfold.mesh import Mesh
    from fourfold.specs import ModelSpec, RunSpec
    from fourfold.training import train

    def limit(*_: object) -> None:
        if rank.job.rank == 1:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size + 2**24, resource.RLIM_INFINITY))

    connect(rank)
    values = {
        "layout": "dp2",
        "model": {"preset": "tiny"},
        "data": {"sequence_length": 256},
        "training": {"steps": 1, "batch": 4},
        "optimizer": {"learning_rate": 1e-3},
    }
    run, model = RunSpec.model_validate(values), ModelSpec.preset("tiny").replace({"vocab_size": 2**15})
    data = SyntheticDataset(model.vocab_size, 256, seed=0)
    mesh = Mesh(run.layout)
    train(run, model, mesh, train_data=data, eval_data=data, on_report=print, on_start=limit)


def differ(rank: Rank) -> None:
    connect(rank, **{"model.hidden_size": 64 + (rank.job.rank == 1), "training.steps": 5})


def wait_for_ever(rank: Rank, folder: str) -> None:
    import torch
    import torch.distributed as dist

    connect(rank)
    Path(folder, str(os.getpid())).touch()
    if rank.is_first:
        time.sleep(600)
    dist.all_reduce(torch.zeros(1))


def test_ranks_share_the_cores_and_the_result_is_that_of_rank_0(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    handler = signal.getsignal(signal.SIGTERM)
    total, threads = run_on_local_ranks(2, add_up_ranks, (10, str(tmp_path)))
    assert total == 21
    assert threads == int(os.environ.get("OMP_NUM_THREADS", max(1, cores() // 2)))
    assert signal.getsignal(signal.SIGTERM) is handler
    assert capfd.readouterr() == ("", "")


def test_one_rank_runs_in_this_process():
    assert launch(1, add_up_nothing, (3,)) == (os.getpid(), 3)


def prepare_longer_than_a_collective_may_take(rank: Rank) -> int:
    import torch
    import torch.distributed as dist

    from fourfold.launch import connect as meeting
    from fourfold.launch import rank as ranks

    meeting.MESSAGE_SECONDS = 2.5
    ranks.WATCHDOG_FIRST_SECONDS = 0.0
    rank.connect(device_type="cpu", agree_on={}, timeout_seconds=3)
    rank.once_per_node("preparing the data", lambda: time.sleep(6))
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def test_preparation_may_take_longer_than_a_collective(capfd: pytest.CaptureFixture[str]):
    """Seen in huggingface/accelerate#2528: the other ranks waited in a collective and timed out."""
    # RUN-02
    assert run_on_local_ranks(3, prepare_longer_than_a_collective_may_take) == 3
    seconds = re.findall(MESSAGE, capfd.readouterr().err)  # who came first may have waited for the others
    assert 1 <= len(seconds) == len(set(seconds)) <= 2, "one rank alone says it"


def one_fails_while_the_others_wait(rank: Rank) -> None:
    def fail() -> None:
        raise UserError("the corpus is empty")

    connect(rank)
    rank.once_per_node("preparing the data", fail)


def test_a_failed_preparation_is_the_message(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(UserError) as caught:
        run_on_local_ranks(3, one_fails_while_the_others_wait)
    assert caught.value.messages == ("the corpus is empty",)
    assert capfd.readouterr() == ("", "")


def differ_later(rank: Rank) -> None:
    connect(rank)
    rank.agree("the corpus", {"the training part": "5 tokens"})
    rank.agree("more", {"the training part": f"{5 + rank.job.rank} tokens"})


def test_ranks_agree_more_than_once():
    with pytest.raises(UserError, match="ranks differ in the training part: 6 tokens on rank 1, 5 tokens on"):
        run_on_local_ranks(2, differ_later)


def test_more_ranks_than_the_cores_can_serve():
    most = 8 * cores()
    check_local_ranks(most)
    with pytest.raises(
        UserError, match=f"{most + 1} ranks .* more than 8 .*: use a layout of at most {most} "
    ):
        check_local_ranks(most + 1)


def add_up_nothing(rank: Rank, value: int) -> tuple[int, int]:
    rank.once_per_node("data", lambda: None)
    connect(rank)
    return os.getpid(), value


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("user", UserError, "tp=3 does not divide 8\nbatch=9 is odd"),
        ("exit", RunStopped, "rank 1 ended with exit status 7 in step 36, 2B0"),
    ],
)
def test_a_failed_rank_gives_one_message(
    kind: str, error: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(error) as caught:
        run_on_local_ranks(2, rank_1_fails, (kind,))
    assert str(caught.value) == message
    assert capfd.readouterr() == ("", "")


def test_a_rank_killed_in_a_collective_is_the_cause(capfd: pytest.CaptureFixture[str]):
    started = time.monotonic()
    with pytest.raises(RunStopped) as caught:
        run_on_local_ranks(3, rank_1_is_killed_in_a_collective)
    assert str(caught.value) == "rank 1 was killed by SIGKILL (out of memory?) in step 36, 2B0"
    assert time.monotonic() - started < SECONDS_TO_END
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_is_out_of_memory_is_named(capfd: pytest.CaptureFixture[str]):
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_on_local_ranks(2, train_with_too_little_on_rank_1)
    said = r"rank 1 ran out of memory in step 1, \dF0(, after \w+ on axis \w+)?: .*memory.*"
    assert re.fullmatch(said, str(caught.value)), str(caught.value)
    assert time.monotonic() - started < SECONDS_TO_END
    assert capfd.readouterr() == ("", "")


def say(rank: Rank) -> None:
    if rank.is_first:
        print("said", flush=True)
    else:
        time.sleep(600)


def test_ranks_end_where_nobody_reads_what_they_say():
    unread, output = os.pipe()
    os.close(unread)
    before = os.dup(1)
    os.dup2(output, 1)
    try:
        with pytest.raises(OutputClosed):
            run_on_local_ranks(2, say)
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(output)


def test_a_bug_shows_the_traceback_of_its_rank():
    with pytest.raises(RunStopped) as caught:
        run_on_local_ranks(2, rank_1_fails, ("bug",))
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 failed in step 36, 2B0:"
    assert lines[-1] == "ZeroDivisionError: by hand"
    assert str(caught.value).count("Traceback") == 1


def test_ranks_that_would_run_different_things_are_named():
    # RUN-05
    with pytest.raises(UserError) as caught:
        run_on_local_ranks(2, differ)
    assert caught.value.messages == (
        "ranks differ in model.hidden_size: 65 on rank 1, 64 on rank 0: give all ranks the same",
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_launcher(how: signal.Signals, tmp_path: Path):
    temporary, pids_folder = tmp_path / "temporary", tmp_path / "pids"
    temporary.mkdir()
    pids_folder.mkdir()
    code = (
        "from fourfold.launch import run_on_local_ranks; from tests.launch.test_local import wait_for_ever\n"
        f"try: run_on_local_ranks(2, wait_for_ever, ({str(pids_folder)!r},))\n"
        "except KeyboardInterrupt: raise SystemExit(130)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
    )
    pids = until(lambda: [int(path.name) for path in pids_folder.iterdir()], 2)
    launcher.send_signal(how)
    _, errors = launcher.communicate(timeout=SECONDS_TO_END)
    assert launcher.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert errors == b""
    deadline = time.monotonic() + 3
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)
    left = {path.name.partition("-")[0] for path in temporary.iterdir()}
    # torch's own cache, and the folder of a fork server's socket, which only a living launcher removes.
    assert left <= {f"torchinductor_{getpass.getuser()}", *(("pymp",) if how == signal.SIGKILL else ())}


def until(listing, length: int) -> list[int]:
    deadline = time.monotonic() + 120  # it imports torch, on a machine that may be busy
    while len(found := listing()) < length:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def alive(pid: int) -> bool:
    """Whether the process runs: one that ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
