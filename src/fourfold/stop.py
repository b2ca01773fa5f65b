"""Whether this process was asked, by a signal, to end the run once it has saved."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""How a person, a scheduler (SIGTERM) and Slurm's warning (``--signal=USR1@300``) ask."""

_asked = False


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[dict[signal.Signals, Any]]:
    """Have ``handler`` called at these signals while the context is open; yield what handled them before.

    Python lets the main thread alone do so: in another one nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextmanager
def listening() -> Iterator[None]:
    """Let the `SIGNALS` ask for an end while the context is open, instead of ending the process.

    SIGINT does so once; the next one ends the process as before.
    """
    global _asked
    _asked = False

    def ask(number: int, _: FrameType | None) -> None:
        global _asked
        _asked = True
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    with handling(SIGNALS, ask) as before:
        yield


def is_asked() -> bool:
    """Whether this process was asked to end."""
    return _asked
