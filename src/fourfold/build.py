"""The passes that write a step's program, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from fourfold.batch.gathers import with_gathers
from fourfold.batch.reduction import with_reductions
from fourfold.layer.transfers import with_transfers
from fourfold.program.actions import Action, Kind
from fourfold.program.check import check
from fourfold.program.liveness import Block
from fourfold.program.program import Program
from fourfold.recompute.insertion import with_recomputation
from fourfold.specs import Layout, ShardingSection
from fourfold.specs.placement import REPLICATED, Placement
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName


@dataclass(frozen=True)
class UnitUse:
    """A unit of parameters.

    Attributes:
        users: the segments that compute with it.
        trained: False for frozen parameters.
        replicated: whether ranks besides those of the fsdp axis hold it: replicas of a sharded model, or the
            pipeline ranks of both an embedding and the head that is tied to it.
    """

    users: tuple[int, ...]
    trained: bool = True
    replicated: bool = False


@dataclass(frozen=True)
class Sharding:
    """How weights and gradients are spread on the Batch axis, and when they move.

    Attributes:
        placement: what is cut over the fsdp axis.
        prefetch: how many compute actions ahead of its use a unit is gathered.
        keep: hold gathered weights and whole gradients over all microbatches of a step.
    """

    placement: Placement = REPLICATED
    prefetch: int = 1
    keep: bool = False

    @classmethod
    def of(cls, layout: Layout, section: ShardingSection) -> "Sharding":
        """What a run file asks for on a layout; ``auto`` keeps over the microbatches of a pipeline."""
        keep = section.accumulate == "whole" or (section.accumulate == "auto" and layout.pp > 1)
        return cls(layout.placement, prefetch=section.prefetch, keep=keep)


def build(
    schedule: Program,
    *,
    segments_of_stage: Sequence[int],
    units: Sequence[UnitUse],
    sharding: Sharding,
    lookups: frozenset[int] = frozenset(),
    recompute: RecomputeName = NO_RECOMPUTATION,
    blocks: Sequence[Block] = (),
) -> Program:
    """Write the program of a training step, checked; see `written`."""
    check(schedule)
    program = written(
        schedule,
        segments_of_stage=segments_of_stage,
        units=units,
        sharding=sharding,
        lookups=lookups,
        recompute=recompute,
        blocks=blocks,
    )
    check(program)
    return program


def written(
    schedule: Program,
    *,
    segments_of_stage: Sequence[int],
    units: Sequence[UnitUse],
    sharding: Sharding,
    lookups: frozenset[int] = frozenset(),
    recompute: RecomputeName = NO_RECOMPUTATION,
    blocks: Sequence[Block] = (),
) -> Program:
    """Write the program of a training step.

    Args:
        schedule: the order of F and B (or I and W) over stages, from `fourfold.layer.schedules`.
        segments_of_stage: how many segments each stage holds.
        units: the parameters that are gathered and reduced together.
        sharding: where they live.
        lookups: the segments whose backward does not read their weights.
        recompute: which forwards run again.
        blocks: times and sizes of the segments, for a policy that computes again.
    """
    program = expanded(schedule, segments_of_stage=segments_of_stage, recomputed=not recompute.is_none)
    program = replace(
        program,
        users=tuple(unit.users for unit in units),
        frozen=frozenset(index for index, unit in enumerate(units) if not unit.trained),
        lookups=lookups,
        replicated=frozenset(index for index, unit in enumerate(units) if unit.replicated),
        placement=sharding.placement,
    )
    stages = [range(*pair) for pair in pairwise(accumulate(segments_of_stage, initial=0))]
    program = with_recomputation(program, recompute, blocks, stages=stages)
    program = with_gathers(program, prefetch=sharding.prefetch, keep=sharding.keep)
    program = with_reductions(program, every_microbatch=sharding.placement.gradients and not sharding.keep)
    return with_transfers(program)


def evaluation(training: Program, *, microbatches: int, sharding: Sharding) -> Program:
    """The program of an evaluation: forwards only.

    As many microbatches as there are pipeline ranks go through one stage before the next one. The order is
    part of one order of all ranks, so no rank can wait for another in a circle.
    """
    together = len(training.ranks)
    ranks: list[list[Action]] = [[] for _ in training.ranks]
    for first in range(0, microbatches, together):
        for stage in training.stages:
            for m in range(first, min(first + together, microbatches)):
                ranks[training.rank_of_segment[stage[0]]] += [Action(Kind.FORWARD, s, m) for s in stage]
    program = replace(training, ranks=tuple(map(tuple, ranks)), microbatches=microbatches)
    return with_transfers(with_gathers(program, prefetch=sharding.prefetch, keep=sharding.keep))


def expanded(schedule: Program, *, segments_of_stage: Sequence[int], recomputed: bool = False) -> Program:
    """Return ``schedule`` with each action on a stage written out over the stage's segments.

    Forwards go through the segments in order, every kind of backward in reverse.

    [Note: input gradients first] A backward whose input gradient another rank waits for is written in halves,
    all input gradients before all weight gradients: the message leaves after two thirds of the time. The rank
    itself does the same work in the same order of schedule actions, with the same bits.

    With recomputation a stage's halves would hold what its weight gradients need of all its segments, as much
    as their tapes. So there only the last backward of the stage is in halves, from which the message comes.

    Args:
        schedule: compute actions over stages.
        segments_of_stage: how many segments each stage holds.
        recomputed: whether forwards run again instead of being kept.
    """
    first = [0, *accumulate(segments_of_stage)]
    rank_of_stage = schedule.rank_of_segment

    def over_segments(action: Action) -> list[Action]:
        stage = action.segment
        segments = range(first[stage], first[stage + 1])
        order = segments if action.kind is Kind.FORWARD else segments[::-1]
        halves: Sequence[int] = ()
        if action.kind is Kind.BACKWARD and stage > 0 and rank_of_stage[stage - 1] != rank_of_stage[stage]:
            halves = order[-1:] if recomputed else order
        whole = [Action(action.kind, segment, action.turn) for segment in order if segment not in halves]
        return whole + [
            Action(kind, segment, action.turn)
            for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
            for segment in halves
        ]

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
        users=(),
    )
