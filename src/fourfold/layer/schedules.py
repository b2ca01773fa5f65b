"""Pipeline schedules as pure functions: the order in which each rank runs its stage's microbatches.

A schedule is a `Program` whose segments are stages and whose actions are only compute (F and B). Gradient
accumulation is a pipeline of one stage: `one_forward_one_backward` with a single stage runs each microbatch
forward and backward in turn and holds the activations of one.
"""

from collections.abc import Callable

from fourfold.errors import UserError, nearest
from fourfold.program.actions import Action, Kind, Program


def gpipe(*, stages: int, microbatches: int) -> Program:
    """All forwards, then all backwards (Huang et al. 2019, GPipe).

    Bubble (P-1)(F+B) a rank; every rank holds the activations of all M microbatches.
    """
    order = range(microbatches)
    return _one_stage_a_rank(
        [
            [Action(Kind.FORWARD, stage, m) for m in order] + [Action(Kind.BACKWARD, stage, m) for m in order]
            for stage in range(stages)
        ],
        microbatches,
    )


def one_forward_one_backward(*, stages: int, microbatches: int) -> Program:
    """1F1B (Narayanan et al. 2021, PipeDream-flush): after a warm-up, one forward and one backward in turn.

    The bubble of GPipe, but rank r holds the activations of at most P-r microbatches.
    """
    ranks = []
    for stage in range(stages):
        warm_up = min(microbatches, stages - stage - 1)
        actions = [Action(Kind.FORWARD, stage, m) for m in range(warm_up)]
        for m in range(microbatches - warm_up):
            actions += [Action(Kind.FORWARD, stage, warm_up + m), Action(Kind.BACKWARD, stage, m)]
        actions += [Action(Kind.BACKWARD, stage, m) for m in range(microbatches - warm_up, microbatches)]
        ranks.append(actions)
    return _one_stage_a_rank(ranks, microbatches)


SCHEDULES: dict[str, Callable[..., Program]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""The schedules by their name in the layout notation and on the command line."""


def schedule(name: str, *, stages: int, microbatches: int) -> Program:
    """Return the named schedule, or raise `UserError` with the names that exist."""
    problems = []
    if name not in SCHEDULES:
        problems.append(
            f"there is no schedule '{name}': use {' or '.join(SCHEDULES)}.{nearest(name, SCHEDULES)}"
        )
    problems += [
        f"{what}={value}: must be at least 1"
        for what, value in (("stages", stages), ("microbatches", microbatches))
        if value < 1
    ]
    if problems:
        raise UserError(*problems)
    return SCHEDULES[name](stages=stages, microbatches=microbatches)


def _one_stage_a_rank(ranks: list[list[Action]], microbatches: int) -> Program:
    stages = range(len(ranks))
    return Program(
        ranks=tuple(tuple(actions) for actions in ranks),
        rank_of_segment=tuple(stages),
        microbatches=microbatches,
        users=tuple((stage,) for stage in stages),
    )
