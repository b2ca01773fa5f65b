"""The actions of one training step, rank by rank, and what each of them needs.

A program is known before the step starts. Schedules write the same type over *stages*
(``layer/schedules.py``); `fourfold.build` expands stages to segments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fourfold.program.actions import (
    COMPUTE,
    CONTRIBUTES,
    FORWARDS,
    ON_UNIT,
    RECEIVES,
    SENDS,
    STARTS_FROM,
    SUMS,
    TAKES_TAPE,
    Action,
    Kind,
)
from fourfold.specs.placement import REPLICATED, Placement


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

        [Note: dependencies] `check` and `clock` both ask here. What has to be quick knows those between
        stages by itself: `schedule_search.step_seconds`, `list_scheduling` and `planner.pipeline`. For each a
        test holds the seconds of a step to those of `clock`: in `tests/layer/test_schedule_search.py`,
        `tests/layer/test_list_scheduling.py` and `tests/planner/test_pipeline.py`.

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
        if action.kind in ON_UNIT:
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
