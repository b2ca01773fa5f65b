"""Which parameters of a model in segments are gathered, reduced and updated together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from fourfold.batch.pieces import Pieces, cut
from fourfold.batch.reduction import segments_of_units
from fourfold.batch.units import Slot, master_dtype, parameter_users, slots


@dataclass(frozen=True)
class UnitSpec:
    """A unit, without its buffers: also of units that are on other pipeline ranks alone.

    Attributes:
        name: the segments that its parameters belong to, as in ``layer.3 to layer.4``.
        slots: the parameters in the order of the unit's flat buffer.
        pieces: how the buffer is cut over the fsdp axis.
        users: the segments that compute with any of them.
        holders: the pipeline ranks that hold them, in order.
        is_trained: False where they are frozen.
        master_dtype: of master weights and gradients.
    """

    name: str
    slots: Sequence[Slot]
    pieces: Pieces
    users: tuple[int, ...]
    holders: tuple[int, ...]
    is_trained: bool
    master_dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return sum(self.pieces.counts)


@dataclass
class _Joined:
    """Parameters of one unit, each with the segments that use it."""

    name: str
    is_trained: bool
    holders: tuple[int, ...]
    users: dict[str, tuple[int, ...]]


def unit_specs(
    model: nn.Module,
    segments: Mapping[str, Sequence[nn.Module]],
    *,
    segments_of_stage: Sequence[int],
    rank_of_segment: Sequence[int],
    shards: int,
    pieces: str,
    dtype: torch.dtype,
    sharded: bool,
) -> list[UnitSpec]:
    """Put parameters together, in model order.

    A unit holds the trained or the frozen parameters of one segment, or of several small neighbours in one
    stage. Parameters that several pipeline ranks hold are a unit of their own. What each pipeline rank holds
    is dealt evenly to the ranks of its fsdp axis.

    Args:
        model: gives names and shapes.
        segments: the modules of each segment by its name, in order.
        segments_of_stage: how many of them each pipeline stage has.
        rank_of_segment: the pipeline rank of each.
        shards: ranks of the fsdp axis.
        pieces: how units are cut; see `fourfold.batch.pieces.cut`.
        dtype: what computation runs in.
        sharded: whether a rank holds the weights of a unit only while it is used.
    """
    named = dict(model.named_parameters())
    joined = _joined(model, segments, segments_of_stage, rank_of_segment, dtype, sharded=sharded)
    shapes = [{name: tuple(named[name].shape) for name in unit.users} for unit in joined]
    cuts: dict[int, Pieces] = {}
    for holders in dict.fromkeys(unit.holders for unit in joined):
        numbers = [number for number, unit in enumerate(joined) if unit.holders == holders]
        found = cut([shapes[number] for number in numbers], ranks=shards, how=pieces)
        cuts.update(zip(numbers, found, strict=True))
    return [
        UnitSpec(
            unit.name,
            slots(shapes[number], cuts[number].order),
            cuts[number],
            tuple(sorted({user for users in unit.users.values() for user in users})),
            unit.holders,
            unit.is_trained,
            master_dtype(dtype),
        )
        for number, unit in enumerate(joined)
    ]


def _joined(
    model: nn.Module,
    segments: Mapping[str, Sequence[nn.Module]],
    segments_of_stage: Sequence[int],
    rank_of_segment: Sequence[int],
    dtype: torch.dtype,
    *,
    sharded: bool,
) -> list[_Joined]:
    owned = parameter_users(model, [tuple(modules) for modules in segments.values()])
    named = dict(model.named_parameters())
    names = list(segments)
    itemsize = master_dtype(dtype).itemsize
    sizes = [sum(named[name].numel() * itemsize for name in parameters) for parameters in owned]
    joined = []
    for first, stop in pairwise(accumulate(segments_of_stage, initial=0)):
        for span in segments_of_units(sizes[first:stop], sharded=sharded):
            within = [first + segment for segment in span]
            title = " to ".join(dict.fromkeys((names[within[0]], names[within[-1]])))
            found: dict[tuple[bool, tuple[int, ...]], _Joined] = {}
            for segment in within:
                for name, users in owned[segment].items():
                    trained = named[name].requires_grad
                    holders = tuple(sorted({rank_of_segment[user] for user in users}))
                    unit = found.setdefault((trained, holders), _Joined(title, trained, holders, {}))
                    unit.users[name] = users
            joined += sorted(found.values(), key=lambda unit: (not unit.is_trained, unit.holders))
    return joined
