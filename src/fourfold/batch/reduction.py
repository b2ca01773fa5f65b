"""The pass that writes the sums of gradients and of the loss into a program.

[Note: when gradients are summed] Each microbatch adds into the unit's local gradient buffer. Where gradients
are replicated they are summed over ranks once a step, right after the last contribution, so accumulation
saves communication. Where they are sharded, each microbatch's are summed to the owners right after its
contribution and the buffer is released, so that only pieces stay. Either way a REDUCE runs behind the
backward of the segments below.

[Note: replicas last] In HSDP an owner's piece is summed over the replicas once a step, after all its
microbatches are in (adding some only later would leave the replicas apart). That ALLREDUCE follows the *next*
unit's REDUCE, at which its own has been waited for anyway.

[Note: the ends of a pipeline last] Where an embedding and a head on another pipeline rank are one parameter,
their sum can begin only when the embedding's contribution is in, at the very end. So it stands right before
UPDATE on both ranks. A collective that starts earlier on the head's rank would hold up, where starting is
waiting (debug mode), the gradients that the embedding's rank still needs.

[Note: one reduction in flight] Where pieces have owners, a REDUCE waits for the one before it and releases
that one's buffer. So a rank holds the whole gradients of two units at most: one being summed, one being
computed.
"""

from collections.abc import Sequence
from dataclasses import replace

from fourfold.program.actions import CONTRIBUTES, Action, Kind
from fourfold.program.program import Program
from fourfold.specs.layout import BATCH_AXES, Layout

SEGMENT_BYTES = 25 * 2**20
"""A segment has at least so many bytes of gradients, or all of its stage's where that is less.

Each reduction costs a latency and each segment calls of autograd, so small blocks are joined. But where
gradients are summed over ranks a segment may have half of its stage's: what the backward finishes last has
nothing to hide behind.
"""

SHARDED_SEGMENT_BYTES = 4 * 2**20
"""The same where weights are sharded, or an eighth of the stage: whole segments take memory there."""


def blocks_of_segments(block_bytes: Sequence[int], layout: Layout) -> list[range]:
    """Join neighbouring blocks of a stage to segments, in the order of the backward: the last come first.

    Args:
        block_bytes: of the gradients of each block's parameters, in the order of the forward.
        layout: says whether gradients are summed over ranks, and whether a rank holds the weights of a
            segment only while it is used.

    Returns:
        The blocks of each segment, in the order of the forward.
    """
    total = sum(block_bytes)
    if layout.placement.weights:
        enough = min(SHARDED_SEGMENT_BYTES, total / 8)
    else:
        enough = min(SEGMENT_BYTES, total / 2 if layout.size(*BATCH_AXES) > 1 else total)
    segments: list[range] = []
    stop = len(block_bytes)
    for start in reversed(range(len(block_bytes))):
        if start == 0 or sum(block_bytes[start:stop]) >= enough:
            segments.insert(0, range(start, stop))
            stop = start
    return segments


def with_reductions(program: Program, *, every_microbatch: bool) -> Program:
    """Return ``program`` with LOSS and each REDUCE right after the last of what they sum, then UPDATE.

    A pipeline rank without the loss takes part in LOSS after its last forward.

    Args:
        program: compute actions, and gathers and frees.
        every_microbatch: reduce after each microbatch's contribution, not once a step.
    """
    turns = program.microbatches if every_microbatch else 1
    return replace(
        program,
        ranks=tuple(_with_sums(program, rank, actions, turns) for rank, actions in enumerate(program.ranks)),
    )


def _with_sums(program: Program, rank: int, actions: Sequence[Action], turns: int) -> tuple[Action, ...]:
    position = {action: index for index, action in enumerate(actions)}
    forwards = [index for index, action in enumerate(actions) if action.kind is Kind.FORWARD]
    after: dict[int, list[Action]] = {forwards[-1]: [Action(Kind.LOSS)]}
    for unit in program.trained_on(rank):
        contributions = _contributions(program, unit, actions)
        for turn, group in enumerate(_grouped(contributions, turns)):
            end = max(position[action] for action in group)
            after.setdefault(end, []).append(Action(Kind.REDUCE, unit, turn if turns > 1 else None))
    shared = {unit for unit in range(len(program.users)) if len(program.holders(unit)) > 1}
    written: list[Action] = []
    last: list[Action] = []
    waiting: Action | None = None
    for index, action in enumerate(actions):
        written.append(action)
        for collective in after.get(index, ()):
            if collective.place in shared and not program.placement.optimizer:
                last.append(collective)  # [Note: the ends of a pipeline last]
                continue
            written.append(collective)
            is_last = collective.kind is Kind.REDUCE and collective.turn in (None, turns - 1)
            if is_last and program.placement.optimizer and collective.unit in program.replicated:
                if collective.unit in shared:
                    last.append(Action(Kind.ALL_REDUCE, collective.unit))
                    continue
                written += [waiting] if waiting else []
                waiting = Action(Kind.ALL_REDUCE, collective.unit)
    last.sort(key=lambda action: action.unit)
    return (*written, *([waiting] if waiting else []), *last, Action(Kind.UPDATE))


def _contributions(program: Program, unit: int, actions: Sequence[Action]) -> list[Action]:
    """What ends a contribution to the unit's gradient."""
    users = set(program.users[unit])
    return [action for action in actions if action.kind in CONTRIBUTES and action.segment in users]


def _grouped(contributions: Sequence[Action], turns: int) -> list[list[Action]]:
    """The contributions that each of a unit's reductions sums: all, or those of one microbatch."""
    if turns == 1:
        return [list(contributions)]
    by_microbatch: dict[int, list[Action]] = {}
    for action in contributions:
        by_microbatch.setdefault(action.microbatch, []).append(action)
    return list(by_microbatch.values())
