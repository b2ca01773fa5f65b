"""The watchdog tells what moves from what stands still, and says where everyone is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourfold.errors import RankFailed
from fourfold.launch import watch as watching
from fourfold.launch.watch import Watch, cpu_seconds, is_stopped
from fourfold.place import Here, Place, encoded

TIMEOUT = 0.4


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Here]:
    """Two ranks, in step 7: rank 0 in a backward, rank 1 waiting for it."""
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.02)
    found = []
    for rank in range(2):
        here = Here()
        here.share(tmp_path / f"{rank}")
        here.begin("in step 7", is_watched=True)
        here.act(encoded("2B0"))
        found.append(here)
    found[1].wait_in("all_reduce", "dp")
    return found


def watch_of(tmp_path: Path, pids: tuple[int, int] = (0, 0)) -> Watch:
    return Watch([tmp_path / "0", tmp_path / "1"], pids, timeout_seconds=TIMEOUT)


def look_for(watch: Watch, seconds: float, between: object = None) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch.look()
        if callable(between):
            between()
        time.sleep(0.01)


def test_the_others_wait_for_the_one_that_does_not(
    tmp_path: Path, ranks: list[Here], capfd: pytest.CaptureFixture[str]
):
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        look_for(watch_of(tmp_path), 5)
    assert time.monotonic() - began < 3 * TIMEOUT
    first, *places = str(caught.value).splitlines()
    assert first == "no rank has moved for 0 s: rank 0 is in a long action, or stuck; the others wait"
    assert places == [
        "  rank 0 in step 7, 2B0 (0 s of CPU time since)",
        "  rank 1 in step 7, 2B0, waiting for all_reduce on axis dp (0 s of CPU time since)",
    ]
    warning = capfd.readouterr().err
    assert warning.startswith("warning: no rank has moved for 0 s: rank 0 is in a long action")
    assert warning.count("warning") == 1


def test_a_deadlock(tmp_path: Path, ranks: list[Here]):
    ranks[0].wait_in("recv", "pp")
    with pytest.raises(RankFailed, match=r"(?s)all wait for each other.*waiting for recv on axis pp"):
        look_for(watch_of(tmp_path), 5)


def test_a_slow_step_is_no_hang(tmp_path: Path, ranks: list[Here]):
    """One rank that comes to an action now and then is enough."""
    last = time.monotonic()

    def act() -> None:
        nonlocal last
        if time.monotonic() - last > TIMEOUT / 2:
            last = time.monotonic()
            ranks[0].act(encoded("1B0"))

    look_for(watch_of(tmp_path), 3 * TIMEOUT, act)


def test_what_may_take_hours_is_not_watched(tmp_path: Path, ranks: list[Here]):
    for here in ranks:
        here.begin("while preparing the data")
    look_for(watch_of(tmp_path), 2 * TIMEOUT)


def test_a_rank_that_stays_behind_between_two_steps(tmp_path: Path, ranks: list[Here]):
    ranks[0].begin("after step 6")
    with pytest.raises(RankFailed, match="rank 0 is in a long action, or stuck; the others wait"):
        look_for(watch_of(tmp_path), 5)


def test_the_time_in_which_the_launcher_itself_was_stopped_does_not_count(tmp_path: Path, ranks: list[Here]):
    watch = watch_of(tmp_path)
    look_for(watch, 0.1)
    time.sleep(2 * TIMEOUT)
    watch.look()


def test_a_stopped_process_is_named(tmp_path: Path, ranks: list[Here]):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            while not is_stopped(process.pid):
                time.sleep(0.01)
            ranks[0].wait_in("recv", "pp")
            with pytest.raises(RankFailed, match="rank 1 is stopped, as by SIGSTOP or a debugger"):
                look_for(watch_of(tmp_path, (os.getpid(), process.pid)), 5)
        finally:
            process.kill()


def test_cpu_seconds():
    began = cpu_seconds(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert 0.02 < cpu_seconds(os.getpid()) - began < 1


def test_a_place_before_and_after(tmp_path: Path):
    here = Here()
    assert here.place() == Place()
    assert str(here.place()) == ""
    here.act(encoded("2F0"))
    assert str(here.place()) == "in 2F0"
    here.begin("in step 3", is_watched=True)
    here.share(tmp_path / "place")
    here.act(encoded("2F0"))
    before = Place.read(tmp_path / "place")
    here.wait_in("all_gather", "fsdp")
    waiting = Place.read(tmp_path / "place")
    here.go_on()
    assert [str(place) for place in (before, waiting, here.place())] == [
        "in step 3, 2F0",
        "in step 3, 2F0, waiting for all_gather on axis fsdp",
        "in step 3, 2F0, after all_gather on axis fsdp",
    ]
    assert before.moves < waiting.moves
    here.begin("after step 3" + "x" * 100)
    assert str(Place.read(tmp_path / "place")) == "after step 3" + "x" * 52
    assert Place.read(tmp_path / "nothing") == Place()
