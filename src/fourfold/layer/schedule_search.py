"""The ``auto`` schedule: the quickest that is found for measured times and a bound on memory.

Candidates are the named schedules that keep the bound, so the result is never worse than any of them, and
what list scheduling makes on several placements by several rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from fourfold.errors import UserError
from fourfold.layer.list_scheduling import Listed, Rule, list_schedule, loop_placement, v_placement
from fourfold.program.actions import Kind
from fourfold.program.clock import Times, peak_activations
from fourfold.program.program import Program

RULES = (
    Rule("turns"),
    Rule("turns", patience=0.5),
    Rule("backward", patience=0.5),
    Rule("forward", patience=0.5),
)
"""The rules that list scheduling is tried with."""

MOST_CHUNKS = 4
"""The most stages a rank that are tried: messages and small matrices eat up what more would win."""


@dataclass(frozen=True)
class _Candidate:
    """A schedule, or one that list scheduling found, with what it takes."""

    seconds: float
    most_activations: float
    found: Program | Listed

    def __lt__(self, other: "_Candidate") -> bool:
        """Quicker, or as quick (but for rounding) with less memory."""
        if abs(self.seconds - other.seconds) > 1e-9 * other.seconds:
            return self.seconds < other.seconds
        return self.most_activations < other.most_activations


def quickest(
    named: Mapping[str, Program],
    *,
    ranks: int,
    microbatches: int,
    times: Times,
    most_activations: float | None = None,
    most_stages: int | None = None,
) -> Program:
    """Return the quickest schedule that is found.

    Args:
        named: the named schedules.
        ranks: pipeline ranks.
        microbatches: microbatches of a step.
        times: what is fast.
        most_activations: the most microbatches' activations, of its whole share of the model, that a rank may
            hold at once; None for no bound.
        most_stages: the most stages that can be filled.

    Raises:
        UserError: where not even one microbatch may be held.
    """
    bound = float("inf") if most_activations is None else most_activations
    if bound < 1:
        raise UserError(
            f"{most_activations:g} activations a rank are too few for any schedule: use 1 or more"
        )
    best: _Candidate | None = None
    for program in named.values():
        most = max(peak_activations(program))
        if most <= bound and (most_stages is None or program.num_segments <= most_stages):
            candidate = _Candidate(step_seconds(program, times), most, program)
            best = candidate if best is None or candidate < best else best
    placements = [loop_placement(ranks, chunks) for chunks in range(1, MOST_CHUNKS + 1)] + [
        v_placement(ranks)
    ]
    for placement in placements:
        chunks = len(placement) // ranks
        if most_stages is not None and len(placement) > max(most_stages, ranks):
            continue
        bounds = {min(most, bound, microbatches) for most in (ranks, 2 * ranks - 1, bound)}
        in_flight = {int(most * chunks) for most in bounds if int(most * chunks) >= chunks}
        for most_in_flight, rule in product(sorted(in_flight), RULES):
            found = list_schedule(
                placement,
                microbatches=microbatches,
                most_in_flight=most_in_flight,
                times=times,
                rule=rule,
                limit_seconds=float("inf") if best is None else best.seconds * (1 + 1e-9),
            )
            if found is not None:
                candidate = _Candidate(found.seconds, most_in_flight / chunks, found)
                best = candidate if best is None or candidate < best else best
    assert best is not None, "with room for one microbatch, one stage a rank can run one after another"
    return best.found if isinstance(best.found, Program) else best.found.program()


def step_seconds(schedule: Program, times: Times) -> float:
    """When the last action of a schedule ends, its messages counted: what `clock` says, found sooner.

    A search asks this many times; it knows only compute and messages.
    """
    of_rank = schedule.rank_of_segment
    last = schedule.num_segments - 1
    lasts = times.by_kind(len(schedule.ranks) / schedule.num_segments)
    arrived: dict[tuple[bool, int, int], float] = {}  # (is a gradient, stage, microbatch) that it arrives for
    edge_free: dict[tuple[int, int, bool], float] = {}
    position, free = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    waiting = list(range(len(schedule.ranks)))
    while waiting:
        rank = waiting.pop()
        actions = schedule.ranks[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            kind, stage, m = action.kind, action.segment, action.microbatch
            backward = kind is not Kind.FORWARD
            start = free[rank]
            if kind is not Kind.WEIGHT_GRADIENT and stage != (last if backward else 0):
                if (backward, stage, m) not in arrived:
                    break
                start = max(start, arrived[backward, stage, m])
            free[rank] = end = start + lasts[kind]
            position[rank] += 1
            following = stage + (-1 if backward else 1)
            if kind is Kind.WEIGHT_GRADIENT or not 0 <= following <= last:
                continue
            there = of_rank[following]
            if there != rank:
                edge = rank, there, backward
                edge_free[edge] = end = max(end, edge_free.get(edge, 0.0)) + times.send
                if there not in waiting:
                    waiting.append(there)
            arrived[backward, following, m] = end
    assert all(done == len(actions) for done, actions in zip(position, schedule.ranks, strict=True))
    return max(free)
