"""The pass that writes recomputation into a program."""

from collections.abc import Sequence
from dataclasses import replace

from fourfold.program.actions import TAKES_TAPE, Action, Kind, Program
from fourfold.recompute.plan import Block, Plan, plan
from fourfold.specs.recompute_name import RecomputeName


def with_recomputation(
    program: Program, policy: RecomputeName, blocks: Sequence[Block], *, stages: Sequence[range]
) -> Program:
    """Return ``program`` with an R for each forward that ``policy`` runs again.

    They stand right before the input gradient (or whole backward) that they are for: it reads the weights
    that were brought for them, and where it waits for a gradient from another rank, they run while it does.
    A weight gradient later needs none.

    The lookup that starts a model is never computed again: its tape is the token ids.

    Args:
        program: compute actions only, over segments.
        policy: what is computed again, stage by stage.
        blocks: the times and sizes of the segments. Only policies with a budget use the sizes.
        stages: the segments of each stage of the schedule.
    """
    if policy.is_none:
        return program
    ranks = list(program.ranks)
    for stage in stages:
        chain = [segment for segment in stage if segment not in program.lookups]
        if chain:
            rank = program.rank_of_segment[chain[0]]
            ranks[rank] = _with_stage(ranks[rank], chain, policy, [blocks[segment] for segment in chain])
    return replace(program, ranks=tuple(ranks))


def _with_stage(
    actions: Sequence[Action], chain: Sequence[int], policy: RecomputeName, blocks: Sequence[Block]
) -> tuple[Action, ...]:
    """The actions of a rank with the R's of one of its stages."""
    at_once = _at_once(actions, chain)
    in_flight = _most_in_flight(actions, chain)
    plans: dict[bool, Plan] = {
        found: plan(policy, blocks, at_once=found, in_flight=in_flight) for found in set(at_once.values())
    }
    written: list[Action] = []
    counts: dict[tuple[int, int], int] = {}
    for action in actions:
        if action.kind in TAKES_TAPE and action.segment in chain:
            microbatch = action.microbatch
            for index in plans[at_once[microbatch]][action.segment - chain[0]]:
                place = chain[index], microbatch
                repeat = counts[place] = counts.get(place, -1) + 1
                written.append(Action(Kind.RECOMPUTE, *place, repeat))
        written.append(action)
    return tuple(written)


def _at_once(actions: Sequence[Action], chain: Sequence[int]) -> dict[int, bool]:
    """For each microbatch, whether a stage's backward stands right after its forward."""
    found: dict[int, bool] = {}
    before: Action | None = None
    for action in actions:
        if action.kind in TAKES_TAPE and action.segment == chain[-1]:
            found[action.microbatch] = before == Action(Kind.FORWARD, chain[-1], action.microbatch)
        before = action
    return found


def _most_in_flight(actions: Sequence[Action], chain: Sequence[int]) -> int:
    """Of how many microbatches a stage has run the forward and not yet the whole backward, at most."""
    live: set[int] = set()
    most = 1
    for action in actions:
        if action.segment == chain[-1] and action.kind is Kind.FORWARD:
            live.add(action.microbatch)
            most = max(most, len(live))
        elif action.segment == chain[0] and action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            live.discard(action.microbatch)
    return most
