"""What a failed rank leaves behind, and which of several failures is the cause."""

import errno
import json
import os
import signal
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fourfold.errors import OutputClosed, RankFailed, RunPaused, RunStopped, UserError
from fourfold.place import HERE, Place

# How the backends say that another rank went away. Such an error follows from that rank's own failure.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "application timeout caused pair closure",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "failed to recv",
    "remote process exited",
    "ncclremoteerror",
    "sendbytes failed",
    "recvvalue failed",
)


@dataclass(frozen=True)
class Failure:
    """Why one rank ended: its messages, where it was, and when.

    ``user``: a mistake in what was asked. ``paused``: the run was asked to end, and saved. ``closed``: nobody
    reads what it prints. ``stopped``: the run could not go on. ``hung``: it may go on when started again.
    ``memory``: there was not enough. ``lost``: another rank went away. ``bug``: an unexpected exception, with
    its traceback. ``signal``: killed from outside. ``exit``: it ended by itself.
    """

    rank: int
    where: str
    kind: Literal["user", "paused", "closed", "stopped", "hung", "memory", "lost", "bug", "signal", "exit"]
    messages: tuple[str, ...]
    time: float

    @staticmethod
    def of(error: BaseException, *, rank: int) -> "Failure":
        """Return the failure that an exception of a rank's target means, in this process."""
        where, now = str(HERE.place()), time.time()
        if isinstance(error, UserError):
            return Failure(rank, where, "user", error.messages, now)
        if isinstance(error, RunStopped):
            kind: Literal["paused", "stopped", "hung"] = "stopped"
            if isinstance(error, RunPaused | RankFailed):
                kind = "paused" if isinstance(error, RunPaused) else "hung"
            return Failure(rank, where, kind, (str(error),), now)
        if isinstance(error, BrokenPipeError):  # no lost peer: what ranks send each other goes through C++
            return Failure(rank, where, "closed", ("nobody reads the output any more",), now)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            place = f" while writing {error.filename}" if error.filename else ""
            return Failure(rank, where, "stopped", (f"no space left on device{place}",), now)
        if short := _memory_message(error):
            return Failure(rank, where, "memory", (short,), now)
        if lost := _lost_peer_message(error):
            return Failure(rank, where, "lost", (lost,), now)
        return Failure(rank, where, "bug", ("".join(traceback.format_exception(error)).rstrip(),), now)

    @staticmethod
    def of_exit(exit_status: int, *, rank: int, where: str) -> "Failure":
        """Return the failure of a rank that left no word: a negative status is the signal that ended it."""
        if exit_status >= 0:
            return Failure(rank, where, "exit", (f"exit status {exit_status}",), time.time())
        try:
            name = signal.Signals(-exit_status).name
        except ValueError:
            name = f"signal {-exit_status}"
        return Failure(rank, where, "signal", (name,), time.time())

    def write(self, folder: Path) -> None:
        """Leave this failure in the launcher's folder, whole or not at all."""
        partial = folder / f"failure-{self.rank}.partial"
        partial.write_text(json.dumps(asdict(self)))
        os.replace(partial, folder / f"failure-{self.rank}.json")

    @staticmethod
    def read(path: Path) -> "Failure":
        """Return the failure that a rank wrote."""
        fields = json.loads(path.read_text())
        return Failure(**{**fields, "messages": tuple(fields["messages"])})

    def word(self) -> str:
        """Return in a line what other ranks say of this failure."""
        first, *others = str(self.exception()).splitlines()
        speaker = "" if first.startswith(f"rank {self.rank} ") else f"rank {self.rank} failed: "
        return speaker + (f"{first} {others[-1]}" if others else first)

    def exception(self, cause: str = "") -> UserError | RunStopped:
        """Return what the launcher raises for this failure: its message is all that the user sees.

        ``cause`` says which rank a lost connection was to, where that is known.
        """
        message = self.messages[0]
        if self.kind == "user":
            return UserError(*self.messages)
        if self.kind == "paused":
            return RunPaused(message)
        if self.kind == "closed":
            return OutputClosed(message)
        if self.kind == "stopped":
            return RunStopped(message)
        if self.kind == "hung":
            return RankFailed(message)
        where = f" {self.where}" if self.where else ""
        if self.kind == "memory":
            return RankFailed(f"rank {self.rank} ran out of memory{where}: {message}")
        if self.kind == "signal":
            hint = " (out of memory?)" if message == "SIGKILL" else ""
            return RankFailed(f"rank {self.rank} was killed by {message}{hint}{where}")
        if self.kind == "exit":
            return RankFailed(f"rank {self.rank} ended with {message}{where}")
        if self.kind == "lost":
            lost = f"rank {self.rank} lost the connection to another rank{where}: {message}"
            return RankFailed(f"{cause}\n{lost}" if cause else lost)
        return RankFailed(f"rank {self.rank} failed{where}:\n{message}")

    @property
    def order(self) -> int:
        """How far this is from being the cause of the others: the smaller, the nearer.

        A rank that was killed comes first: no other rank's failure does that. Losing another rank is a
        consequence, and so may an abort be, for a backend that meets a closed connection in a thread of its
        own aborts. SIGTERM is how a launcher ends the rest.
        """
        if self.kind == "signal":
            return {"SIGABRT": 2, "SIGTERM": 4}.get(self.messages[0], 0)
        return {"exit": 2, "lost": 3}.get(self.kind, 1)

    @property
    def is_consequence(self) -> bool:
        """Whether it most likely follows from another rank's failure."""
        return self.order > 1 and self.kind != "exit"


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that the others follow from: the earliest one of the first kind that is there."""
    return min(failures, key=lambda failure: (failure.order, failure.time))


def collect(folder: Path, exit_statuses: Mapping[int, int], places: Sequence[Path]) -> list[Failure]:
    """Return the failures of the ranks with these exit statuses: their own words, or what the status says.

    Where a rank was that left no word, it has written to its file in ``places``.
    """
    failures = []
    for rank, status in exit_statuses.items():
        written = folder / f"failure-{rank}.json"
        if written.exists():
            failures.append(Failure.read(written))
        elif status != 0:
            failures.append(Failure.of_exit(status, rank=rank, where=str(Place.read(places[rank]))))
    return failures


def _memory_message(error: BaseException) -> str:
    """Return the first sentence of the error if it says that there is not enough memory."""
    text = str(error).strip()
    is_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
    if not (is_torch or isinstance(error, MemoryError)):
        return ""
    return text.splitlines()[0].partition(" Of the allocated memory")[0] if text else "no more could be had"


def _lost_peer_message(error: BaseException) -> str:
    """Return the first line of the error if it, or what caused it, says that another rank went away."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, RuntimeError | ConnectionError) and any(words in text for words in _LOST_PEER):
            # gloo adds advice for its own developers.
            return str(error).strip().splitlines()[0].partition(" This is typically caused by")[0]
        cause = cause.__cause__ or cause.__context__
    return ""
