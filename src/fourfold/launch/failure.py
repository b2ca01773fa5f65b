"""What a failed rank leaves behind, and which of several failures is the cause."""

import errno
import json
import os
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fourfold.errors import RunStopped, UserError

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
    """Why one rank ended: its messages, the last finished step (None before any), and when.

    ``user``: a mistake in what was asked. ``stopped``: the run could not go on. ``lost``: another rank
    went away. ``bug``: an unexpected exception, with its traceback. ``signal``: killed from outside.
    """

    rank: int
    step: int | None
    kind: Literal["user", "stopped", "lost", "bug", "signal", "exit"]
    messages: tuple[str, ...]
    time: float

    @staticmethod
    def of(error: BaseException, *, rank: int, step: int | None) -> "Failure":
        """Return the failure that an exception of a rank's target means."""
        if isinstance(error, UserError):
            return Failure(rank, step, "user", error.messages, time.time())
        if isinstance(error, RunStopped):
            return Failure(rank, step, "stopped", (str(error),), time.time())
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            place = f" while writing {error.filename}" if error.filename else ""
            return Failure(rank, step, "stopped", (f"no space left on device{place}",), time.time())
        if lost := _lost_peer_message(error):
            return Failure(rank, step, "lost", (lost,), time.time())
        return Failure(rank, step, "bug", ("".join(traceback.format_exception(error)).rstrip(),), time.time())

    @staticmethod
    def of_exit(exit_status: int, *, rank: int, step: int | None) -> "Failure":
        """Return the failure of a rank that left no word: a negative status is the signal that ended it."""
        if exit_status >= 0:
            return Failure(rank, step, "exit", (f"exit status {exit_status}",), time.time())
        try:
            name = signal.Signals(-exit_status).name
        except ValueError:
            name = f"signal {-exit_status}"
        return Failure(rank, step, "signal", (name,), time.time())

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

    def exception(self) -> UserError | RunStopped:
        """Return what the launcher raises for this failure: its message is all that the user sees."""
        if self.kind == "user":
            return UserError(*self.messages)
        if self.kind == "stopped":
            return RunStopped(self.messages[0])
        when = after(self.step)
        if self.kind == "signal":
            hint = " (out of memory?)" if self.messages[0] == "SIGKILL" else ""
            return RunStopped(f"rank {self.rank} was killed by {self.messages[0]}{hint}{when}")
        if self.kind == "exit":
            return RunStopped(f"rank {self.rank} ended with {self.messages[0]}{when}")
        if self.kind == "lost":
            return RunStopped(
                f"rank {self.rank} lost the connection to another rank{when}: {self.messages[0]}"
            )
        return RunStopped(f"rank {self.rank} failed{when}:\n{self.messages[0]}")


def after(step: int | None) -> str:
    """Return `` after step 36``, or that no step was finished, or nothing where there are no steps."""
    if step is None:
        return ""
    return f" after step {step}" if step else " before the first step was finished"


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that the others follow from.

    The earliest one of the first kind that is there. A rank that was killed comes first: no other rank's
    failure does that. Losing another rank is a consequence, and so may an abort be, for a backend that
    meets a closed connection in a thread of its own aborts. SIGTERM is how the launcher ends the rest.
    """

    def order(failure: Failure) -> tuple[int, float]:
        kind = 1
        if failure.kind == "signal":
            kind = {"SIGABRT": 2, "SIGTERM": 4}.get(failure.messages[0], 0)
        elif failure.kind in ("exit", "lost"):
            kind = {"exit": 2, "lost": 3}[failure.kind]
        return kind, failure.time

    return min(failures, key=order)


def collect(folder: Path, exit_statuses: Mapping[int, int], steps: Mapping[int, int | None]) -> list[Failure]:
    """Return the failures of the ranks with these exit statuses: their own words, or what the status says."""
    failures = []
    for rank, status in exit_statuses.items():
        written = folder / f"failure-{rank}.json"
        if written.exists():
            failures.append(Failure.read(written))
        elif status != 0:
            failures.append(Failure.of_exit(status, rank=rank, step=steps.get(rank)))
    return failures


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
