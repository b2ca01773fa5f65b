"""What a rank holds during a step, by category: a walk over its program.

The walk follows `fourfold.execute`: it makes and drops what each action does. So the peak is at an action,
with what that one computes with meanwhile (`fourfold.block_memory`). What the backends of collectives take
for themselves, and what an allocator wastes, is not in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fourfold.batch.costs import UnitSize
from fourfold.block_memory import BlockMemory
from fourfold.layer.transfers import arrived
from fourfold.memory import Category
from fourfold.program.actions import RECEIVES, SENDS, Action, Kind
from fourfold.program.liveness import left_behind
from fourfold.program.program import Program

Place = tuple[int, int]
"""A segment and a microbatch."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        rest: between steps, by category.
        at_peak: when most is held in all, by category.
        most: the most of each category, whenever that is.
    """

    rest: Mapping[Category, int]
    at_peak: Mapping[Category, int]
    most: Mapping[Category, int]

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Holdings:
    """What a rank's memory follows from.

    Attributes:
        program: of the step.
        rank: the pipeline rank.
        units: those that the rank holds, by number in the program.
        blocks: of each microbatch, the blocks of each segment of the model, in order.
        optimizer_bytes: the optimizer's state.
        batch_bytes: of all microbatches' tokens, labels and positions.
        rotary_bytes: of one microbatch's rotary angles, and ``rotating_bytes`` while they are made.
        equal_pieces_are_summed_in_place: whether a reduction of equal pieces needs no room (NCCL's does not).
        arrived: what `fourfold.layer.transfers.arrived` says, if it is known already.
    """

    program: Program
    rank: int
    units: Mapping[int, UnitSize]
    blocks: Sequence[Sequence[Sequence[BlockMemory]]]
    optimizer_bytes: int
    batch_bytes: int
    rotary_bytes: int
    rotating_bytes: int
    equal_pieces_are_summed_in_place: bool = True
    arrived: Mapping[Action, Sequence[Action]] | None = None


def rank_memory(holdings: Holdings) -> RankMemory:
    """Walk over a rank's program."""
    walk = _Walk(holdings)
    for action in holdings.program.ranks[holdings.rank]:
        walk.take(action)
    return RankMemory(walk.rest, walk.at_peak, walk.most)


class _Walk:
    """What is held, action by action."""

    def __init__(self, holdings: Holdings):
        self._holdings = holdings
        self._program = program = holdings.program
        self._left = left_behind(program.ranks[holdings.rank])
        self._arrived = holdings.arrived or arrived(program, holdings.rank)
        self.now = dict.fromkeys(Category, 0)
        self._persistent()
        self.rest = dict(self.now)
        self.now[Category.BATCH] = holdings.batch_bytes
        self.at_peak, self.most = dict(self.now), dict(self.now)
        self._total = self._peak = sum(self.now.values())
        self._gathered: dict[int, int] = {}
        self._gradients: dict[int, int] = {}  # whole ones that do not stay
        self._reducing: dict[int, int] = {}
        self._summed: set[int] = set()
        self._outputs: dict[Place, int] = {}
        self._output_gradients: dict[Place, int] = {}
        self._tapes: dict[Place, tuple[int, int]] = {}
        self._kept: dict[Place, int] = {}  # of forwards that are to run again
        self._receives: dict[Action, int] = {}
        self._sends: dict[Action, int] = {}
        self._rotated: set[int] = set()
        self._run: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._backward,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.GATHER: self._gather,
            Kind.FREE: self._free,
            Kind.REDUCE: self._reduce,
            Kind.ALL_REDUCE: lambda action: self._finish_reduction(action.unit),
            Kind.UPDATE: lambda _: self._finish_reductions(),
            Kind.LOSS: lambda _: None,
            **dict.fromkeys(SENDS, self._send),
            **dict.fromkeys(RECEIVES, self._receive),
        }

    def take(self, action: Action) -> None:
        """Hold and drop what an action does."""
        self._run[action.kind](action)

    def _persistent(self) -> None:
        placement, now = self._program.placement, self.now
        for unit in self._holdings.units.values():
            apart = placement.weights or unit.weight_bytes != unit.master_bytes
            now[Category.WEIGHTS] += unit.piece * unit.master_bytes if apart else 0
            now[Category.WEIGHTS] += 0 if placement.weights else unit.numel * unit.weight_bytes
            if unit.trained:
                held = unit.piece if placement.gradients else unit.numel
                now[Category.GRADIENTS] += held * unit.master_bytes
        now[Category.OPTIMIZER] = self._holdings.optimizer_bytes

    def _add(self, category: Category, nbytes: int) -> None:
        self.now[category] += nbytes
        self._total += nbytes
        if nbytes > 0:
            self._moment()

    def _moment(self, activations: int = 0, logits: int = 0) -> None:
        """Compare with the peak, with so much more for the moment."""
        if self._total + activations + logits > self._peak:
            self._peak = self._total + activations + logits
            self.at_peak = self._with(activations, logits)
        for category, nbytes in self._with(activations, logits).items():
            if nbytes > self.most[category]:
                self.most[category] = nbytes

    def _with(self, activations: int, logits: int) -> dict[Category, int]:
        now = dict(self.now)
        now[Category.ACTIVATIONS] += activations
        now[Category.LOGITS] += logits
        return now

    def _forward(self, action: Action) -> None:
        segment, microbatch = action.segment, action.microbatch
        place, before = (segment, microbatch), (segment - 1, microbatch)
        self._take_message(action)
        segments = self._holdings.blocks[microbatch]
        if microbatch not in self._rotated:
            self._rotated.add(microbatch)
            self._add(Category.BATCH, self._holdings.rotating_bytes)
            self._add(Category.BATCH, self._holdings.rotary_bytes - self._holdings.rotating_bytes)
        blocks = segments[segment]
        keeps = action in self._left.tapes
        if keeps:  # what was kept of a forward that ran before becomes a part of this one's tape
            self._add(Category.ACTIVATIONS, -self._kept.pop(place, 0))
        kept = logits = 0
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            self._moment(kept + (block.forward if keeps else block.evaluate), logits + block.loss)
            kept += block.tape - block.input if keeps else 0
            kept += following.input if following and (keeps or not kept) else 0
            logits += block.logits if keeps else 0
        if action not in self._left.inputs and before in self._outputs:
            self._add(Category.ACTIVATIONS, -self._outputs.pop(before))
            kept += blocks[0].input
        if not keeps and action.kind is Kind.FORWARD and (stays := sum(block.kept for block in blocks)):
            self._kept[place] = stays
            self._add(Category.ACTIVATIONS, stays)
        if keeps:
            self._add(Category.LOGITS, logits)
            self._add(Category.ACTIVATIONS, kept)
            self._tapes[place] = kept, logits
        is_needed = action.kind is Kind.FORWARD or action in self._left.outputs
        if segment + 1 < self._program.num_segments and is_needed:
            self._outputs[place] = segments[segment + 1][0].input
            self._add(Category.ACTIVATIONS, self._outputs[place])
        elif segment + 1 == self._program.num_segments:
            self._output_gradients[place] = 0

    def _backward(self, action: Action) -> None:
        segment, microbatch = action.segment, action.microbatch
        place = segment, microbatch
        self._take_message(action)
        self._take_gradients(segment)
        blocks = self._holdings.blocks[microbatch][segment]
        halved = action.kind is Kind.INPUT_GRADIENT
        gone = gone_logits = 0
        for block, following in zip(reversed(blocks), [None, *reversed(blocks)], strict=False):
            carried = following.input if following else 0
            self._moment(carried - gone + (block.halves if halved else block.backward), -gone_logits)
            gone += block.tape - (block.deferred if halved else 0)
            gone_logits += block.logits - (block.deferred_logits if halved else 0)
        tape, logits = self._tapes.pop(place)
        if blocks[0].input:  # its gradient is there before the input is gone
            self._output_gradients[segment - 1, microbatch] = blocks[0].input
            self.now[Category.ACTIVATIONS] += blocks[0].input
            self._total += blocks[0].input
        self._add(Category.LOGITS, -logits)
        self._add(Category.ACTIVATIONS, -tape - self._output_gradients.pop(place))
        if halved:
            kept = sum(block.deferred for block in blocks)
            kept_logits = sum(block.deferred_logits for block in blocks)
            self._tapes[place] = kept, kept_logits
            self._add(Category.ACTIVATIONS, kept)
            self._add(Category.LOGITS, kept_logits)

    def _weight_gradient(self, action: Action) -> None:
        self._take_gradients(action.segment)
        kept, logits = self._tapes.pop((action.segment, action.microbatch))
        blocks = self._holdings.blocks[action.microbatch][action.segment]
        self._moment(max(block.product for block in blocks))
        self._add(Category.LOGITS, -logits)
        self._add(Category.ACTIVATIONS, -kept)

    def _take_gradients(self, segment: int) -> None:
        for index in self._program.units_of_segment[segment]:
            unit = self._holdings.units[index]
            if self._program.placement.gradients and unit.trained:
                self._finish_reduction(index)
                if index not in self._gradients:
                    self._gradients[index] = unit.numel * unit.master_bytes
                    self._add(Category.GRADIENTS, self._gradients[index])

    def _gather(self, action: Action) -> None:
        unit = self._holdings.units[action.unit]
        if self._program.placement.weights and action.unit not in self._gathered:
            self._gathered[action.unit] = unit.numel * unit.weight_bytes
            self._add(Category.GATHERED, self._gathered[action.unit])

    def _free(self, action: Action) -> None:
        self._add(Category.GATHERED, -self._gathered.pop(action.unit))

    def _reduce(self, action: Action) -> None:
        if not self._program.placement.optimizer:
            return
        self._finish_reductions()
        unit = self._holdings.units[action.unit]
        is_direct = self._holdings.equal_pieces_are_summed_in_place and len(set(unit.counts)) == 1
        copies = (0 if is_direct else len(unit.counts)) + (action.unit in self._summed)
        self._summed.add(action.unit)
        self._reducing[action.unit] = copies * unit.piece * unit.master_bytes
        self._add(Category.COMMUNICATION, self._reducing[action.unit])

    def _finish_reductions(self) -> None:
        for index in list(self._reducing):
            self._finish_reduction(index)

    def _finish_reduction(self, index: int) -> None:
        if index in self._reducing:
            self._add(Category.COMMUNICATION, -self._reducing.pop(index))
            self._add(Category.GRADIENTS, -self._gradients.pop(index, 0))

    def _send(self, action: Action) -> None:
        kind, program = action.kind, self._program
        if kind is Kind.SEND_ACTIVATION:
            sent = self._outputs.pop((action.segment, action.microbatch))
        else:
            sent = self._output_gradients.pop((action.segment - 1, action.microbatch))
        on_edge = [s for s in self._sends if s.kind is kind and program.peer(s) == program.peer(action)]
        self._arrive(on_edge[: -len(program.ranks)])
        self._sends[action] = sent

    def _receive(self, action: Action) -> None:
        segments = self._holdings.blocks[action.microbatch]
        size = segments[action.segment + (action.kind is Kind.RECV_GRADIENT)][0].input
        self._receives[action] = size
        self._add(Category.ACTIVATIONS, size)

    def _take_message(self, action: Action) -> None:
        receive = self._program.message_needed(action)
        if receive is None:
            return
        size = self._receives.pop(receive)
        if receive.kind is Kind.RECV_ACTIVATION:
            self._outputs[action.segment - 1, action.microbatch] = size
        else:
            self._output_gradients[action.segment, action.microbatch] = size
        self._arrive(self._arrived[action])

    def _arrive(self, sends: Sequence[Action]) -> None:
        for send in sends:
            self._add(Category.ACTIVATIONS, -self._sends.pop(send, 0))
