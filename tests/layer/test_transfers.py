"""Messages between pipeline ranks: where they stand, that nobody waits for ever, what has arrived."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest

from fourfold.errors import UserError
from fourfold.layer.schedules import named_schedules, schedule
from fourfold.layer.transfers import arrived, with_transfers
from fourfold.program import COMPUTE, Action, Kind, Program, check
from fourfold.program.actions import RECEIVES, SENDS
from fourfold.program.check import on_edges
from fourfold.program.clock import peak_in_flight
from fourfold.specs import SCHEDULE_RULES
from tests.programs import parsed, written

NUMBERS = {"1f1b": (None, 1, 5), "interleaved": (1, 2, 3), "bfs": (1, 2, 3), "auto": (None,)}
"""Which numbers to write after a name, where one may stand there."""


def names() -> list[str]:
    return [
        name if number is None else f"{name}{number}"
        for name in SCHEDULE_RULES
        for number in NUMBERS.get(name, (None,))
    ]


def sampled(count: int, *, most: int = 8) -> Iterator[tuple[str, int, int]]:
    """Names with up to ``most`` ranks and twice as many microbatches, the same ones each time."""
    draw = random.Random(0)
    for _ in range(count):
        yield draw.choice(names()), draw.randint(2, most), draw.randint(1, 2 * most)


def from_text(*ranks: str, rank_of_segment: tuple[int, ...], microbatches: int) -> Program:
    return Program(
        ranks=tuple(map(parsed, ranks)),
        rank_of_segment=rank_of_segment,
        microbatches=microbatches,
        users=tuple((segment,) for segment in range(len(rank_of_segment))),
    )


def use_of(program: Program, receive: Action) -> Action:
    """The compute action that a message is for."""
    if receive.kind is Kind.RECV_ACTIVATION:
        return Action(Kind.FORWARD, receive.segment, receive.microbatch)
    split = (receive.segment, receive.microbatch) in program.split_backwards
    return Action(Kind.INPUT_GRADIENT if split else Kind.BACKWARD, receive.segment, receive.microbatch)


def test_one_rank_sends_nothing() -> None:
    program = schedule("interleaved3", ranks=1, microbatches=2)
    assert with_transfers(program) is program


def test_a_message_leaves_when_it_is_made_and_is_awaited_before_it_comes() -> None:
    program = with_transfers(schedule("1f1b", ranks=2, microbatches=3))
    assert written(program, 0) == (
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2"
    )
    assert written(program, 1) == (
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2"
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_schedule_has_its_messages_in_order_and_ahead(seed: int) -> None:
    """A message is sent right after what makes it; its RECV stands at least one action before its use, and
    on each edge in the order of sending. No deadlock, whatever the transport: `check` runs both.
    """
    # PP-16
    for name, ranks, microbatches in list(sampled(48))[seed::4]:
        program = with_transfers(schedule(name, ranks=ranks, microbatches=microbatches))
        check(program)
        sent, received = on_edges(program)
        assert sent == received
        for actions in program.ranks:
            place = {action: index for index, action in enumerate(actions)}
            first = next(action for action in actions if action.kind in COMPUTE)
            for index, action in enumerate(actions):
                if action.kind in SENDS:
                    assert actions[index - 1] == program.maker(action)
                elif action.kind in RECEIVES:
                    use = use_of(program, action)
                    between = [a for a in actions[index : place[use]] if a.kind in COMPUTE]
                    assert between or use == first, f"{name} {ranks} {microbatches}: {action} for {use}"


def happens_before(program: Program) -> dict[Action, set[Action]]:
    """For each compute action, all compute actions that are over when it starts, by the graph alone."""
    follows: dict[Action, list[Action]] = {}
    for actions in program.ranks:
        compute = [action for action in actions if action.kind in COMPUTE]
        for before, after in zip([None, *compute], compute, strict=False):
            follows[after] = [before] if before else []
    for _, action in program.actions():
        if action.kind in RECEIVES:
            follows[use_of(program, action)].append(program.maker(action.other_end))
    past: dict[Action, set[Action]] = {}

    def visit(action: Action) -> set[Action]:
        if action not in past:
            past[action] = set().union(*({a} | visit(a) for a in follows[action]))
        return past[action]

    for action in follows:
        visit(action)
    return past


def test_what_has_arrived_has_arrived() -> None:
    """Nothing is held to have arrived that may not have; and each send whose receiver answers later counts
    once, by the time that the answer is used.
    """
    for name, ranks, microbatches in sampled(40, most=4):
        program = with_transfers(schedule(name, ranks=ranks, microbatches=microbatches))
        past = happens_before(program)
        for rank, actions in enumerate(program.ranks):
            found = arrived(program, rank)
            listed = [send for sends in found.values() for send in sends]
            open_sends: set[Action] = set()
            for action in actions:
                if action.kind in SENDS:
                    open_sends.add(action)
                elif action.kind in COMPUTE:
                    for send in found.get(action, ()):
                        assert use_of(program, send.other_end) in past[action]
                        open_sends.remove(send)
            answered = []
            for send in (action for action in actions if action.kind in SENDS):
                peer = program.peer(send)
                theirs = program.ranks[peer]
                later = theirs[theirs.index(use_of(program, send.other_end)) :]
                if any(a.kind in SENDS and program.peer(a) == rank for a in later):
                    answered.append(send)
            assert sorted(map(str, listed)) == sorted(map(str, answered)), f"{name} {ranks} {microbatches}"


def most_open(program: Program, rank: int) -> int:
    """The most sends of a rank that are not known to have arrived, up to its last forward.

    After that no activations come back that would tell of gradients.
    """
    actions, found = program.ranks[rank], arrived(program, rank)
    last = max(index for index, action in enumerate(actions) if action.kind is Kind.FORWARD)
    changes = ((action.kind in SENDS) - len(found.get(action, ())) for action in actions[:last])
    return max(accumulate(changes))


@pytest.mark.parametrize("name", ["1f1b", "1f1b8", "interleaved2", "zb-h1", "zbv"])
def test_few_sends_are_open_however_many_microbatches(name: str) -> None:
    """Activations sent are in flight here, gradients on the rank before: no more than these together."""
    for microbatches in (16, 64):
        plain = schedule(name, ranks=4, microbatches=microbatches)
        program, peaks = with_transfers(plain), peak_in_flight(plain)
        for rank in range(4):
            assert most_open(program, rank) <= peaks[rank] + max(peaks)
    assert most_open(with_transfers(schedule("1f1b", ranks=2, microbatches=64)), 0) == 2
    assert most_open(with_transfers(schedule("1f1b", ranks=2, microbatches=64)), 1) == 2


def most_awaited(program: Program, rank: int) -> int:
    """The most RECVs of a rank that stand ready and are not used yet."""
    changes = [
        1 if action.kind in RECEIVES else -1
        for action in program.ranks[rank]
        if action.kind in RECEIVES or program.message_needed(action) is not None
    ]
    assert sum(changes) == 0
    return max(accumulate(changes))


def test_few_receive_buffers_are_open_however_many_microbatches() -> None:
    """But breadth-first, and where groups are longer than the ranks: what goes round waits for its turn."""
    found = {}
    for microbatches in (8, 32):
        for name, plain in named_schedules(ranks=4, microbatches=microbatches).items():
            program = with_transfers(plain)
            found[name, microbatches] = [most_awaited(program, rank) for rank in range(4)]
    for (name, microbatches), most in found.items():
        if name.startswith("bfs"):
            assert most == [microbatches - 2, 2, 2, microbatches - 2]
        else:
            assert set(most) <= {1, 2, 3, 4}, name
            assert most == found[name, 8]
    uneven = with_transfers(schedule("interleaved2", ranks=4, microbatches=11))
    assert [most_awaited(uneven, rank) for rank in range(4)] == [4, 4, 4, 7]


def swapped(program: Program, rank: int, first: str, second: str) -> Program:
    there = {Action.parse(first): Action.parse(second), Action.parse(second): Action.parse(first)}
    actions = tuple(there.get(action, action) for action in program.ranks[rank])
    return replace(program, ranks=(*program.ranks[:rank], actions, *program.ranks[rank + 1 :]))


def without(program: Program, rank: int, action: str) -> Program:
    actions = tuple(a for a in program.ranks[rank] if str(a) != action)
    return replace(program, ranks=(*program.ranks[:rank], actions, *program.ranks[rank + 1 :]))


def test_messages_out_of_order_are_refused() -> None:
    program = with_transfers(schedule("gpipe", ranks=2, microbatches=3))
    check(program)
    with pytest.raises(UserError) as error:
        check(swapped(program, 1, "1RECV_F1", "1RECV_F2"))
    assert error.value.messages == (
        "from rank 0 to rank 1 0SEND_F1 is sent where 0SEND_F2 is received: the order must be the same",
    )
    with pytest.raises(UserError, match="from rank 1 to rank 0 1SEND_B1 is sent where 1SEND_B0 is received"):
        check(swapped(program, 1, "1SEND_B0", "1SEND_B1"))


def test_a_message_without_its_other_end_is_refused() -> None:
    program = with_transfers(schedule("1f1b", ranks=2, microbatches=2))
    with pytest.raises(UserError, match="1RECV_F1 stands 0 times: must be once"):
        check(without(program, 1, "1RECV_F1"))
    with pytest.raises(UserError, match="1SEND_B0 stands 0 times: must be once"):
        check(without(program, 1, "1SEND_B0"))
    extra = replace(program, ranks=((*program.ranks[0], Action.parse("0SEND_F1")), program.ranks[1]))
    with pytest.raises(UserError, match="0SEND_F1 stands 2 times: must be once"):
        check(extra)
    nowhere = replace(program, ranks=(program.ranks[0], (*program.ranks[1], Action.parse("1SEND_F1"))))
    with pytest.raises(UserError, match="1SEND_F1"):
        check(nowhere)


def test_a_message_received_too_late_is_refused() -> None:
    """A RECV after its use."""
    program = from_text(
        "0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0", rank_of_segment=(0, 1), microbatches=1
    )
    with pytest.raises(UserError, match="1F0 on rank 1 can never start: it waits for 1RECV_F0"):
        check(program)
