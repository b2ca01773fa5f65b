"""Whether this process was asked, by a signal, to end the run once it has saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""How a person, a scheduler (SIGTERM) and Slurm's warning (``--signal=USR1@300``) ask."""

_asked = False


@contextmanager
def listening() -> Iterator[None]:
    """Let the `SIGNALS` ask for an end while the context is open, instead of ending the process.

    SIGINT does so once; the next one ends the process as before.
    """
    global _asked
    _asked = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _: FrameType | None) -> None:
        global _asked
        _asked = True
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    before = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_asked() -> bool:
    """Whether this process was asked to end."""
    return _asked
