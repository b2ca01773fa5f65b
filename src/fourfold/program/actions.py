"""What a rank does in one training step, as data.

A program is a list of actions for each pipeline rank, known before the step starts. An action acts on a
*segment* (the embedding, a block, the head) and a microbatch, or on a *unit*, the parameters that are
gathered and reduced together. Schedules write the same type over *stages* (``layer/schedules.py``);
`fourfold.build` expands stages to segments.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from fourfold.errors import UserError, choices
from fourfold.specs.placement import REPLICATED, Placement


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

_PATTERN = re.compile(
    r"(\d+)?(UPDATE|ALLREDUCE|REDUCE|GATHER|FREE|SEND_F|RECV_F|SEND_B|RECV_B|LOSS|F|B|I|W|R)(\d+)?(?:\.(\d+))?"
)


@dataclass(frozen=True, slots=True)
class Action:
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
        assert self.kind in _ON_SEGMENT
        assert self.place is not None
        return self.place

    @property
    def microbatch(self) -> int:
        """The microbatch of a compute action, or of a message."""
        assert self.kind in _ON_SEGMENT
        assert self.turn is not None
        return self.turn

    @property
    def unit(self) -> int:
        """The unit of an action on parameters."""
        assert self.kind in _ON_UNIT
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


_ON_SEGMENT = COMPUTE | TRANSFERS
_ON_UNIT = frozenset({Kind.GATHER, Kind.FREE, Kind.REDUCE, Kind.ALL_REDUCE})


def _written(kind: Kind) -> list[tuple[bool, bool]]:
    """Whether a place and a turn are written with a kind of action."""
    if kind in _ON_SEGMENT or kind in (Kind.GATHER, Kind.FREE):
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


@dataclass(frozen=True)
class Program:
    """The actions of one step, rank by rank.

    Attributes:
        ranks: what each pipeline rank does, in order.
        rank_of_segment: the pipeline rank that holds each segment.
        microbatches: how many microbatches pass through the segments.
        users: for each unit of parameters, the segments that compute with it, first use first: its own, and
            for an embedding that the head is tied to also the last.
        frozen: the units that are not trained.
        lookups: the segments whose backward does not read their weights: an embedding.
        replicated: the units whose pieces more ranks hold than those of the fsdp axis.
        placement: where weights, gradients and optimizer state live.
    """

    ranks: tuple[tuple[Action, ...], ...]
    rank_of_segment: tuple[int, ...]
    microbatches: int
    users: tuple[tuple[int, ...], ...]
    frozen: frozenset[int] = frozenset()
    lookups: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    placement: Placement = REPLICATED

    @property
    def num_segments(self) -> int:
        """How many segments the model is cut into."""
        return len(self.rank_of_segment)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every (rank, action), rank by rank."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                yield rank, action

    def units_on(self, rank: int) -> tuple[int, ...]:
        """The units that segments of ``rank`` use."""
        return self._units_on[rank]

    @cached_property
    def _units_on(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(unit for unit, holders in enumerate(self._holders) if rank in holders)
            for rank in range(len(self.ranks))
        )

    def trained_on(self, rank: int) -> tuple[int, ...]:
        """The units whose gradients ``rank`` contributes to."""
        return tuple(unit for unit in self.units_on(rank) if unit not in self.frozen)

    @cached_property
    def units_of_segment(self) -> tuple[tuple[int, ...], ...]:
        """For each segment, the units that it computes with."""
        return tuple(
            tuple(unit for unit, users in enumerate(self.users) if segment in users)
            for segment in range(self.num_segments)
        )

    def reads_weights(self, action: Action) -> bool:
        """Whether an action computes with weights; a weight gradient needs only inputs and gradients."""
        if action.kind in TAKES_TAPE:
            return action.segment not in self.lookups
        return action.kind in FORWARDS

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The segments of each pipeline stage: neighbours on one rank."""
        ranks = self.rank_of_segment
        starts = [0, *(segment for segment in range(1, len(ranks)) if ranks[segment] != ranks[segment - 1])]
        return tuple(range(*pair) for pair in pairwise([*starts, len(ranks)]))

    def holders(self, unit: int) -> frozenset[int]:
        """The pipeline ranks whose segments use a unit."""
        return self._holders[unit]

    @cached_property
    def _holders(self) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(self.rank_of_segment[segment] for segment in users) for users in self.users)

    def peer(self, transfer: Action) -> int:
        """The pipeline rank at the other end of a SEND or RECV."""
        return self.rank_of_segment[transfer.other_end.segment]

    def maker(self, send: Action) -> Action:
        """The compute action whose result a SEND sends."""
        return self._computes(send, forward=send.kind is Kind.SEND_ACTIVATION)

    def user(self, receive: Action) -> Action:
        """The compute action that starts from the message of a RECV."""
        return self._computes(receive, forward=receive.kind is Kind.RECV_ACTIVATION)

    def _computes(self, transfer: Action, *, forward: bool) -> Action:
        if forward:
            return Action(Kind.FORWARD, transfer.segment, transfer.microbatch)
        return self._input_gradient(transfer.segment, transfer.microbatch)

    def message_needed(self, action: Action) -> Action | None:
        """The RECV of what a compute action starts from, None where that is made on the same rank."""
        if action.kind not in STARTS_FROM:
            return None
        receive = Action(STARTS_FROM[action.kind], action.segment, action.microbatch)
        return receive if receive in self._receives else None

    @cached_property
    def _receives(self) -> frozenset[Action]:
        return frozenset(action for _, action in self.actions() if action.kind in RECEIVES)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """The (segment, microbatch) pairs whose backward is written as I then W."""
        return frozenset(
            (action.segment, action.microbatch)
            for _, action in self.actions()
            if action.kind is Kind.INPUT_GRADIENT
        )

    def needs(self, rank: int, action: Action) -> list[Action]:
        """The actions that must have ended before ``action`` may start on ``rank``.

        [Note: dependencies] This is the one place that knows them; `check` and `clock` both ask here.

        - the forward of a segment needs the forward of the segment before it;
        - its backward (B or I) needs its own last forward, which left a tape (F, or R), and the backward of
          the segment after it;
        - a forward that is computed again (R) needs the first one, and what made its input last;
        - what goes from one rank to another needs to be sent: the compute action needs the SEND, which needs
          what made it, and a RECV before it (in a schedule, where nothing is sent yet, what made it itself);
        - a weight gradient needs the input gradient of the same segment and microbatch;
        - what reads weights that are gathered needs the gather before it;
        - a reduction needs the contributions of its rank since the one before: every weight gradient of every
          user of the unit; the sum over replicas needs the unit's last reduction;
        - the sum of the loss needs the last segment's forward of every microbatch, where that is on the rank;
        - the update needs every sum of its rank: reductions, and the loss where it is known.
        """
        if action.kind is Kind.UPDATE:
            return [other for other in self.ranks[rank] if other.kind in SUMS]
        if action.kind is Kind.LOSS:
            if self.rank_of_segment[-1] != rank:
                return []
            return [Action(Kind.FORWARD, self.num_segments - 1, index) for index in range(self.microbatches)]
        if action.kind in _ON_UNIT:
            return self._needs_on_units[rank].get(action, [])
        if action.kind in RECEIVES:
            return []
        segment, microbatch = action.segment, action.microbatch
        if action.kind in SENDS:
            return [self.maker(action)]
        if action.kind is Kind.WEIGHT_GRADIENT:
            return [Action(Kind.INPUT_GRADIENT, segment, microbatch)]
        needs = list(self._needs_on_units[rank].get(action, []))
        first = Action(Kind.FORWARD, segment, microbatch)
        if action.kind is Kind.RECOMPUTE:
            return needs + self._needs_on_forwards[rank].get(action, [first])
        if action.kind is not Kind.FORWARD:
            needs += self._needs_on_forwards[rank].get(action, [first])
        if (receive := self.message_needed(action)) is not None:
            needs += [receive, receive.other_end]
        elif action.kind is Kind.FORWARD and segment > 0:
            needs.append(Action(Kind.FORWARD, segment - 1, microbatch))
        elif action.kind is not Kind.FORWARD and segment + 1 < self.num_segments:
            needs.append(self._input_gradient(segment + 1, microbatch))
        return needs

    def _input_gradient(self, segment: int, microbatch: int) -> Action:
        """The action that computes the gradient of a segment's input: I where the backward is split, or B."""
        split = (segment, microbatch) in self.split_backwards
        return Action(Kind.INPUT_GRADIENT if split else Kind.BACKWARD, segment, microbatch)

    @cached_property
    def _needs_on_forwards(self) -> tuple[dict[Action, list[Action]], ...]:
        """What follows from the order of a rank's forwards: of each R, and of each B or I its own."""
        found: list[dict[Action, list[Action]]] = []
        for actions in self.ranks:
            needs: dict[Action, list[Action]] = {}
            latest: dict[tuple[int, int], Action] = {}
            for action in actions:
                if action.kind not in COMPUTE or action.kind is Kind.WEIGHT_GRADIENT:
                    continue
                place = action.segment, action.microbatch
                first = Action(Kind.FORWARD, *place)
                if action.kind is Kind.RECOMPUTE:
                    below = latest.get((action.segment - 1, action.microbatch))
                    needs[action] = [first] + ([below] if below is not None else [])
                elif action.kind is not Kind.FORWARD:
                    needs[action] = [latest.get(place, first)]
                if action.kind in FORWARDS:
                    latest[place] = action
            found.append(needs)
        return tuple(found)

    @cached_property
    def _needs_on_units(self) -> tuple[dict[Action, list[Action]], ...]:
        """What follows from the order of a rank's actions: for each action, its needs that concern units."""
        found: list[dict[Action, list[Action]]] = []
        for actions in self.ranks:
            needs: dict[Action, list[Action]] = {}
            gathered: dict[int, Action] = {}
            uses: dict[int, list[Action]] = {}
            contributions: dict[int, list[Action]] = {}
            reduced: dict[int, Action] = {}
            for action in actions:
                if action.kind in COMPUTE:
                    units = (
                        self.units_of_segment[action.segment] if action.segment < self.num_segments else ()
                    )
                    if self.reads_weights(action):
                        needs[action] = [gathered[unit] for unit in units if unit in gathered]
                        for unit in units:
                            uses.setdefault(unit, []).append(action)
                    if action.kind in CONTRIBUTES:
                        for unit in units:
                            contributions.setdefault(unit, []).append(action)
                elif action.kind is Kind.GATHER:
                    gathered[action.unit] = action
                    uses.pop(action.unit, None)
                elif action.kind is Kind.FREE:
                    needs[action] = uses.pop(action.unit, [])
                    gathered.pop(action.unit, None)
                elif action.kind is Kind.REDUCE:
                    needs[action] = contributions.pop(action.unit, [])
                    reduced[action.unit] = action
                elif action.kind is Kind.ALL_REDUCE:
                    needs[action] = [reduced[action.unit]] if action.unit in reduced else []
            found.append(needs)
        return tuple(found)
