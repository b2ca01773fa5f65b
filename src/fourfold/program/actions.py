"""What a rank does in one training step, as data.

An action acts on a *segment* (the embedding, a block, the head) and a microbatch, or on a *unit*, the
parameters that are gathered and reduced together. A `Program` has a list of actions for each pipeline rank.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from fourfold.errors import UserError, choices


class Kind(StrEnum):
    """The kinds of actions; the value is what an action prints as."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECOMPUTE = "R"
    GATHER = "GATHER"
    FREE = "FREE"
    REDUCE = "REDUCE"
    ALL_REDUCE = "ALLREDUCE"
    SEND_ACTIVATION = "SEND_F"
    RECV_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECV_GRADIENT = "RECV_B"
    LOSS = "LOSS"
    UPDATE = "UPDATE"

    __hash__ = str.__hash__  # of the same text; Enum's own is Python code, and actions are hashed a lot


FORWARDS: frozenset[Kind] = frozenset({Kind.FORWARD, Kind.RECOMPUTE})
"""Actions that run a segment's forward on one microbatch, for the first time or again."""

TAKES_TAPE: frozenset[Kind] = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
"""Actions that go back through what a forward kept: a whole backward, or its input gradient."""

COMPUTE: frozenset[Kind] = FORWARDS | TAKES_TAPE | {Kind.WEIGHT_GRADIENT}
"""Actions that run a segment's forward or backward on one microbatch."""

SENDS: frozenset[Kind] = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
"""Actions that start to send what a segment computed to the pipeline rank that goes on with it."""

RECEIVES: frozenset[Kind] = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT})
"""Actions that make room for a message; it has come by the compute action that needs it."""

TRANSFERS: frozenset[Kind] = SENDS | RECEIVES

COMMUNICATION: frozenset[Kind] = TRANSFERS | {Kind.GATHER, Kind.REDUCE, Kind.ALL_REDUCE, Kind.LOSS}
"""Actions that start a communication, which runs on while others compute."""

CONTRIBUTES: frozenset[Kind] = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRADIENT})
"""Actions that end a microbatch's contribution to a segment's weight gradients."""

SUMS: frozenset[Kind] = frozenset({Kind.REDUCE, Kind.ALL_REDUCE, Kind.LOSS})
"""Collectives that the update waits for."""

ON_SEGMENT: frozenset[Kind] = COMPUTE | TRANSFERS
"""Actions on a segment and a microbatch."""

ON_UNIT: frozenset[Kind] = frozenset({Kind.GATHER, Kind.FREE, Kind.REDUCE, Kind.ALL_REDUCE})
"""Actions on the parameters of a unit."""

_PATTERN = re.compile(
    r"(\d+)?(UPDATE|ALLREDUCE|REDUCE|GATHER|FREE|SEND_F|RECV_F|SEND_B|RECV_B|LOSS|F|B|I|W|R)(\d+)?(?:\.(\d+))?"
)


class Action(NamedTuple):
    """One thing to do: ``2F0`` is the forward of segment 2 on microbatch 0.

    ``2R0`` computes it again, since what it kept was dropped; ``2R0.1`` once more.

    On a unit: `GATHER` brings its weights to all ranks that share it, `FREE` releases them, `REDUCE` sums its
    gradients to where they belong, `ALL_REDUCE` sums those sums over the replicas of a sharded model.
    ``2GATHER1`` is the second gather of unit 2 in the step, ``2FREE1`` what ends it; ``2REDUCE`` is its only
    reduction, ``2REDUCE1`` the second of several. `LOSS` sums the loss over all ranks, `UPDATE` runs the
    optimizer.

    Between pipeline ranks: ``2SEND_F0`` sends the output of ``2F0``, and ``3RECV_F0`` receives it for
    ``3F0``; ``3SEND_B0`` sends the gradient that ``3B0`` (or ``3I0``) computed, ``2RECV_B0`` receives it.

    Attributes:
        kind: what to do.
        place: the segment, or the unit, that it is done to.
        turn: the microbatch of a segment's action; which of several of a unit's.
        repeat: of an R, how many have come before it.
    """

    kind: Kind
    place: int | None = None
    turn: int | None = None
    repeat: int = 0

    @property
    def segment(self) -> int:
        """The segment of a compute action, or of a message."""
        assert self.kind in ON_SEGMENT
        assert self.place is not None
        return self.place

    @property
    def microbatch(self) -> int:
        """The microbatch of a compute action, or of a message."""
        assert self.kind in ON_SEGMENT
        assert self.turn is not None
        return self.turn

    @property
    def unit(self) -> int:
        """The unit of an action on parameters."""
        assert self.kind in ON_UNIT
        assert self.place is not None
        return self.place

    @property
    def other_end(self) -> "Action":
        """Of a SEND the RECV that gets its message; of a RECV the SEND."""
        kind, step = _OTHER_END[self.kind]
        return Action(kind, self.segment + step, self.microbatch)

    def __str__(self) -> str:
        place = "" if self.place is None else self.place
        turn = "" if self.turn is None else self.turn
        return f"{place}{self.kind}{turn}" + (f".{self.repeat}" if self.repeat else "")

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read what `str` prints."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UserError(f"'{text}' is not an action: write it like {choices(_EXAMPLES.values())}")
        place, kind, turn, repeat = match.groups()
        action = cls(
            Kind(kind),
            None if place is None else int(place),
            None if turn is None else int(turn),
            int(repeat or 0),
        )
        wrong_repeat = repeat is not None and (kind != Kind.RECOMPUTE or not action.repeat)
        if (place is not None, turn is not None) not in _written(action.kind) or wrong_repeat:
            raise UserError(f"'{text}' is not an action: {kind} is written {_EXAMPLES[action.kind]}")
        return action


def _written(kind: Kind) -> list[tuple[bool, bool]]:
    """Whether a place and a turn are written with a kind of action."""
    if kind in ON_SEGMENT or kind in (Kind.GATHER, Kind.FREE):
        return [(True, True)]
    if kind is Kind.REDUCE:
        return [(True, False), (True, True)]
    return [(kind is Kind.ALL_REDUCE, False)]


_OTHER_END = {
    Kind.SEND_ACTIVATION: (Kind.RECV_ACTIVATION, 1),
    Kind.RECV_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.SEND_GRADIENT: (Kind.RECV_GRADIENT, -1),
    Kind.RECV_GRADIENT: (Kind.SEND_GRADIENT, 1),
}
"""Of a message: the kind of its other end, and how many segments further that is."""

STARTS_FROM = {
    Kind.FORWARD: Kind.RECV_ACTIVATION,
    Kind.BACKWARD: Kind.RECV_GRADIENT,
    Kind.INPUT_GRADIENT: Kind.RECV_GRADIENT,
}
"""The kind of message that a compute action may start from."""

_EXAMPLES = {kind: f"{'2' * place}{kind}{'0' * turn}" for kind in Kind for place, turn in _written(kind)[:1]}
