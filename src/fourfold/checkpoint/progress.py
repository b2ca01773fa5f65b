"""How far long work on files is."""

import time
from collections.abc import Callable

Progress = Callable[[int, int, float], None]
"""Is given bytes done, bytes in all, and the seconds so far."""


def counting(total_bytes: int, progress: Progress) -> Callable[[int], None]:
    """Return what is told of each part, in bytes, as it is done; the time runs from now on."""
    began, done = time.perf_counter(), 0

    def on_part(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total_bytes, time.perf_counter() - began)

    return on_part
