"""What a step sends: the events of a program, predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fourfold.batch.costs import UnitSize
from fourfold.channel.costs import ChannelCosts
from fourfold.program.actions import FORWARDS, RECEIVES, SENDS, TAKES_TAPE, Action, Kind
from fourfold.program.program import Program
from fourfold.sequence.costs import SequenceCosts
from fourfold.specs import AXES, Layout
from fourfold.traffic import Event

SCALAR_DTYPE, SCALAR_BYTES = "float64", 8
"""As which the square of the gradient norm is summed over ranks; the loss, with one more beside it."""


@dataclass(frozen=True)
class SegmentCosts:
    """What segments send while they compute.

    Attributes:
        blocks: the names of each segment's blocks, in order: ``embed``, ``layer.0``..., ``head``.
        channel: on the tp axis, None where it has one rank.
        sequence: on the cp axis, None where it has one rank.
        keeps: the names of the results of a layer that are not made again where its forward runs again.
    """

    blocks: Sequence[Sequence[str]]
    channel: ChannelCosts | None = None
    sequence: SequenceCosts | None = None
    keeps: frozenset[str] = frozenset()

    def forward(self, segment: int, microbatch: int, *, again: bool = False) -> list[Event]:
        """The events of a segment's forward, in order; of the first, or of one that runs ``again``."""
        enter = self.channel.enter(microbatch) if self.channel else []
        leave = self.channel.leave(microbatch) if self.channel else []
        loss = self.channel.loss(microbatch) if self.channel else []
        attention = self.sequence.forward(microbatch) if self.sequence else []

        def unless(name: str, events: list[Event]) -> list[Event]:
            return [] if again and name in self.keeps else events

        branch_in, branch_out = unless("gather", enter), unless("sum", leave)
        layer = [*branch_in, *unless("attention", attention), *branch_out, *branch_in, *branch_out]
        return _over(self.blocks[segment], embed=leave, layer=layer, head=enter + loss)

    def backward(self, segment: int, microbatch: int) -> list[Event]:
        """The events of a segment's input gradient, in order: each collective is another's backward."""
        into = self.channel.enter(microbatch) if self.channel else []
        out = self.channel.leave(microbatch) if self.channel else []
        again = self.channel.loss_again(microbatch) if self.channel else []
        attention = self.sequence.backward(microbatch) if self.sequence else []
        again_in = self.channel.enter_again(microbatch) if self.channel else []
        layer = [*into, *again_in, *out, *into, *attention, *again_in, *out]
        return _over(self.blocks[segment][::-1], embed=into, layer=layer, head=again + out)


def _over(names: Sequence[str], *, embed: list[Event], layer: list[Event], head: list[Event]) -> list[Event]:
    kinds = {"embed": embed, "head": head}
    return [event for name in names for event in kinds.get(name, layer)]


def step_events(
    program: Program,
    *,
    rank: int,
    layout: Layout,
    units: Mapping[int, UnitSize],
    activation_bytes: Sequence[int],
    inside: SegmentCosts | None = None,
) -> list[Event]:
    """The collectives and messages that a rank performs in one step, in order.

    Args:
        program: of the step.
        rank: the pipeline rank.
        layout: gives the axes.
        units: those that the rank holds, by their number in the program.
        activation_bytes: of what goes from segment to segment, for each microbatch: B x S x C elements of the
            dtype that computation runs in; of the S / tp tokens of a rank with sequence parallelism.
        inside: what the segments send while they compute, on the cp and tp axes.
    """
    of_rank = RankEvents(program, layout, units, activation_bytes, inside)
    return [event for action in program.ranks[rank] for event in of_rank.of(action)]


@dataclass(frozen=True)
class RankEvents:
    """The collectives and messages of each action of a pipeline rank; see `step_events`."""

    program: Program
    layout: Layout
    units: Mapping[int, UnitSize]
    activation_bytes: Sequence[int]
    inside: SegmentCosts | None = None

    def of(self, action: Action) -> list[Event]:
        """Those of an action, in order."""
        kind, layout, inside = action.kind, self.layout, self.inside
        if inside is not None and kind in FORWARDS:
            return inside.forward(action.segment, action.microbatch, again=kind is Kind.RECOMPUTE)
        if inside is not None and kind in TAKES_TAPE:
            return inside.backward(action.segment, action.microbatch)
        if kind is Kind.LOSS and layout.world_size > 1:  # [Note: asked to end]
            return [Event("all_reduce", layout.axis_name(*AXES), 2 * SCALAR_BYTES, SCALAR_DTYPE)]
        if kind is Kind.UPDATE and layout.size(*(norm := ("pp", *layout.shard_axes, "tp"))) > 1:
            return [Event("all_reduce", layout.axis_name(*norm), SCALAR_BYTES, SCALAR_DTYPE)]
        if kind in SENDS or kind in RECEIVES:
            op = "send" if kind in SENDS else "recv"
            dtype = next(iter(self.units.values())).weight_dtype
            return [Event(op, "pp", self.activation_bytes[action.microbatch], dtype)]
        if kind in (Kind.GATHER, Kind.REDUCE, Kind.ALL_REDUCE):
            return self._of_unit(kind, action.unit)
        return []

    def _of_unit(self, kind: Kind, number: int) -> list[Event]:
        layout, unit = self.layout, self.units[number]
        shards = layout.axis_name(*layout.shard_axes)
        if kind is Kind.GATHER:
            return [Event("all_gather", shards, unit.numel * unit.weight_bytes, unit.weight_dtype)]
        if kind is Kind.REDUCE and layout.fsdp > 1:
            return [Event("reduce_scatter", shards, unit.numel * unit.master_bytes, unit.master_dtype)]
        if number not in self.program.replicated:
            return []
        replicas = _replicas(self.program, number, layout, over_tp=unit.over_tp)
        return [Event("all_reduce", replicas, unit.piece * unit.master_bytes, unit.master_dtype)]


def _replicas(program: Program, unit: int, layout: Layout, *, over_tp: bool) -> str:
    """The name of the axis of the ranks that hold the same piece of a unit and add up its gradient."""
    ends = ("pp",) if len(program.holders(unit)) > 1 else ()
    return layout.axis_name(*ends, *layout.replica_axes, *(("tp",) if over_tp else ()))
