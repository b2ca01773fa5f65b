"""Ranks that lose the connection to another one hear which it was."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from fourfold.launch.loss import cause_of_loss, leave_word
from fourfold.launch.watch_together import TogetherWatch, Told

HEAR_SECONDS = 0.3
LIVES = {0, 1, 3, 4}


def tell(store: dist.Store, rank: int, count: int) -> None:
    TogetherWatch(store, rank, 5, timeout_seconds=9.0)._tell(Told(count, 0.0, False, f"in step {count}, 2F0"))


def causes(store: dist.Store, *asking: int) -> set[str]:
    """What these of five ranks hear, while all that live go on to tell: all but rank 2."""
    tell(store, 2, 7)
    is_over = threading.Event()

    def live() -> None:
        count = 8
        while not is_over.is_set():
            count += 1
            for rank in LIVES:
                tell(store, rank, count)
            time.sleep(HEAR_SECONDS / 10)

    living = threading.Thread(target=live)
    living.start()
    with ThreadPoolExecutor(len(asking)) as pool:
        found = {
            pool.submit(cause_of_loss, store, rank, 5, hear_seconds=HEAR_SECONDS, first="") for rank in asking
        }
    is_over.set()
    living.join()
    return {future.result() for future in found}


def test_a_rank_that_is_gone_is_told_from_one_that_has_not_noticed():
    """Rank 4 computes on, rank 3 has ended since it lost another one, and all that ask hear the same."""
    store = dist.HashStore()
    leave_word(store, 3, "")
    assert causes(store, 0, 1) == {
        "rank 2 is gone: killed (out of memory?), or its machine or link is; when last heard of "
        "rank 2 was in step 7, 2F0"
    }


def test_a_rank_that_failed_is_the_cause_at_once():
    store = dist.HashStore()
    leave_word(store, 2, "rank 2 failed in step 7: ValueError: x")
    began = time.monotonic()
    assert causes(store, 0, 1, 3) == {"rank 2 failed in step 7: ValueError: x"}
    assert time.monotonic() - began < HEAR_SECONDS, "nothing has to be heard"


class Gone(dist.HashStore):
    """A store whose machine is gone."""

    def set(self, *_: object) -> None:
        raise dist.DistStoreError("broken")


def test_the_store_that_rank_0_serves_is_gone_with_it():
    cause = cause_of_loss(Gone(), 1, 5, hear_seconds=HEAR_SECONDS, first="in step 7, UPDATE")
    assert cause == (
        "rank 0 is gone: killed (out of memory?), or its machine or link is; when last heard of "
        "rank 0 was in step 7, UPDATE"
    )
