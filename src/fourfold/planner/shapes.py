"""What the search enumerates, and what it knows of each choice before a step is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fourfold.outline import Step
from fourfold.planner.compute import numel_of_blocks
from fourfold.planner.fits import Held, Sizes, StageLoad, held
from fourfold.planner.practice import OURS, Practice
from fourfold.planner.stages import Stage, loads_of
from fourfold.specs import Layout
from fourfold.specs.placement import PLACEMENTS, Placement
from fourfold.specs.spec import divisors

Way = tuple[int, int, str | None]
"""dp, fsdp, and the placement by its name."""


@lru_cache(maxsize=1024)
def placements_of(data: int) -> tuple[tuple[int, str | None], ...]:
    """Every fsdp of so many ranks of the Batch axis with its placements, those that hold least first."""
    return tuple(
        (fsdp, placed)
        for fsdp in reversed(divisors(data))
        for placed in (tuple(PLACEMENTS) if fsdp > 1 else (None,))
    )


@dataclass(frozen=True)
class Shape:
    """A choice of everything but how the Batch axis is placed."""

    tp: int
    cp: int
    pp: int
    rows: int
    microbatches: int
    schedule: str | None
    recompute: str
    context: str | None = None

    @property
    def inside(self) -> Layout:
        """The axes within which a microbatch is computed; ``context`` is the option of cp."""
        return Layout(cp=self.cp, tp=self.tp, options={"cp": self.context} if self.context else {})

    def layout(self, dp: int = 1, fsdp: int = 1, placed: str | None = None) -> Layout:
        """With a way to place the Batch axis."""
        options = {"pp": self.schedule} if self.pp > 1 and self.schedule else {}
        options |= {"fsdp": placed} if fsdp > 1 and placed else {}
        options |= self.inside.options
        return replace(self.inside, pp=self.pp, dp=dp, fsdp=fsdp, options=options)


def block_sizes(step: Step, practice: Practice = OURS) -> Sizes:
    """What the memory of a step follows from."""
    numel = numel_of_blocks(step.spec, step.layout.tp, step.layout.sequence_parallel(step.sequence_length))
    return Sizes.of(
        step.sizes,
        numel,
        dtype=step.dtype,
        recompute=step.recompute.name,
        practice=practice,
    )


def fullest(
    sizes: Sizes, pipeline: "RankLoads", placement: Placement, owners: int, *, keep: bool
) -> tuple[Held, int]:
    """What the pipeline rank holds that holds most, and which it is."""
    found = [
        (held(sizes, load, placement=placement, owners=owners, keep=keep), rank)
        for load, rank in pipeline.heavy
    ]
    return max(found, key=lambda one: one[0].allocated)


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of blocks on one microbatch, forwards and backwards together."""

    layer: float
    layer_weights: float
    embed: float
    head: float
    head_weights: float


@dataclass(frozen=True)
class RankLoads:
    """What the ranks of a pipeline have: each kind once, and those that may hold most memory."""

    kinds: set[Stage]
    heavy: list[tuple[StageLoad, int]]
    chunks: int

    @classmethod
    def of(
        cls, stages: Sequence[Stage], of_ranks: Sequence[Sequence[int]], in_flight: Sequence[float]
    ) -> "RankLoads":
        """From the stages, which of them each rank has, and how many microbatches are in flight on it."""
        of_each = loads_of(stages, of_ranks)
        loads = [
            StageLoad(load.layers, load.embed, load.head, flying)
            for load, flying in zip(of_each, in_flight, strict=True)
        ]
        most = max(range(len(loads)), key=lambda rank: loads[rank].layers * loads[rank].in_flight)
        widest = max(range(len(loads)), key=lambda rank: loads[rank].layers)
        heavy = {0, len(loads) - 1, most, widest}
        return cls(
            set(of_each),
            [(loads[rank], rank) for rank in sorted(heavy)],
            len(stages) // len(loads),
        )
