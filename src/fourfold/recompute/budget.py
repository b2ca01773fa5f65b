"""The plans of a rank's stages that together hold no more than so many bytes.

[Note: a budget of a rank] A rank holds, for each of its stages and each microbatch on its way there, what the
forward left; and for the one that is gone back over, what that takes beside. What the forwards may leave and
what is spare for going back share the budget; all ways to share it, in steps of a sixteenth, are tried, and
the quickest is taken. Stages have what forwards leave in proportion to their tapes.

That is an estimate: not all stages hold most at the same time, and a schedule that defers weight gradients
holds what those need. So what comes out is held against the program itself (`liveness.peak_bytes`), and
planned again with less where that holds more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from fourfold.program.liveness import Block
from fourfold.recompute.plan import Plan

GIGABYTE = 10**9

MEMORY_STEPS = 400
"""A budget is divided into so many parts, and sizes are rounded up to whole ones."""

SHARES = 16
"""In how many parts a budget is shared between what forwards leave and going back."""


@dataclass(frozen=True)
class StageUse:
    """A stage as the schedule uses it.

    Attributes:
        chain: its blocks.
        in_flight: of how many microbatches it holds what their forwards left, at most.
        at_once: whether each backward follows right after its forward.
    """

    chain: Sequence[Block]
    in_flight: int
    at_once: bool


def plans_within(budget_bytes: int, stages: Sequence[StageUse]) -> list[Plan] | None:
    """Return the quickest plans for the stages of a rank within a budget; None where there are none.

    See [Note: a budget of a rank].
    """
    from fourfold.recompute.cheapest import Cheapest  # with numpy, which takes a while to load

    spare_bytes = budget_bytes - sum(stage.in_flight * stage.chain[0].input_bytes for stage in stages)
    if spare_bytes < 0:
        return None
    step = max(1, ceil(spare_bytes / MEMORY_STEPS))
    steps = spare_bytes // step
    planners = [Cheapest(_in_steps(stage.chain, step), steps=steps, keep_tapes=True) for stage in stages]
    tapes = [sum(block.tape_bytes for block in stage.chain) for stage in stages]
    weights = [stage.in_flight * tape for stage, tape in zip(stages, tapes, strict=True)]
    best: tuple[float, list[tuple[int | None, int]]] = inf, []
    for share in sorted({round(steps * part / SHARES) for part in range(SHARES + 1)}):
        left = [
            share * weight // (max(sum(weights), 1) * stage.in_flight)
            for stage, weight in zip(stages, weights, strict=True)
        ]
        back = steps - sum(held * stage.in_flight for held, stage in zip(left, stages, strict=True))
        ways: list[tuple[int | None, int]] = [
            (None if stage.at_once and stage.in_flight == 1 else held, held + back)
            for held, stage in zip(left, stages, strict=True)
        ]
        cost = sum(
            planner.cost(held=held, steps=spare)
            for planner, (held, spare) in zip(planners, ways, strict=True)
        )
        if cost < best[0]:
            best = cost, ways
    if best[0] == inf:
        return None
    return [
        planner.plan(held=held, steps=spare) for planner, (held, spare) in zip(planners, best[1], strict=True)
    ]


def _in_steps(chain: Sequence[Block], step: int) -> list[Block]:
    return [
        Block(block.forward_seconds, ceil(block.input_bytes / step), ceil(block.tape_bytes / step))
        for block in chain
    ]
