"""Which rank it was that others lost the connection to, in a job that no launcher of ours watches.

Who is killed leaves no word, and those that lose it know an address at most. But each rank tells the others
through the store where it is (`fourfold.launch.watch_together`): of one that is gone nothing new is heard.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fourfold.launch.watch import named
from fourfold.launch.watch_together import told_of
from fourfold.launch.within import within

if TYPE_CHECKING:
    from torch.distributed import Store

_ASKED, _CAUSE = "cause/asked", "cause/found"
SHOWN_RANKS = 8
"""Of so many ranks that are gone it is said where they were."""
POLLS = 20
"""So often who waits for the answer of another rank looks for it, in the time that it takes to hear."""


def leave_word(store: "Store", rank: int, message: str) -> None:
    """Tell the others why this rank ends; empty where it lost another one, which is no cause."""
    store.set(f"ended/{rank}", message)


def cause_of_loss(store: "Store", rank: int, world_size: int, *, hear_seconds: float, first: str) -> str:
    """Return which rank failed or is gone, and where it was; empty where that does not come to be known.

    Each rank that lost another one asks. The first of them looks, for all.

    Args:
        store: of the job.
        rank: this one.
        world_size: how many there are.
        hear_seconds: of a rank that is there something new is heard in this time.
        first: where rank 0 was when it was last heard of: where it serves the store, that is gone with it.
    """

    def ask() -> str:
        leave_word(store, rank, "")
        if store.add(_ASKED, 1) == 1:
            store.set(_CAUSE, _found(store, world_size, hear_seconds))
        deadline = time.monotonic() + 3 * hear_seconds
        while not store.check([_CAUSE]):
            if time.monotonic() > deadline:
                return ""
            time.sleep(hear_seconds / POLLS)
        return store.get(_CAUSE).decode()

    try:
        return within(4 * hear_seconds, ask)
    except (RuntimeError, TimeoutError):
        return _gone({0: first}) if rank else ""


def _found(store: "Store", world_size: int, hear_seconds: float) -> str:
    """Look who left word, and of whom nothing new is heard."""
    # What failed left word before its connections closed, and rank 0 may take the store with it soon.
    if failed := _words(store, world_size, only_failed=True):
        return next(iter(failed.values()))
    before = {rank: told_of(store, rank) for rank in range(world_size)}
    time.sleep(hear_seconds)
    words = _words(store, world_size)
    after = {rank: told_of(store, rank) for rank in range(world_size) if rank not in words}
    gone = {rank: told for rank, told in after.items() if told == before[rank]}
    return _gone({rank: told.place if told is not None else "" for rank, told in gone.items()})


def _words(store: "Store", world_size: int, *, only_failed: bool = False) -> dict[int, str]:
    """Return the words of the ranks that left some, by rank."""
    keys = {rank: f"ended/{rank}" for rank in range(world_size)}
    words = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    return {rank: word for rank, word in words.items() if word} if only_failed else words


def _gone(places: Mapping[int, str]) -> str:
    """Say which ranks are gone, and where they were when they last told; empty where there are none."""
    if not places:
        return ""
    known = {rank: place for rank, place in places.items() if place}
    shown = [f"rank {rank} was {place}" for rank, place in list(known.items())[:SHOWN_RANKS]]
    last = f"; when last heard of {', '.join(shown)}" if shown else ""
    return f"{named(list(places))} gone: killed (out of memory?), or its machine or link is{last}"
