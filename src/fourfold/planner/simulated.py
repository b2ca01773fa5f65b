"""What goes into a simulation and what comes out of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fourfold.program.actions import Action
from fourfold.program.clock import Timeline

COMPUTING = "compute"
"""The lane of computation. The others are named as the axis that sends."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an action.

    Attributes:
        lane: `COMPUTING`, or the axis that sends, as in ``tp`` or ``fsdp,cp``.
        seconds: that it takes where nothing slows it.
        cores: the share of a core that it needs meanwhile.
    """

    lane: str
    seconds: float
    cores: float = 0.0


Load = Callable[[int, Action], tuple[Phase, ...]]
"""From a pipeline rank and an action to what it takes, in order."""


@dataclass(frozen=True)
class Devices:
    """What the ranks run on.

    Attributes:
        interference: by how much computation slows while its rank sends.
        cores: that all ranks share; infinite where each has a device of its own.
        ranks: that each pipeline rank stands for, itself included.
    """

    interference: float = 0.0
    cores: float = float("inf")
    ranks: int = 1


@dataclass(frozen=True)
class Inside:
    """A time in which a rank communicates inside an action."""

    rank: int
    action: Action
    lane: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        timeline: when each action ran.
        inside: what tp and cp sent inside of actions, and the norm in the update.
        parts: for each pipeline rank where its step went, by the names of `fourfold.measured.TimeSpent`.
    """

    timeline: Timeline
    inside: tuple[Inside, ...]
    parts: tuple[Mapping[str, float], ...]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.timeline.seconds
