"""The watchdog of ranks that nobody here started: under torchrun, Slurm or by hand, on any machines.

Each rank has a thread that tells the others, through the store, where it is and for how long. A rank that is
frozen, or on a machine that is gone, tells nothing more, and by that it is known.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourfold.launch.watch import named, standstill
from fourfold.launch.within import within
from fourfold.place import HERE

if TYPE_CHECKING:
    from torch.distributed import Store

LOOK_SECONDS = 0.5
# So many ranks tell the store in a second: where there are more, each does so more seldom.
TELLING_PER_SECOND = 2000
# A rank of which nothing new was heard for so long does not answer.
SILENT_SECONDS = 10.0
# How long the others get to hear that the run is over, before who says so ends: it may serve the store.
WORD_SECONDS = 1.0
_OVER = "over"


@dataclass(frozen=True)
class Told:
    """What a rank told last: where it is, for how long, whether it waits there, and how often it has told."""

    count: int
    still_seconds: float
    is_waiting: bool
    place: str


def told_of(store: "Store", rank: int) -> Told | None:
    """Return what a rank told last, None where it has not told yet."""
    key = f"place/{rank}"
    return Told(**json.loads(store.get(key))) if store.check([key]) else None


class TogetherWatch(threading.Thread):
    """Ends this process once no rank has moved for the timeout; the lowest one that can looks, and says it.

    See `fourfold.launch.watch.Watch` for what moving is.

    Args:
        store: of the job; a client of its own, since the other threads use theirs.
        rank: this one.
        world_size: how many there are.
        timeout_seconds: how long none may move.

    Attributes:
        store: as given; what comes of it is there at once, so two threads can ask it.
        look_seconds: how often each rank tells.
        first: where rank 0 was when it last told.
    """

    def __init__(self, store: "Store", rank: int, world_size: int, *, timeout_seconds: float):
        super().__init__(name="watchdog", daemon=True)
        self.look_seconds = max(LOOK_SECONDS, world_size / TELLING_PER_SECOND)
        self.first = ""
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._heard: dict[int, tuple[int, float]] = {}

    def run(self) -> None:
        """Watch until the process ends."""
        moves, still, count, looked = -1, 0.0, 0, time.monotonic()
        while True:
            time.sleep(self.look_seconds)
            now, place = time.monotonic(), HERE.place()
            # This process may itself have been stopped: that time does not count.
            still += min(now - looked, 2 * self.look_seconds)
            looked = now
            if place.moves != moves or not place.is_watched:
                moves, still = place.moves, 0.0
            count += 1
            lines = self._talk(Told(count, still, place.is_waiting, str(place)))
            answered = time.monotonic()
            still += min(answered - looked, SILENT_SECONDS)
            looked = answered
            if lines is not None:
                self._end(lines)

    def _talk(self, mine: Told) -> Sequence[str] | None:
        """Tell where this rank is; return what to end with once the run is over, None where it is not.

        The lowest rank that can looks for all. Where nothing is heard of the store, the machine that serves
        it is gone, or the link to that.
        """
        is_still = mine.still_seconds >= self._timeout_seconds

        def talk() -> Sequence[str] | None:
            self._tell(mine)
            if self._rank and (first := told_of(self.store, 0)) is not None:
                self.first = first.place
            # Half of the timeout is enough to hear whether a rank tells nothing more.
            if mine.still_seconds < min(
                self._timeout_seconds / 2, self._timeout_seconds - 2 * SILENT_SECONDS
            ):
                return None
            told = self._all_told()
            if told is None:
                return [] if is_still and self.store.check([_OVER]) else None
            if not is_still or not self._is_over(told):
                return None
            self.store.set(_OVER, "")
            return report(told, self._timeout_seconds)

        try:
            return within(SILENT_SECONDS, talk)
        except (RuntimeError, TimeoutError):
            if not is_still:
                return None
            alone = [mine if rank == self._rank else None for rank in range(self._world_size)]
            return report(alone, self._timeout_seconds)

    def _tell(self, told: Told) -> None:
        self.store.set(f"place/{self._rank}", json.dumps(vars(told)))

    def _all_told(self) -> list[Told | None] | None:
        """Return what each rank told, None of one of which nothing new was heard for some time.

        None in all where a lower rank is heard of: that one looks.
        """
        now = time.monotonic()
        found: list[Told | None] = []
        for rank in range(self._world_size):
            told = told_of(self.store, rank)
            count = -1 if told is None else told.count
            if rank not in self._heard or self._heard[rank][0] != count:
                self._heard[rank] = count, now
            is_heard = now - self._heard[rank][1] < SILENT_SECONDS
            if is_heard and rank < self._rank:
                return None
            found.append(told if is_heard else None)
        return found

    def _is_over(self, told: Sequence[Told | None]) -> bool:
        """Whether no rank moves: those that tell say so, and there is no other."""
        return all(
            one is None or one.still_seconds >= self._timeout_seconds - self.look_seconds for one in told
        )

    def _end(self, lines: Sequence[str]) -> None:
        """Say where the ranks are, unless another rank does, and end the process."""
        if lines:
            print(*lines, sep="\n", file=sys.stderr, flush=True)
            time.sleep(max(WORD_SECONDS, 2 * self.look_seconds))  # the others hear of it
        os._exit(1)


def report(told: Sequence[Told | None], seconds: float) -> list[str]:
    """Say that no rank has moved, for which of them the others wait, and where they are."""
    silent = [rank for rank, one in enumerate(told) if one is None]
    busy = [rank for rank, one in enumerate(told) if one is not None and not one.is_waiting]
    waiting = [rank for rank, one in enumerate(told) if one is not None and one.is_waiting]
    gone = f"{named(silent)} not heard of any more: frozen, or its machine or link is gone" if silent else ""
    lines = ["is silent" if one is None else one.place for one in told]
    first, *others = standstill(seconds, lines, [*silent, *busy, *waiting], busy, waiting, gone=gone)
    return [f"error: {first}", *others]
