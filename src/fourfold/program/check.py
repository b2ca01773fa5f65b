"""Refuse a broken program before anything starts.

A program is right when every action stands exactly once on the rank that holds its segment, when what an
action needs has happened before it (weights are there, sums have all their terms), and when no ranks wait for
each other in a circle.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product

from fourfold.errors import UserError
from fourfold.program.actions import COMPUTE, CONTRIBUTES, RECEIVES, SENDS, TRANSFERS, Action, Kind
from fourfold.program.clock import clock, in_flight_after
from fourfold.program.liveness import left_behind
from fourfold.program.program import Program


def check(program: Program) -> None:
    """Raise `UserError` with every fault of ``program``, each with the action and the reason.

    Args:
        program: a program over segments, or a schedule over stages.
    """
    kinds = {action.kind for _, action in program.actions()}
    over = "segment" if kinds - COMPUTE - TRANSFERS else "stage"
    problems = [*_places(program, over), *_completeness(program, over), *_recomputations(program)]
    if kinds & TRANSFERS and (unpaired := _messages(program)):
        raise UserError(*problems, *unpaired)
    if over == "segment":
        problems += _sums(program)
        if program.placement.optimizer:
            problems += _weights(program)
    problems += _deadlocks(program)
    if problems:
        raise UserError(*problems)


def _places(program: Program, over: str) -> list[str]:
    """Actions stand on the rank of what they act on; ``over`` is what that is called."""
    empty = sorted(set(range(len(program.ranks))) - set(program.rank_of_segment))
    problems = [f"rank {rank} holds no {over}: each rank must hold at least one" for rank in empty]
    for rank, action in program.actions():
        if action.kind in COMPUTE or action.kind in TRANSFERS:
            if action.segment >= program.num_segments:
                problems.append(
                    f"{action} on rank {rank}: there are {program.num_segments} {over}s, counted from 0"
                )
            elif program.rank_of_segment[action.segment] != rank:
                holder = program.rank_of_segment[action.segment]
                problems.append(f"{action} on rank {rank}: {over} {action.segment} is on rank {holder}")
            if action.microbatch >= program.microbatches:
                problems.append(
                    f"{action} on rank {rank}: there are {program.microbatches} microbatches, from 0"
                )
        elif action.place is not None and action.unit not in program.units_on(rank):
            problems.append(f"{action} on rank {rank}: no segment on this rank uses unit {action.unit}")
        elif action.kind in (Kind.REDUCE, Kind.ALL_REDUCE) and action.unit in program.frozen:
            problems.append(f"{action} on rank {rank}: unit {action.unit} is frozen")
    return problems


def _completeness(program: Program, over: str) -> list[str]:
    """Every forward once; every backward once, whole (B) or in halves (I and W)."""
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
                f"the backward of {over} {segment} on microbatch {microbatch} is B {b}, I {i}, W {w} times: "
                "must be B once, or I once and W once"
            )
    return problems


def _recomputations(program: Program) -> list[str]:
    """What is computed again comes between a forward and its backward, and something goes on with it."""
    problems = []
    for rank, actions in enumerate(program.ranks):
        left = left_behind(actions)
        useful = left.tapes | left.outputs
        done: set[tuple[Kind, int, int]] = set()
        seen: set[Action] = set()
        for action in actions:
            if action.kind not in COMPUTE:
                continue
            place = action.segment, action.microbatch
            if action.kind is Kind.RECOMPUTE:
                forward = Action(Kind.FORWARD, *place)
                if action in seen:
                    problems.append(f"{action} stands twice on rank {rank}: number what is computed again")
                elif (Kind.FORWARD, *place) not in done:
                    problems.append(f"{action} on rank {rank} comes before {forward}")
                elif (Kind.BACKWARD, *place) in done:
                    problems.append(f"{action} on rank {rank} comes after the backward that it is for")
                elif action not in useful:
                    problems.append(f"{action} on rank {rank}: nothing goes on with what it computes")
                seen.add(action)
            done.add((Kind.BACKWARD if action.kind is Kind.INPUT_GRADIENT else action.kind, *place))
    return problems


def _messages(program: Program) -> list[str]:
    """What goes from rank to rank is sent once and received once, on each edge in the same order."""
    problems = []
    counts = Counter(action for _, action in program.actions() if action.kind in TRANSFERS)
    expected: set[Action] = set()
    for segment in range(program.num_segments - 1):
        if program.rank_of_segment[segment] != program.rank_of_segment[segment + 1]:
            for m in range(program.microbatches):
                sends = Action(Kind.SEND_ACTIVATION, segment, m), Action(Kind.SEND_GRADIENT, segment + 1, m)
                expected.update(sends, (send.other_end for send in sends))
    problems += [
        f"{action} stands {counts[action]} times: must be {'once' if action in expected else 'left out'}"
        for action in sorted(expected | set(counts), key=str)
        if counts[action] != (action in expected)
    ]
    if problems:
        return problems
    sent, received = on_edges(program)
    for edge, messages in sent.items():
        # One that stands on a wrong rank has no partner here, and is told of by `_places`.
        for first, second in zip(messages, received.get(edge, []), strict=False):
            if first != second:
                problems.append(
                    f"from rank {edge[0]} to rank {edge[1]} {first} is sent where {second} is received: "
                    "the order must be the same"
                )
                break
    return problems


Edges = dict[tuple[int, int, Kind], list[Action]]
"""The SENDs from one rank to another, of one kind."""


def on_edges(program: Program) -> tuple[Edges, Edges]:
    """The messages of every edge in the order in which they are sent, and in that of their RECVs."""
    sent: Edges = {}
    received: Edges = {}
    for rank, action in program.actions():
        if action.kind in SENDS:
            sent.setdefault((rank, program.peer(action), action.kind), []).append(action)
        elif action.kind in RECEIVES:
            send = action.other_end
            received.setdefault((program.peer(action), rank, send.kind), []).append(send)
    return sent, received


def _sums(program: Program) -> list[str]:
    """A whole program sums the loss once and each gradient after its last contribution, and then updates."""
    problems = []
    for rank, actions in enumerate(program.ranks):
        counts = Counter(action for action in actions if action.kind not in COMPUTE | TRANSFERS)
        problems += [
            f"{action} stands {count} times on rank {rank}: must be once"
            for action, count in counts.items()
            if count > 1
        ]
        needed = [Action(Kind.LOSS), Action(Kind.UPDATE)]
        if program.placement.optimizer:
            replicated = program.replicated.intersection(program.trained_on(rank))
            needed += [Action(Kind.ALL_REDUCE, unit) for unit in sorted(replicated)]
        problems += [
            f"{action} stands 0 times on rank {rank}: must be once" for action in needed if not counts[action]
        ]
        if actions and actions[-1].kind is not Kind.UPDATE:
            problems.append(f"rank {rank} ends with {actions[-1]}: UPDATE must come last")
        problems += _gradients(program, rank, actions)
    return problems


def _gradients(program: Program, rank: int, actions: Sequence[Action]) -> list[str]:
    """Each contribution to a gradient is reduced, and after the last reduction, over the replicas."""
    problems = []
    open_since: dict[int, Action] = {}
    reduced: dict[int, Action] = {}
    for action in actions:
        if action.kind in CONTRIBUTES and action.segment < program.num_segments:
            for unit in program.units_of_segment[action.segment]:
                if unit not in program.frozen:
                    open_since[unit] = action
                    if reduced.get(unit, action).kind is Kind.ALL_REDUCE:
                        problems.append(
                            f"{action} on rank {rank} comes after {reduced[unit]}, which misses it"
                        )
        elif action.kind is Kind.REDUCE:
            if open_since.pop(action.unit, None) is None:
                problems.append(f"{action} on rank {rank} has nothing to sum")
            reduced[action.unit] = action
        elif action.kind is Kind.ALL_REDUCE:
            if action.unit in open_since or action.unit not in reduced:
                problems.append(f"{action} on rank {rank} must come after the last REDUCE of its unit")
            reduced[action.unit] = action
    problems += [
        f"rank {rank}: no REDUCE of unit {unit} follows {action}" for unit, action in open_since.items()
    ]
    return problems


def _weights(program: Program) -> list[str]:
    """Nothing computes on weights that are not there; each GATHER is used, and freed where it must be."""
    problems = []
    for rank, actions in enumerate(program.ranks):
        present: dict[int, Action] = {}
        unused: set[int] = set()
        for action in actions:
            if action.kind is Kind.GATHER:
                if action.unit in present:
                    problems.append(f"{action} on rank {rank}: {present[action.unit]} has not been freed")
                present[action.unit] = action
                unused.add(action.unit)
            elif action.kind is Kind.FREE:
                if present.pop(action.unit, None) is None:
                    problems.append(f"{action} on rank {rank}: the weights are not there")
                elif action.unit in unused:
                    problems.append(f"{action} on rank {rank}: nothing used the weights since their GATHER")
            elif program.reads_weights(action) and action.segment < program.num_segments:
                for unit in program.units_of_segment[action.segment]:
                    unused.discard(unit)
                    if unit not in present:
                        problems.append(f"{action} on rank {rank}: the weights of unit {unit} are not there")
        if program.placement.weights:
            problems += [f"{action} on rank {rank} is never freed" for action in present.values()]
    return problems


def _deadlocks(program: Program) -> list[str]:
    """No rank waits for ever, neither where messages are buffered nor where each waits for its receiver."""
    problems = []
    timeline = clock(program)
    if not timeline.stuck:
        timeline = clock(program, rendezvous=True)
    for rank, action in timeline.stuck.items():
        done = {
            span.action
            for span in timeline.spans
            if span.rank == rank or span.action.kind in COMPUTE | TRANSFERS
        }
        needs = program.needs(rank, action)
        needs += [action.other_end] if action.kind in SENDS else []
        missing = [need for need in needs if need not in done]
        waits = ", ".join(str(need) for need in missing[:4])
        problems.append(f"{action} on rank {rank} can never start: it waits for {waits}")
    return problems


def activations_beyond(schedule: Program, most: float) -> list[str]:
    """For each rank that holds more activations than ``most``, the first action with which it does, and why.

    In microbatches of a rank's share of the model, as `peak_activations` counts them.
    """
    share = len(schedule.ranks) / schedule.num_segments
    problems = []
    for rank, actions in enumerate(schedule.ranks):
        for action, held in in_flight_after(actions):
            if held * share > most * (1 + 1e-9):  # thirds of a microbatch are not exact
                problems.append(
                    f"{action} on rank {rank}: with it the rank holds {held * share:.4g} microbatches' "
                    f"activations of its share of the model: at most {most:.4g} are allowed"
                )
                break
    return problems
