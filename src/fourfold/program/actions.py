"""What a rank does in one training step, as data.

A program is a list of actions for each pipeline rank, known before the step starts. An action acts on a
*segment* (the embedding, a block, the head) and a microbatch. Schedules write the same type over *stages*
(``layer/schedules.py``); `fourfold.build` expands stages to segments.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fourfold.errors import UserError, choices


class Kind(StrEnum):
    """The kinds of actions; the value is what an action prints as."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    LOSS = "LOSS"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"


COMPUTE: frozenset[Kind] = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT})
"""Actions that run a segment's forward or backward on one microbatch."""

COMMUNICATION: frozenset[Kind] = frozenset({Kind.LOSS, Kind.REDUCE})
"""Actions that start a collective, which runs on while others compute."""

_PATTERN = re.compile(r"(\d+)?(UPDATE|REDUCE|LOSS|F|B|I|W)(\d+)?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: ``2F0`` is the forward of segment 2 on microbatch 0.

    `REDUCE` sums the gradients of a unit over the Batch axis and has no microbatch; `LOSS` sums the loss over
    it, `UPDATE` runs the optimizer, and both have neither.
    """

    kind: Kind
    segment: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        segment = "" if self.segment is None else self.segment
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{segment}{self.kind}{microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read what `str` prints."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UserError(f"'{text}' is not an action: write it like {choices(_EXAMPLES.values())}")
        segment, kind, microbatch = match.groups()
        action = cls(
            Kind(kind),
            None if segment is None else int(segment),
            None if microbatch is None else int(microbatch),
        )
        on_segment = action.kind in COMPUTE or action.kind is Kind.REDUCE
        on_microbatch = action.kind in COMPUTE
        if (action.segment is not None, action.microbatch is not None) != (on_segment, on_microbatch):
            raise UserError(f"'{text}' is not an action: {kind} is written {_EXAMPLES[action.kind]}")
        return action


_EXAMPLES = {
    kind: f"2{kind}0" if kind in COMPUTE else f"2{kind}" if kind is Kind.REDUCE else str(kind)
    for kind in Kind
}


@dataclass(frozen=True)
class Program:
    """The actions of one step, rank by rank.

    Attributes:
        ranks: what each pipeline rank does, in order.
        rank_of_segment: the pipeline rank that holds each segment.
        microbatches: how many microbatches pass through the segments.
        users: for each unit of parameters, the segments that compute with it, first use first: neighbours
            whose parameters were joined, and for the unit of a tied embedding also the last segment.
    """

    ranks: tuple[tuple[Action, ...], ...]
    rank_of_segment: tuple[int, ...]
    microbatches: int
    users: tuple[tuple[int, ...], ...]

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
        """The units whose gradients ``rank`` contributes to."""
        return tuple(
            unit
            for unit, users in enumerate(self.users)
            if any(self.rank_of_segment[s] == rank for s in users)
        )

    def communication_of(self, rank: int) -> list[Action]:
        """What a step sums over the Batch axis on ``rank``: its units, and the loss where it is known."""
        loss = [Action(Kind.LOSS)] if self.rank_of_segment[-1] == rank else []
        return loss + [Action(Kind.REDUCE, unit) for unit in self.units_on(rank)]

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """The (segment, microbatch) pairs whose backward is written as I then W."""
        return frozenset(
            (action.segment, action.microbatch)
            for _, action in self.actions()
            if action.kind is Kind.INPUT_GRADIENT
            and action.segment is not None
            and action.microbatch is not None
        )

    def needs(self, rank: int, action: Action) -> list[Action]:
        """The actions that must have ended before ``action`` may start on ``rank``.

        [Note: dependencies] This is the one place that knows them; `check` and `clock` both ask here.

        - the forward of a segment needs the forward of the segment before it;
        - its backward (B or I) needs its own forward and the backward of the segment after it;
        - a weight gradient needs the input gradient of the same segment and microbatch;
        - a reduction needs the last contribution of its rank to the unit: every weight gradient of every
          user, for every microbatch;
        - the sum of the loss needs the last segment's forward of every microbatch;
        - the update needs every reduction of its rank, and the loss where it is known.
        """
        segment, microbatch = action.segment, action.microbatch
        if action.kind is Kind.UPDATE:
            return self.communication_of(rank)
        if action.kind is Kind.LOSS:
            return [Action(Kind.FORWARD, self.num_segments - 1, index) for index in range(self.microbatches)]
        assert segment is not None
        if action.kind is Kind.REDUCE:
            return [
                self._weights_done(user, index)
                for user in self.users[segment]
                if self.rank_of_segment[user] == rank
                for index in range(self.microbatches)
            ]
        assert microbatch is not None
        if action.kind is Kind.FORWARD:
            return [Action(Kind.FORWARD, segment - 1, microbatch)] if segment > 0 else []
        if action.kind is Kind.WEIGHT_GRADIENT:
            return [Action(Kind.INPUT_GRADIENT, segment, microbatch)]
        needs = [Action(Kind.FORWARD, segment, microbatch)]
        if segment + 1 < self.num_segments:
            needs.append(self._input_done(segment + 1, microbatch))
        return needs

    def _input_done(self, segment: int, microbatch: int) -> Action:
        split = (segment, microbatch) in self.split_backwards
        return Action(Kind.INPUT_GRADIENT if split else Kind.BACKWARD, segment, microbatch)

    def _weights_done(self, segment: int, microbatch: int) -> Action:
        split = (segment, microbatch) in self.split_backwards
        return Action(Kind.WEIGHT_GRADIENT if split else Kind.BACKWARD, segment, microbatch)
