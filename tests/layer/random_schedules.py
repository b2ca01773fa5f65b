"""Random schedules, right and broken, for property tests."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from fourfold.layer.list_scheduling import over_stages
from fourfold.layer.transfers import with_transfers
from fourfold.program import COMPUTE, Action, Kind, Program


@st.composite
def right_schedules(draw: st.DrawFn, min_ranks: int = 1) -> Program:
    """Some order of all actions that meets every dependency, over stages on any ranks."""
    ranks = draw(st.integers(min_ranks, 4))
    more = draw(st.lists(st.integers(0, ranks - 1), max_size=4))
    placement = tuple(draw(st.permutations([*range(ranks), *more])))
    microbatches = draw(st.integers(1, 4))
    split = {(stage, m): draw(st.booleans()) for stage in range(len(placement)) for m in range(microbatches)}

    def after(action: Action) -> list[Action]:
        """What can come next, once this is done: the rest of the microbatch's way."""
        stage, m = action.segment, action.microbatch
        last = len(placement) - 1
        found = []
        if action.kind is Kind.FORWARD and stage < last:
            found.append(Action(Kind.FORWARD, stage + 1, m))
        elif action.kind is Kind.FORWARD or (action.kind is not Kind.WEIGHT_GRADIENT and stage > 0):
            target = stage if action.kind is Kind.FORWARD else stage - 1
            kind = Kind.INPUT_GRADIENT if split[target, m] else Kind.BACKWARD
            found.append(Action(kind, target, m))
        if action.kind is Kind.INPUT_GRADIENT:
            found.append(Action(Kind.WEIGHT_GRADIENT, stage, m))
        return found

    ready = [Action(Kind.FORWARD, 0, m) for m in range(microbatches)]
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        orders[placement[action.segment]].append(action)
        ready += after(action)
    return over_stages(orders, placement, microbatches)


@st.composite
def reordered_schedules(draw: st.DrawFn) -> Program:
    """A right schedule in which one rank's actions stand in another order: right or wrong."""
    program = draw(right_schedules(min_ranks=2))
    rank = draw(st.integers(0, len(program.ranks) - 1))
    actions = list(program.ranks[rank])
    if draw(st.booleans()):
        actions = list(draw(st.permutations(actions)))
    else:
        first, second = (draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        actions.insert(second, actions.pop(first))
    return replace(program, ranks=(*program.ranks[:rank], tuple(actions), *program.ranks[rank + 1 :]))


def can_run(program: Program) -> bool:
    """Whether ranks come to the end that each do their next action as soon as they can: by trying."""
    left = [list(actions) for actions in program.ranks]
    done: set[tuple[str, int, int]] = set()
    last = program.num_segments - 1

    def ready(action: Action) -> bool:
        stage, m = action.segment, action.microbatch
        if action.kind is Kind.FORWARD:
            return stage == 0 or ("F", stage - 1, m) in done
        if action.kind is Kind.WEIGHT_GRADIENT:
            return ("B", stage, m) in done
        return ("F", stage, m) in done and (stage == last or ("B", stage + 1, m) in done)

    going = True
    while going:
        going = False
        for actions in left:
            while actions and ready(actions[0]):
                action = actions.pop(0)
                kind = {Kind.FORWARD: "F", Kind.WEIGHT_GRADIENT: "W"}.get(action.kind, "B")
                done.add((kind, action.segment, action.microbatch))
                going = True
    return not any(left)


@st.composite
def broken_schedules(draw: st.DrawFn) -> tuple[str, Program]:
    """A right schedule with one fault, with its messages or without them, and what kind of fault."""
    program = draw(right_schedules(min_ranks=2))
    program = with_transfers(program) if draw(st.booleans()) else program
    fault = draw(st.sampled_from(sorted(_FAULTS)))
    rank = draw(st.sampled_from([r for r, actions in enumerate(program.ranks) if actions]))
    place = draw(st.integers(0, len(program.ranks[rank]) - 1))
    orders = [list(actions) for actions in program.ranks]
    _FAULTS[fault](orders, rank, place)
    return fault, replace(program, ranks=tuple(map(tuple, orders)))


Orders = list[list[Action]]


def _drop(orders: Orders, rank: int, place: int) -> None:
    del orders[rank][place]


def _double(orders: Orders, rank: int, place: int) -> None:
    orders[rank].append(orders[rank][place])


def _move_to_another_rank(orders: Orders, rank: int, place: int) -> None:
    orders[(rank + 1) % len(orders)].append(orders[rank].pop(place))


def _wrong_microbatch(orders: Orders, rank: int, place: int) -> None:
    action = orders[rank][place]
    orders[rank][place] = action._replace(turn=action.microbatch + 1)


def _wrong_stage(orders: Orders, rank: int, place: int) -> None:
    action = orders[rank][place]
    orders[rank][place] = action._replace(place=action.segment + 1)


def _backward_before_its_forward(orders: Orders, rank: int, place: int) -> None:
    actions = orders[rank]
    pair = actions[place].segment, actions[place].microbatch
    of_pair = [
        index
        for index, action in enumerate(actions)
        if action.kind in COMPUTE and (action.segment, action.microbatch) == pair
    ]
    first, second = of_pair[:2]
    actions[first], actions[second] = actions[second], actions[first]


_FAULTS: dict[str, Callable[[Orders, int, int], None]] = {
    "drop": _drop,
    "double": _double,
    "move to another rank": _move_to_another_rank,
    "wrong microbatch": _wrong_microbatch,
    "wrong stage": _wrong_stage,
    "backward before its forward": _backward_before_its_forward,
}
