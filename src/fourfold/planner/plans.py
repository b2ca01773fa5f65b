"""What is asked of the planner, and what it answers."""

from collections import Counter
from dataclasses import dataclass, field

from fourfold.outline import Step
from fourfold.planner.fits import Held
from fourfold.planner.machine import Machine
from fourfold.planner.practice import OURS, Practice
from fourfold.planner.step_time import StepTime
from fourfold.specs import Layout, ModelSpec

POLICIES = ("none", "selective", "full")
"""Recomputation that is tried."""

TIE = 0.03
"""Plans whose times differ by less are not told apart: errors that two layouts of one model do not share."""


@dataclass(frozen=True)
class Question:
    """What is to be trained, on what.

    Attributes:
        spec: the model.
        machine: the devices, and ``ranks`` how many.
        sequence_length: tokens of a row.
        batch: rows of a step.
        dtype: of computation.
        practice: of kernels.
    """

    spec: ModelSpec
    machine: Machine
    ranks: int
    sequence_length: int
    batch: int
    dtype: str = "bfloat16"
    practice: Practice = OURS


@dataclass(frozen=True)
class Plan:
    """A layout with its prediction.

    Attributes:
        step: what would run.
        time: of a step.
        memory: of the pipeline rank that holds most, and ``worst_rank`` which that is.
    """

    step: Step
    time: StepTime
    memory: Held
    worst_rank: int

    @property
    def layout(self) -> Layout:
        """As it is written: with what a cp without an option means for this model."""
        return self.step.layout.resolved(self.step.spec)

    @property
    def tokens_per_second(self) -> float:
        """On each device."""
        step = self.step
        return step.batch * step.sequence_length / self.time.total / step.layout.world_size


@dataclass
class Found:
    """What a search found.

    Attributes:
        plans: the best, the best first.
        without_pipeline: the best of those that do not cut the Layer axis.
        by_hand: the layout that an expert would write down.
        tried: how many layouts there are, and ``dropped`` how many of them were, by why.
    """

    plans: list[Plan] = field(default_factory=list)
    without_pipeline: Plan | None = None
    by_hand: Plan | None = None
    tried: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def quickest(self) -> Plan:
        """The first one may be a simpler one that cannot be told from it."""
        return min(self.plans, key=lambda plan: plan.time.total)


def simplest_first(plans: list[Plan]) -> list[Plan]:
    """The plans by time, but first the simplest of those that cannot be told from the best."""
    ties = [plan for plan in plans if plan.time.total <= plans[0].time.total * (1 + TIE)]
    first = min(ties, key=lambda plan: _complexity(plan.step))
    return [first, *(plan for plan in plans if plan is not first)]


def _complexity(step: Step) -> tuple[int, int]:
    """Of two as fast, the simpler is first: fewer axes that are cut, then less recomputation."""
    axes = sum(step.layout.size(axis) > 1 for axis in ("pp", "dp", "fsdp", "cp", "tp"))
    return axes, POLICIES.index(step.recompute.name)
