"""The pass that writes recomputation into a program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10

from fourfold.errors import UserError
from fourfold.program.actions import TAKES_TAPE, Action, Kind
from fourfold.program.liveness import Block, rank_peak_bytes
from fourfold.program.program import Program
from fourfold.recompute.budget import GIGABYTE, StageUse, plans_within
from fourfold.recompute.plan import Plan, plan
from fourfold.specs.recompute_name import RecomputeName


@dataclass(frozen=True)
class _Chain:
    """The blocks of a stage that may run again.

    Attributes:
        segments: their numbers.
        blocks: their sizes.
        at_once: for each microbatch, whether its backward stands right after its forward.
        in_flight: of how many microbatches the stage holds what their forwards left, at most.
    """

    segments: Sequence[int]
    blocks: Sequence[Block]
    at_once: dict[int, bool]
    in_flight: int

    def plans(self, policy: RecomputeName) -> dict[int, Plan]:
        """For each microbatch, what ``policy`` computes again."""
        found = {at_once: plan(policy, self.blocks, at_once=at_once) for at_once in (False, True)}
        return {microbatch: found[at_once] for microbatch, at_once in self.at_once.items()}


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

    Raises:
        UserError: where a budget is too small, with one that is not.
    """
    if policy.is_none:
        return program
    ranks, least = [], []
    for rank, actions in enumerate(program.ranks):
        chains = [
            _chain(actions, [segment for segment in stage if segment not in program.lookups], blocks)
            for stage in stages
            if program.rank_of_segment[stage[0]] == rank and set(stage) - program.lookups
        ]
        if policy.name != "budget":
            ranks.append(_written(actions, chains, [chain.plans(policy) for chain in chains]))
            continue
        assert policy.number is not None
        found = _within(int(policy.number * GIGABYTE), actions, chains, blocks)
        if isinstance(found, int):
            least.append((found, rank))
        else:
            ranks.append(found)
    if least:
        needed, rank = max(least)
        raise UserError(
            f"recompute='{policy}' is too little: the activations of pipeline rank {rank} take "
            f"{needed / GIGABYTE:.3g} GB at least: use budget:{_rounded_up(needed / GIGABYTE):g} or more, "
            "or smaller microbatches"
        )
    return replace(program, ranks=tuple(ranks))


def _chain(actions: Sequence[Action], segments: Sequence[int], blocks: Sequence[Block]) -> _Chain:
    first, last = segments[0], segments[-1]
    at_once: dict[int, bool] = {}
    before: Action | None = None
    live: set[int] = set()
    most = 1
    for action in actions:
        if action.segment == last and action.kind is Kind.FORWARD:
            live.add(action.microbatch)
            most = max(most, len(live))
        elif action.segment == last and action.kind in TAKES_TAPE:
            at_once[action.microbatch] = before == Action(Kind.FORWARD, last, action.microbatch)
        if action.segment == first and action.kind in TAKES_TAPE:
            live.discard(action.microbatch)
        before = action
    return _Chain(segments, [blocks[segment] for segment in segments], at_once, most)


def _written(
    actions: Sequence[Action], chains: Sequence[_Chain], plans: Sequence[dict[int, Plan]]
) -> tuple[Action, ...]:
    """The actions of a rank with the R's of its stages."""
    of_segment = {
        segment: (chain.segments, found)
        for chain, found in zip(chains, plans, strict=True)
        for segment in chain.segments
    }
    written: list[Action] = []
    counts: dict[tuple[int, int], int] = {}
    for action in actions:
        if action.kind in TAKES_TAPE and action.segment in of_segment:
            segments, found = of_segment[action.segment]
            for index in found[action.microbatch][action.segment - segments[0]]:
                place = segments[index], action.microbatch
                repeat = counts[place] = counts.get(place, -1) + 1
                written.append(Action(Kind.RECOMPUTE, *place, repeat))
        written.append(action)
    return tuple(written)


def _within(
    budget_bytes: int, actions: Sequence[Action], chains: Sequence[_Chain], blocks: Sequence[Block]
) -> tuple[Action, ...] | int:
    """The actions of a rank with the R's that keep a budget; or the least bytes that it takes.

    See [Note: a budget of a rank] in `fourfold.recompute.budget`.
    """
    uses = [StageUse(chain.blocks, chain.in_flight, all(chain.at_once.values())) for chain in chains]
    planned_bytes = budget_bytes
    while (plans := plans_within(planned_bytes, uses)) is not None:
        everywhere = [dict.fromkeys(chain.at_once, found) for chain, found in zip(chains, plans, strict=True)]
        written = _written(actions, chains, everywhere)
        excess = rank_peak_bytes(written, blocks) - budget_bytes
        if excess <= 0:
            return written
        planned_bytes -= excess
    smallest = _written(actions, chains, [chain.plans(RecomputeName("min")) for chain in chains])
    least = rank_peak_bytes(smallest, blocks)
    return smallest if least <= budget_bytes else least


def _rounded_up(number: float) -> float:
    """To three digits."""
    unit = 10.0 ** (floor(log10(number)) - 2)
    return ceil(number / unit) * unit
