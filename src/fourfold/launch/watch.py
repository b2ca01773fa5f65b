"""The watchdog: it tells ranks that stand still from slow ones, and says where each is."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fourfold.errors import RankFailed
from fourfold.place import Place

LOOK_SECONDS = 0.5
# What is said of this many ranks; of more, of those that do not wait for another one.
SHOWN_RANKS = 16


class Watch:
    """Looks at where the local ranks are.

    A rank moves when it begins an action of the program or comes to a collective: many times a step. So a
    step may take as long as it likes, but where no rank moves, either one computes a single action for very
    long, or all wait for what will not come. After half of the timeout all places are printed, after all of
    it the run is over. What may take hours, like preparing data, is not watched where all ranks are at it.

    Args:
        places: the files in which ranks say where they are.
        pids: their processes.
        timeout_seconds: how long none may move.
    """

    def __init__(self, places: Sequence[Path], pids: Sequence[int], *, timeout_seconds: float):
        self._paths = places
        self._pids = pids
        self._timeout_seconds = timeout_seconds
        self._looked = time.monotonic()
        self._moves: list[int] = []
        self._still_seconds = 0.0
        self._cpu_seconds: list[float] = []
        self._is_told = False

    def look(self) -> None:
        """Look, if it is time. Raises RankFailed where no rank has moved for the timeout."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < LOOK_SECONDS:
            return
        self._looked = now
        places = [Place.read(path) for path in self._paths]
        moves = [place.moves for place in places]
        if moves != self._moves or not any(place.is_watched for place in places):
            self._moves, self._still_seconds, self._is_told = moves, 0.0, False
            self._cpu_seconds = [cpu_seconds(pid) for pid in self._pids]
            return
        # This process may itself have been stopped: that time does not count.
        self._still_seconds += min(passed, 2 * LOOK_SECONDS)
        if self._still_seconds >= self._timeout_seconds:
            raise RankFailed("\n".join(self._report(places)))
        if self._still_seconds >= self._timeout_seconds / 2 and not self._is_told:
            self._is_told = True
            lines = self._report(places)
            print(*(f"warning: {lines[0]}", *lines[1:]), sep="\n", file=sys.stderr, flush=True)

    def _report(self, places: Sequence[Place]) -> list[str]:
        """Say for how long no rank has moved, for which of them the others wait, and where they are."""
        stopped, busy, waiting = list[int](), list[int](), list[int]()
        states = []
        for rank, (pid, before) in enumerate(zip(self._pids, self._cpu_seconds, strict=True)):
            seconds = cpu_seconds(pid) - before
            kind = stopped if is_stopped(pid) else waiting if places[rank].is_waiting else busy
            kind.append(rank)
            states.append("stopped" if kind is stopped else f"{seconds:.0f} s of CPU time since")
        gone = f"{named(stopped)} stopped, as by SIGSTOP or a debugger" if stopped else ""
        lines = [f"{places[rank]} ({state})" for rank, state in enumerate(states)]
        return standstill(self._still_seconds, lines, [*stopped, *busy, *waiting], busy, waiting, gone=gone)


def standstill(
    seconds: float,
    lines: Sequence[str],
    nearest: Sequence[int],
    busy: Sequence[int],
    waiting: Sequence[int],
    *,
    gone: str,
) -> list[str]:
    """Say that no rank has moved, for which of them the others wait, and where they are.

    Args:
        seconds: for how long.
        lines: on each rank.
        nearest: all ranks, those first that are nearest to the cause: of many, these are shown.
        busy: those that are in an action, and ``waiting`` those that wait for others.
        gone: which do nothing at all, and why, in words; empty where there are none.
    """
    what = gone or "all wait for each other"
    if busy and not gone:
        what = f"{named(busy)} in a long action, or stuck" + ("; the others wait" if waiting else "")
    shown = range(len(lines)) if len(lines) <= SHOWN_RANKS else nearest[:SHOWN_RANKS]
    return [
        f"no rank has moved for {seconds:.0f} s: {what}",
        *(f"  rank {rank} {lines[rank]}" for rank in shown),
    ]


def named(ranks: Sequence[int]) -> str:
    """Return ``rank 1 is`` or ``ranks 1, 2 are``."""
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped; False where the system does not tell."""
    return _stat(pid)[:1] in (["T"], ["t"])


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process; 0 where the system does not tell."""
    fields = _stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields of Linux's ``/proc/PID/stat`` from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
