"""Where this rank is: a few bytes that whoever watches it can read while it runs, and after it died.

The launcher gives each rank a file for them. The rank maps it into its memory and writes there as it goes,
which costs no call of the operating system; what is written outlives the process.
"""

import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_HEAD = struct.Struct("=qqq")  # moves, is watched, is waiting
_TEXT_BYTES = 64
_TASK, _ACTION, _COLLECTIVE = (
    slice(_HEAD.size + _TEXT_BYTES * n, _HEAD.size + _TEXT_BYTES * (n + 1)) for n in range(3)
)
_SIZE = _COLLECTIVE.stop
_NOTHING = bytes(_TEXT_BYTES)


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        moves: how often it has moved: two equal numbers mean that it stood still in between.
        is_watched: whether it is to move on soon; else what it does may take hours.
        is_waiting: whether it waits inside ``collective``.
        task: ``in step 37``, ``while preparing the data``; empty where that is not known.
        action: of the program, the last one that it began.
        collective: the last one that it came to, with its axis.
    """

    moves: int = 0
    is_watched: bool = False
    is_waiting: bool = False
    task: str = ""
    action: str = ""
    collective: str = ""

    @staticmethod
    def of(content: bytes) -> "Place":
        """Read what a rank wrote. It may have been in the middle of a text."""
        if len(content) < _SIZE:
            return Place()
        moves, is_watched, is_waiting = _HEAD.unpack_from(content)
        task, action, collective = (
            content[part].rstrip(b"\0").decode(errors="replace") for part in (_TASK, _ACTION, _COLLECTIVE)
        )
        return Place(moves, bool(is_watched), bool(is_waiting), task, action, collective)

    @staticmethod
    def read(path: Path) -> "Place":
        """Read the file of a rank; nothing is known where there is none."""
        try:
            return Place.of(path.read_bytes())
        except OSError:
            return Place()

    def __str__(self) -> str:
        collective = f"{'waiting for' if self.is_waiting else 'after'} {self.collective}"
        action = self.action if self.task or not self.action else f"in {self.action}"
        parts = [self.task, action, collective if self.collective else ""]
        return ", ".join(part for part in parts if part)


class Here:
    """This process's own place, as it writes it."""

    def __init__(self) -> None:
        self._moves = 0
        self._use(memoryview(bytearray(_SIZE)))

    def _use(self, content: memoryview) -> None:
        self._content = content
        self._numbers = content[: _HEAD.size].cast("q")

    def share(self, path: Path) -> None:
        """Write into this file from now on."""
        path.write_bytes(bytes(self._content))
        with path.open("r+b") as file:
            self._use(memoryview(mmap.mmap(file.fileno(), _SIZE)))

    def place(self) -> Place:
        """Return what is written."""
        return Place.of(bytes(self._content))

    def begin(self, task: str, *, is_watched: bool = False) -> None:
        """Say what comes now; with ``is_watched`` the rank is to move on soon, again and again."""
        self._content[_TASK] = encoded(task)
        self._content[_ACTION] = self._content[_COLLECTIVE] = _NOTHING
        self._numbers[1] = is_watched
        self._numbers[2] = 0
        self._moves += 1
        self._numbers[0] = self._moves

    def act(self, action: bytes) -> None:
        """Say which action of the program begins; `encoded`."""
        self._content[_ACTION] = action
        self._moves += 1
        self._numbers[0] = self._moves

    def wait_in(self, op: str, axis: str) -> None:
        """Say which collective this rank turns to; `go_on` when it is through."""
        self._content[_COLLECTIVE] = _collective(op, axis)
        self._numbers[2] = 1
        self._moves += 1
        self._numbers[0] = self._moves

    def go_on(self) -> None:
        """Say that this rank waits no more."""
        self._numbers[2] = 0


def encoded(text: str) -> bytes:
    """Return a text as it is written: of a fixed length, a long one without its end."""
    content = text.encode()[:_TEXT_BYTES]
    return content.ljust(_TEXT_BYTES, b"\0")


@cache
def _collective(op: str, axis: str) -> bytes:
    return encoded(f"{op} on axis {axis}")


HERE = Here()
"""Of this process."""
