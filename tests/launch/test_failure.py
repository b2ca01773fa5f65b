"""Which of several failures is the cause, and how it reads."""

import errno
from pathlib import Path

import pytest
import torch

from fourfold.errors import OutputClosed, RankFailed, RunPaused, RunStopped, UserError
from fourfold.launch.failure import Failure, collect, root_cause
from fourfold.place import Here, encoded


def lost(rank: int, time: float) -> Failure:
    return Failure(rank, "in step 4", "lost", ("Connection closed by peer [127.0.0.1]:4000",), time)


def test_losing_a_peer_is_recognised_and_is_not_the_cause():
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:12431")
    assert Failure.of(error, rank=1).kind == "lost"
    assert Failure.of(ValueError("connection closed by peer"), rank=1).kind == "bug"
    bug = Failure(2, "", "bug", ("Traceback",), 9.0)
    assert root_cause([lost(0, 1.0), bug, lost(1, 2.0)]) is bug
    assert root_cause([lost(1, 2.0), lost(0, 1.0)]).rank == 0


def test_a_wrapped_loss_keeps_the_words_of_the_wrapper():
    try:
        try:
            raise RuntimeError("Broken pipe")
        except RuntimeError as error:
            raise RuntimeError("all_reduce on axis dp failed") from error
    except RuntimeError as error:
        failure = Failure.of(error, rank=1)
    assert failure.kind == "lost"
    assert failure.messages == ("all_reduce on axis dp failed",)


def test_a_kill_is_the_cause_of_whatever_else_is_said():
    killed = Failure.of_exit(-9, rank=2, where="in step 36, 2B0")
    ended = Failure.of_exit(-15, rank=0, where="")
    odd = Failure(1, "", "bug", ("RuntimeError: unknown words of a backend",), 0.0)
    assert root_cause([ended, odd, killed]) is killed
    assert str(killed.exception()) == "rank 2 was killed by SIGKILL (out of memory?) in step 36, 2B0"


def test_the_earliest_of_equals_is_the_cause():
    first, second = (
        Failure(rank, "", "user", (f"mistake {rank}",), time) for rank, time in ((3, 1.0), (0, 2.0))
    )
    assert root_cause([second, first]).messages == ("mistake 3",)


def test_messages_keep_their_kind():
    user = Failure.of(UserError("one", "two"), rank=0).exception()
    assert isinstance(user, UserError)
    assert user.messages == ("one", "two")
    stopped = Failure.of(RunStopped("loss is nan at step 7"), rank=0).exception()
    assert isinstance(stopped, RunStopped)
    assert str(stopped) == "loss is nan at step 7"
    assert not isinstance(stopped, RankFailed)
    hung = Failure.of(RankFailed("no byte was written"), rank=0).exception()
    assert isinstance(hung, RankFailed), "the run is started again"
    assert str(hung) == "no byte was written"


def test_output_that_nobody_reads_is_no_lost_rank():
    failure = Failure.of(BrokenPipeError(errno.EPIPE, "Broken pipe"), rank=0)
    assert isinstance(failure.exception(), OutputClosed)
    assert failure.word() == "rank 0 failed: nobody reads the output any more"


def test_a_full_disk_is_named():
    failure = Failure.of(OSError(errno.ENOSPC, "No space left on device", "/runs/a/metrics.jsonl"), rank=0)
    assert str(failure.exception()) == "no space left on device while writing /runs/a/metrics.jsonl"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 9 GiB"
        ),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:125] DefaultCPUAllocator: can't allocate memory: 9 bytes"
        ),
        MemoryError(),
    ],
)
def test_too_little_memory_has_no_traceback(error: Exception):
    failure = Failure.of(error, rank=3)
    assert failure.kind == "memory"
    text = str(failure.exception())
    assert text.startswith("rank 3 ran out of memory")
    assert "Traceback" not in text
    assert "Of the allocated" not in text


def test_a_rank_without_words_is_described_by_its_status_and_its_place(tmp_path: Path):
    here = Here()
    here.share(tmp_path / "place-0")
    here.begin("in step 7")
    here.act(encoded("2REDUCE"))
    here.wait_in("reduce_scatter", "fsdp")
    lost(1, 1.0).write(tmp_path)
    failures = collect(tmp_path, {0: 3, 1: 1, 2: 0}, [tmp_path / f"place-{rank}" for rank in range(3)])
    assert [failure.rank for failure in failures] == [0, 1]
    assert failures[1] == lost(1, 1.0)
    assert str(root_cause(failures).exception()) == (
        "rank 0 ended with exit status 3 in step 7, 2REDUCE, waiting for reduce_scatter on axis fsdp"
    )


def test_what_may_be_started_again():
    again = [Failure(0, "", kind, ("x",), 0.0) for kind in ("signal", "exit", "lost", "bug", "memory")]
    assert all(isinstance(failure.exception(), RankFailed) for failure in again)
    never = [Failure(0, "", kind, ("x",), 0.0) for kind in ("user", "stopped", "paused", "closed")]
    assert not any(isinstance(failure.exception(), RankFailed) for failure in never)
    assert isinstance(never[2].exception(), RunPaused)
