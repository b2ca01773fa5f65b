"""Which of several failures is the cause, and how it reads."""

import errno
from pathlib import Path

from fourfold.errors import RunStopped, UserError
from fourfold.launch.failure import Failure, collect, root_cause


def lost(rank: int, time: float) -> Failure:
    return Failure(rank, 3, "lost", ("Connection closed by peer [127.0.0.1]:4000",), time)


def test_losing_a_peer_is_recognised_and_is_not_the_cause():
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:12431")
    assert Failure.of(error, rank=1, step=4).kind == "lost"
    assert Failure.of(ValueError("connection closed by peer"), rank=1, step=4).kind == "bug"
    bug = Failure(2, 3, "bug", ("Traceback",), 9.0)
    assert root_cause([lost(0, 1.0), bug, lost(1, 2.0)]) is bug
    assert root_cause([lost(1, 2.0), lost(0, 1.0)]).rank == 0


def test_a_wrapped_loss_keeps_the_words_of_the_wrapper():
    try:
        try:
            raise RuntimeError("Broken pipe")
        except RuntimeError as error:
            raise RuntimeError("all_reduce on axis dp failed") from error
    except RuntimeError as error:
        failure = Failure.of(error, rank=1, step=4)
    assert failure.kind == "lost"
    assert failure.messages == ("all_reduce on axis dp failed",)


def test_a_kill_is_the_cause_of_whatever_else_is_said():
    killed = Failure.of_exit(-9, rank=2, step=36)
    ended = Failure.of_exit(-15, rank=0, step=36)
    odd = Failure(1, 36, "bug", ("RuntimeError: unknown words of a backend",), 0.0)
    assert root_cause([ended, odd, killed]) is killed
    assert str(killed.exception()) == "rank 2 was killed by SIGKILL (out of memory?) after step 36"


def test_the_earliest_of_equals_is_the_cause():
    first, second = (
        Failure(rank, None, "user", (f"mistake {rank}",), time) for rank, time in ((3, 1.0), (0, 2.0))
    )
    assert root_cause([second, first]).messages == ("mistake 3",)


def test_messages_keep_their_kind():
    user = Failure.of(UserError("one", "two"), rank=0, step=None).exception()
    assert isinstance(user, UserError)
    assert user.messages == ("one", "two")
    stopped = Failure.of(RunStopped("loss is nan at step 7"), rank=0, step=6).exception()
    assert isinstance(stopped, RunStopped)
    assert str(stopped) == "loss is nan at step 7"


def test_a_full_disk_is_named():
    failure = Failure.of(
        OSError(errno.ENOSPC, "No space left on device", "/runs/a/metrics.jsonl"), rank=0, step=1
    )
    assert str(failure.exception()) == "no space left on device while writing /runs/a/metrics.jsonl"


def test_a_rank_without_words_is_described_by_its_status(tmp_path: Path):
    lost(1, 1.0).write(tmp_path)
    failures = collect(tmp_path, {0: 3, 1: 1, 2: 0}, {0: 0})
    assert [failure.rank for failure in failures] == [0, 1]
    assert failures[1] == lost(1, 1.0)
    assert (
        str(root_cause(failures).exception())
        == "rank 0 ended with exit status 3 before the first step was finished"
    )
