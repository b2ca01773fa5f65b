"""Pipeline schedules as pure functions: the order in which each rank runs its stages' microbatches.

A schedule is a `Program` whose segments are stages and whose actions are only compute. Stages are placed on
ranks in a *loop* (stage s on rank s % P; with one stage a rank, the plain pipeline) or in a *V* (down the
ranks and up again, so that the first and the last stage share rank 0). Gradient accumulation is a pipeline of
one stage: `one_forward_one_backward` on one rank runs each microbatch forward and backward in turn and holds
the activations of one.

Every schedule is right for any number of ranks and microbatches. P ranks, M microbatches, v stages a rank;
F, I, W and B = I + W: seconds of one microbatch on a rank's share of the model. A bubble is the time beyond
M(F+B).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from fourfold.errors import UserError
from fourfold.layer.list_scheduling import loop_placement, over_stages
from fourfold.layer.schedule_file import read_schedule
from fourfold.layer.schedule_search import MOST_CHUNKS, quickest
from fourfold.layer.v_schedules import dual_pipe_v, zero_bubble_v
from fourfold.program.actions import Action, Kind
from fourfold.program.check import activations_beyond
from fourfold.program.clock import Times
from fourfold.program.program import Program
from fourfold.specs.layout import Layout
from fourfold.specs.schedule_name import ScheduleName


def schedule(
    name: str | ScheduleName,
    *,
    ranks: int,
    microbatches: int,
    times: Times | None = None,
    most_stages: int | None = None,
) -> Program:
    """Return a schedule by its name, as ``1f1b`` or ``interleaved2``, or from a file.

    Args:
        name: a name, with its number where it has one, or the path of a CSV or JSON file.
        ranks: pipeline ranks.
        microbatches: microbatches of a step.
        times: what ``auto`` is quickest for; the others do not depend on it.
        most_stages: more stages than this cannot be filled, as a model has only so many layers.

    Raises:
        UserError: with every mistake.
    """
    problems: list[str] = []
    if isinstance(name, str):
        try:
            name = ScheduleName.parse(name)
        except UserError as error:
            problems += error.messages
    problems += [
        f"{what}={value}: must be at least 1"
        for what, value in (("ranks", ranks), ("microbatches", microbatches))
        if value < 1
    ]
    if problems:
        raise UserError(*problems)
    assert isinstance(name, ScheduleName)
    times = Times() if times is None else times
    if name.is_file:
        program = read_schedule(name.name, ranks=ranks, microbatches=microbatches)
    elif name.name == "auto":
        program = quickest(
            named_schedules(ranks=ranks, microbatches=microbatches, depth=name.number),
            ranks=ranks,
            microbatches=microbatches,
            times=times,
            most_activations=name.number,
            most_stages=most_stages,
        )
    else:
        program = named(name, ranks, microbatches)
    most = most_activations(name, ranks=ranks, microbatches=microbatches)
    if most is not None:
        beyond = activations_beyond(program, most)
        assert not beyond, f"schedule {name} breaks its promise: {beyond[0]}"
    check_stages(program, name, most_stages)
    return program


def check_stages(program: Program, name: ScheduleName, most_stages: int | None) -> None:
    """Raise `UserError` where a schedule has more stages than can be filled."""
    stages, ranks = program.num_segments, len(program.ranks)
    if most_stages is None or stages <= most_stages:
        return
    each = most_stages // ranks
    if not each:
        advice = f"{most_stages} pipeline ranks or fewer"
    elif name.is_file:
        advice = (
            f"a schedule of {each * ranks} stages or fewer, as from fourfold schedule auto --stages {ranks} "
            f"--microbatches {program.microbatches} --layers {most_stages} --save {name}"
        )
    else:
        advice = "1f1b, of one stage a rank" if each == 1 else f"one of {each} stages a rank or fewer"
    raise UserError(
        f"schedule {name} cuts the model into {stages} stages on {ranks} ranks, but there are layers for "
        f"{most_stages}: use {advice}, or {stages} layers or more"
    )


def most_activations(name: ScheduleName, *, ranks: int, microbatches: int) -> float | None:
    """The most activations that a schedule promises to hold on any rank, whatever the times.

    In microbatches of a rank's share of the model, as `peak_activations` counts. None where there is no
    promise but that of all microbatches: ``gpipe``, ``bfs``, a file, ``auto`` without a number.
    """
    if name.is_file:
        return None
    v = name.number or 1
    longest = -(-microbatches // max(microbatches // ranks, 1))
    bounds = {
        "1f1b": name.number or ranks,
        "interleaved": (2 * (ranks - 1) + (v - 1) * longest + 1) / v,
        "zb-h1": ranks,
        "zb-h2": 2 * ranks - 1,
        "zbv": ranks,
        "dualpipev": ranks + 0.5,
        "auto": name.number,
    }
    bound = bounds.get(name.name)
    return None if bound is None else min(bound, microbatches)


def microbatches_of(layout: Layout, *, otherwise: int) -> int:
    """How many microbatches a step has that nobody gave a number of: a schedule's file is for its own.

    Raises `UserError` where that cannot be read.
    """
    if layout.schedule.is_file:
        return read_schedule(layout.schedule.name).microbatches
    return otherwise


def schedule_of(layout: Layout, *, microbatches: int, layers: int) -> Program:
    """Return the schedule of a layout for a model of so many layers, or raise as `schedule` does."""
    return schedule(layout.schedule, ranks=layout.pp, microbatches=microbatches, most_stages=layers)


def named_schedules(*, ranks: int, microbatches: int, depth: int | None = None) -> dict[str, Program]:
    """Every named schedule that does not depend on times, by the name that a user writes.

    Up to ``MOST_CHUNKS`` stages a rank; 1F1B with its own depth, with the one that hides messages, and with
    ``depth``.
    """
    depths = {2 * ranks - 1} | ({depth} if depth else set())
    names = ["gpipe", "1f1b", *[f"1f1b{number}" for number in sorted(depths - {ranks})]]
    names += [f"{name}{chunks}" for name in ("interleaved", "bfs") for chunks in range(2, MOST_CHUNKS + 1)]
    names += ["zb-h1", "zb-h2", "zbv", "dualpipev"]
    return {name: named(ScheduleName.parse(name), ranks, microbatches) for name in names}


def named(name: ScheduleName, ranks: int, microbatches: int) -> Program:
    """A schedule that does not depend on times, and is not checked again; see `schedule`."""
    sizes: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches}
    chunks = name.number or 1
    generators: dict[str, Callable[[], Program]] = {
        "gpipe": lambda: gpipe(**sizes),
        "1f1b": lambda: one_forward_one_backward(**sizes, depth=name.number),
        "interleaved": lambda: interleaved(**sizes, chunks=chunks),
        "bfs": lambda: breadth_first(**sizes, chunks=chunks),
        "zb-h1": lambda: zero_bubble(**sizes),
        "zb-h2": lambda: zero_bubble(**sizes, deep=True),
        "zbv": lambda: zero_bubble_v(**sizes),
        "dualpipev": lambda: dual_pipe_v(**sizes),
    }
    return generators[name.name]()


def gpipe(*, ranks: int, microbatches: int) -> Program:
    """All forwards, then all backwards (Huang et al. 2019, GPipe).

    Bubble (P-1)(F+B); every rank holds the activations of all M microbatches.
    """
    return breadth_first(ranks=ranks, microbatches=microbatches, chunks=1)


def one_forward_one_backward(*, ranks: int, microbatches: int, depth: int | None = None) -> Program:
    """1F1B (Narayanan et al. 2021, PipeDream-flush): after a warm-up, one forward and one backward in turn.

    The bubble of GPipe, but rank r holds the activations of at most P-r microbatches. With a ``depth`` of D
    the first rank holds D, and the others in proportion. 2P-1 hides the time of messages ("eager 1F1B");
    fewer than P take less memory and more time.
    """
    orders = []
    for rank in range(ranks):
        behind = ranks - 1 - rank
        extra = 0 if depth is None else round((depth - ranks) * behind / max(ranks - 1, 1))
        stage = [(rank, m) for m in range(microbatches)]
        orders.append(_alternating(stage, stage, warm_up=behind + extra))
    return over_stages(orders, loop_placement(ranks, 1), microbatches)


def interleaved(*, ranks: int, microbatches: int, chunks: int) -> Program:
    """Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM): 1F1B over v stages a rank, placed in a loop.

    Bubble (P-1)(F+B)/v where M >= P. Microbatches pass through the stages in groups of P, or where P does not
    divide M of a few more; where it does, the first rank holds (P-1)/v microbatches more than under 1F1B.
    """
    groups = _groups(microbatches, max(microbatches // ranks, 1))
    forward_chunks = [(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    backward_chunks = [(chunk, m) for group in groups for chunk in reversed(range(chunks)) for m in group]
    orders = []
    for rank in range(ranks):
        forwards = [(chunk * ranks + rank, m) for chunk, m in forward_chunks]
        backwards = [(chunk * ranks + rank, m) for chunk, m in backward_chunks]
        per_hop = 1 if chunks == 1 else 2
        warm_up = per_hop * (ranks - 1 - rank) + (chunks - 1) * len(groups[0])
        orders.append(_alternating(forwards, backwards, warm_up=warm_up))
    return over_stages(orders, loop_placement(ranks, chunks), microbatches)


def breadth_first(*, ranks: int, microbatches: int, chunks: int) -> Program:
    """Looped breadth-first (Lamy-Poirier 2023): all microbatches pass one stage before the next of the rank.

    Bubble (P-1)(F+B)/v where M >= P; every rank holds the activations of all M microbatches. With sharded
    weights it gathers each stage only once each way.
    """
    orders = []
    for rank in range(ranks):
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        forwards = [Action(Kind.FORWARD, stage, m) for stage in stages for m in range(microbatches)]
        backwards = [Action(Kind.BACKWARD, stage, m) for stage in stages[::-1] for m in range(microbatches)]
        orders.append(forwards + backwards)
    return over_stages(orders, loop_placement(ranks, chunks), microbatches)


def zero_bubble(*, ranks: int, microbatches: int, deep: bool = False) -> Program:
    """ZB-H1, or ``deep`` ZB-H2 (Qi et al. 2023): weight gradients apart, where a rank would stand idle.

    H1 keeps the first rank's activations of 1F1B on every rank, P microbatches: bubble (P-1)(F+I-W) where
    W <= F and W <= I. H2 warms up with twice the forwards and holds 2P-1. From its own first to its own last
    action a rank then stands idle (P-1)(F+I-2W), nothing where all are equal; but a step ends on all ranks at
    once, which adds (P-1)W: the first rank starts (P-1)F before the last.
    """
    per_hop, most = (2, 2 * ranks - 1) if deep else (1, ranks)
    orders = []
    for rank in range(ranks):
        warm_up = min(per_hop * (ranks - 1 - rank), microbatches)
        actions = [Action(Kind.FORWARD, rank, m) for m in range(warm_up)]
        weights = 0
        for m in range(microbatches):
            forward = warm_up + m
            # A weight gradient makes room for a forward; later on it fills the wait for the next gradient.
            if (forward - weights >= most) if forward < microbatches else (weights < m):
                actions.append(Action(Kind.WEIGHT_GRADIENT, rank, weights))
                weights += 1
            if forward < microbatches:
                actions.append(Action(Kind.FORWARD, rank, forward))
            actions.append(Action(Kind.INPUT_GRADIENT, rank, m))
        orders.append(actions + [Action(Kind.WEIGHT_GRADIENT, rank, m) for m in range(weights, microbatches)])
    return over_stages(orders, loop_placement(ranks, 1), microbatches)


def _groups(count: int, groups: int) -> list[range]:
    """Cut 0, 1, ... into runs of nearly equal length, the longest first."""
    longest = -(-count // groups)
    long_ones = count - (longest - 1) * groups
    cuts = [0]
    for group in range(groups):
        cuts.append(cuts[-1] + (longest if group < long_ones else longest - 1))
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _alternating(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], *, warm_up: int
) -> list[Action]:
    """So many forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    actions = [Action(Kind.FORWARD, *pair) for pair in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [Action(Kind.FORWARD, *forward), Action(Kind.BACKWARD, *backward)]
    left = len(forwards) - warm_up
    return actions + [Action(Kind.BACKWARD, *pair) for pair in backwards[left:]]
