"""Refuse a broken program before anything starts.

A program is right when every action stands exactly once on the rank that holds its segment, when what an
action needs has happened before it, and when no ranks wait for each other in a circle.
"""

from collections import Counter
from itertools import product

from fourfold.errors import UserError
from fourfold.program.actions import COMPUTE, Action, Kind, Program
from fourfold.program.clock import clock, peak_in_flight


def check(program: Program, *, max_in_flight: int | None = None) -> None:
    """Raise `UserError` with every fault of ``program``, each with the action and the reason.

    Args:
        program: a program over segments, or a schedule over stages.
        max_in_flight: the most (segment, microbatch) activations that a rank may hold at once.
    """
    problems = [*_placement(program), *_completeness(program), *_deadlocks(program)]
    if max_in_flight is not None:
        problems += _memory(program, max_in_flight)
    if problems:
        raise UserError(*problems)


def _placement(program: Program) -> list[str]:
    problems = []
    for rank, action in program.actions():
        if action.segment is None:
            continue
        if action.segment >= program.num_segments:
            problems.append(
                f"{action} on rank {rank}: there are {program.num_segments} segments, counted from 0"
            )
        elif action.kind is Kind.REDUCE and action.segment not in program.units_on(rank):
            problems.append(f"{action} on rank {rank}: no segment on this rank uses unit {action.segment}")
        elif action.kind in COMPUTE and program.rank_of_segment[action.segment] != rank:
            holder = program.rank_of_segment[action.segment]
            problems.append(f"{action} on rank {rank}: segment {action.segment} is on rank {holder}")
        if action.microbatch is not None and action.microbatch >= program.microbatches:
            problems.append(f"{action} on rank {rank}: there are {program.microbatches} microbatches, from 0")
    return problems


def _completeness(program: Program) -> list[str]:
    """Every forward once; every backward once, whole (B) or in halves (I and W); reductions and updates once.

    A schedule is compute only; a whole program reduces and updates on every rank.
    """
    counts = Counter(action for _, action in program.actions() if action.kind in COMPUTE)
    problems = []
    for segment, microbatch in product(range(program.num_segments), range(program.microbatches)):
        found = {kind: counts[Action(kind, segment, microbatch)] for kind in COMPUTE}
        if found[Kind.FORWARD] != 1:
            forward = Action(Kind.FORWARD, segment, microbatch)
            problems.append(f"{forward} stands {found[Kind.FORWARD]} times: must be once")
        backward = tuple(found[kind] for kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT))
        if backward not in ((1, 0, 0), (0, 1, 1)):
            b, i, w = backward
            problems.append(
                f"the backward of segment {segment} on microbatch {microbatch} is B {b}, I {i}, W {w} times: "
                "must be B once, or I once and W once"
            )
    if any(action.kind not in COMPUTE for _, action in program.actions()):
        for rank, actions in enumerate(program.ranks):
            own = Counter(actions)
            expected = [*program.communication_of(rank), Action(Kind.UPDATE)]
            problems += [
                f"{action} stands {own[action]} times on rank {rank}: must be once"
                for action in expected
                if own[action] != 1
            ]
            if actions and actions[-1].kind is not Kind.UPDATE:
                problems.append(f"rank {rank} ends with {actions[-1]}: UPDATE must come last")
    return problems


def _deadlocks(program: Program) -> list[str]:
    timeline = clock(program)
    problems = []
    for rank, action in timeline.stuck.items():
        done = {span.action for span in timeline.spans if span.rank == rank or span.action.kind in COMPUTE}
        missing = [need for need in program.needs(rank, action) if need not in done]
        waits = ", ".join(str(need) for need in missing[:4])
        problems.append(f"{action} on rank {rank} can never start: it waits for {waits}")
    return problems


def _memory(program: Program, max_in_flight: int) -> list[str]:
    return [
        f"rank {rank} holds {peak} activations at once: at most {max_in_flight} are allowed"
        for rank, peak in enumerate(peak_in_flight(program))
        if peak > max_in_flight
    ]
