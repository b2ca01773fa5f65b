"""The passes that write a step's program, in order."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from fourfold.batch.reduction import with_reductions
from fourfold.program.actions import Action, Kind, Program
from fourfold.program.check import check


def build(
    schedule: Program, *, segments_of_stage: Sequence[int], users: Sequence[tuple[int, ...]]
) -> Program:
    """Write the program of a training step, checked.

    Args:
        schedule: the order of F and B (or I and W) over stages, from `fourfold.layer.schedules`.
        segments_of_stage: how many segments each stage holds.
        users: for each unit of parameters, the segments that compute with it.
    """
    program = expanded(schedule, segments_of_stage=segments_of_stage, users=users)
    program = with_reductions(program)
    check(program)
    return program


def expanded(
    schedule: Program, *, segments_of_stage: Sequence[int], users: Sequence[tuple[int, ...]]
) -> Program:
    """Return ``schedule`` with each action on a stage written out over the stage's segments.

    Forwards go through the segments in order, every kind of backward in reverse.
    """
    first = [0, *accumulate(segments_of_stage)]

    def over_segments(action: Action) -> list[Action]:
        assert action.segment is not None
        segments = range(first[action.segment], first[action.segment + 1])
        order = segments if action.kind is Kind.FORWARD else reversed(segments)
        return [replace(action, segment=segment) for segment in order]

    return Program(
        ranks=tuple(
            tuple(small for action in actions for small in over_segments(action))
            for actions in schedule.ranks
        ),
        rank_of_segment=tuple(
            rank
            for rank, size in zip(schedule.rank_of_segment, segments_of_stage, strict=True)
            for _ in range(size)
        ),
        microbatches=schedule.microbatches,
        users=tuple(users),
    )


def evaluation(*, segments: int, microbatches: int) -> Program:
    """The program of an evaluation on one stage: forwards only, one microbatch after another."""
    return Program(
        ranks=(
            tuple(
                Action(Kind.FORWARD, segment, m) for m in range(microbatches) for segment in range(segments)
            ),
        ),
        rank_of_segment=(0,) * segments,
        microbatches=microbatches,
        users=(),
    )
