"""How long something takes: the median of several calls, each until the device has done it."""

import statistics
import time
from collections.abc import Callable

import torch

FEWEST, MOST = 4, 50
"""Calls that are measured of one thing."""


def median_seconds(
    run: Callable[[], object],
    device: torch.device,
    *,
    before: Callable[[], object] = lambda: None,
    seconds: float = 0.02,
) -> float:
    """Return the median time of a call.

    Args:
        run: what is measured. It is called twice before it counts.
        device: where it runs; what is under way there has ended before and after a call.
        before: called before each, outside of the time.
        seconds: so much time is measured, of at least `FEWEST` calls and at most `MOST`; of what takes more
            than a second, one call.
    """
    found: list[float] = []
    for _ in range(2):
        first = _once(run, before, device)
        if first > 1.0:
            return first
    while len(found) < FEWEST or (sum(found) < seconds and len(found) < MOST):
        found.append(_once(run, before, device))
    return statistics.median(found)


def _once(run: Callable[[], object], before: Callable[[], object], device: torch.device) -> float:
    before()
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was started."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
