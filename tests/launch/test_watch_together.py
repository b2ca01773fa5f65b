"""The ranks of a joined job watch each other through the store."""

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from fourfold.launch import watch_together
from fourfold.launch.watch_together import TogetherWatch, Told, report
from fourfold.place import Here

TIMEOUT = 0.6


class Ended(Exception):
    """In place of the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Run the watch of one of two ranks for some seconds; it raises Ended where it ends the process."""
    monkeypatch.setattr(watch_together, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watch_together, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(watch_together, "WORD_SECONDS", 0.0)

    def end(_: int) -> None:
        raise Ended

    class TimeIsUp(Exception):
        pass

    def run(seconds: float, store: dist.Store, between: Callable[[], None], rank: int = 0) -> None:
        deadline = time.monotonic() + seconds
        sleep = time.sleep

        def wait(length: float) -> None:
            if time.monotonic() > deadline:
                raise TimeIsUp
            between()
            sleep(length)

        monkeypatch.setattr(watch_together.time, "sleep", wait)
        monkeypatch.setattr(watch_together.os, "_exit", end)
        here = Here()
        here.begin("in step 7", is_watched=True)
        here.wait_in("all_reduce", "dp")
        monkeypatch.setattr(watch_together, "HERE", here)
        try:
            TogetherWatch(store, rank, 2, timeout_seconds=TIMEOUT).run()
        except TimeIsUp:
            pass
        finally:
            monkeypatch.undo()

    return run


def tell(store: dist.Store, count: int, still_seconds: float, rank: int = 1) -> None:
    watch = TogetherWatch(store, rank, 2, timeout_seconds=TIMEOUT)
    watch._tell(Told(count, still_seconds, False, "in step 7, 2F0"))


def test_a_rank_of_which_nothing_is_heard(ends: Callable[..., None], capfd: pytest.CaptureFixture[str]):
    store = dist.HashStore()
    tell(store, 5, 0.0)
    with pytest.raises(Ended):
        ends(5, store, lambda: None)
    assert capfd.readouterr().err.splitlines() == [
        "error: no rank has moved for 1 s: rank 1 is not heard of any more: "
        "frozen, or its machine or link is gone",
        "  rank 0 in step 7, waiting for all_reduce on axis dp",
        "  rank 1 is silent",
    ]


def test_a_rank_that_is_slow_is_waited_for(ends: Callable[..., None]):
    store, count = dist.HashStore(), 0

    def move() -> None:
        nonlocal count
        count += 1
        tell(store, count, 0.0)

    ends(4 * TIMEOUT, store, move)


def test_a_rank_that_is_stuck(ends: Callable[..., None], capfd: pytest.CaptureFixture[str]):
    store, count = dist.HashStore(), 0

    def stay() -> None:
        nonlocal count
        count += 1
        tell(store, count, 100.0)

    with pytest.raises(Ended):
        ends(5, store, stay)
    assert "rank 1 is in a long action, or stuck; the others wait" in capfd.readouterr().err


def test_the_lowest_rank_looks_and_the_others_end_when_it_says_so(
    ends: Callable[..., None], capfd: pytest.CaptureFixture[str]
):
    store, count = dist.HashStore(), 0

    def stay() -> None:
        nonlocal count
        count += 1
        tell(store, count, 100.0, rank=0)

    ends(
        3 * TIMEOUT, store, stay, rank=1
    )  # of two ranks both stand still, but rank 0 has not said that it is over
    store.set("over", "")
    with pytest.raises(Ended):
        ends(5, store, stay, rank=1)
    assert capfd.readouterr().err == "", "rank 0 says it"


def test_a_rank_that_hears_nothing_of_the_store(ends: Callable[..., None], capfd: pytest.CaptureFixture[str]):
    class Cut(dist.HashStore):
        def check(self, *_: object) -> bool:
            time.sleep(60)
            return False

    with pytest.raises(Ended):
        ends(5, Cut(), lambda: None, rank=1)
    said = capfd.readouterr().err
    assert "rank 0 is not heard of any more: frozen, or its machine or link is gone" in said
    assert "rank 1 in step 7, waiting for all_reduce on axis dp" in said


def test_of_many_ranks_those_that_matter_are_shown():
    told: list[Told | None] = [Told(1, 9.0, True, "in step 1")] * 100
    told[77] = None
    lines = report(told, 9.0)
    assert len(lines) == 1 + 16
    assert lines[1] == "  rank 77 is silent"
