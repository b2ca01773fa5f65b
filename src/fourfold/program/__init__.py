"""A training step as a program: data that is checked, run, simulated and drawn."""

from fourfold.program.actions import COMMUNICATION, COMPUTE, Action, Kind
from fourfold.program.check import check
from fourfold.program.clock import Span, Timeline, clock, peak_in_flight, unit_seconds
from fourfold.program.program import Program

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "Action",
    "Kind",
    "Program",
    "Span",
    "Timeline",
    "check",
    "clock",
    "peak_in_flight",
    "unit_seconds",
]
