"""Which parameters of a model in segments are gathered, reduced and updated together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from fourfold.batch.pieces import Pieces, cut_apart
from fourfold.batch.units import Slot, master_dtype, slots
from fourfold.models.parameters import parameter_users


@dataclass(frozen=True, order=True)
class Copies:
    """How a parameter stands on the tp axis.

    Attributes:
        count: how many neighbouring ranks hold the same part of it.
        add_up: whether their gradients add up, or are the same.
    """

    count: int = 1
    add_up: bool = False

    @property
    def summed(self) -> int:
        """Over how many neighbouring ranks the gradient is a sum."""
        return self.count if self.add_up else 1


NO_COPIES: Mapping[str, Copies] = MappingProxyType({})


@dataclass(frozen=True)
class UnitSpec:
    """A unit, without its buffers: also of units that are on other pipeline ranks alone.

    Attributes:
        name: the segments that its parameters belong to, as in ``layer.3 to layer.4``.
        slots: the parameters in the order of the unit's flat buffer.
        pieces: how the buffer is cut over the fsdp axis.
        users: the segments that compute with any of them.
        holders: the pipeline ranks that hold them, in order.
        copies: how they stand on the tp axis, all alike.
        is_trained: False where they are frozen.
        master_dtype: of master weights and gradients.
    """

    name: str
    slots: Sequence[Slot]
    pieces: Pieces
    users: tuple[int, ...]
    holders: tuple[int, ...]
    copies: Copies
    is_trained: bool
    master_dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return sum(self.pieces.counts)


@dataclass
class _Group:
    """Parameters of one unit, each with the segments that use it."""

    name: str
    is_trained: bool
    holders: tuple[int, ...]
    copies: Copies
    users: dict[str, tuple[int, ...]]


def unit_specs(
    model: nn.Module,
    segments: Mapping[str, Sequence[nn.Module]],
    *,
    rank_of_segment: Sequence[int],
    shards: int,
    pieces: str,
    dtype: torch.dtype,
    copies: Mapping[str, Copies] = NO_COPIES,
) -> list[UnitSpec]:
    """Return the units of a model, in its order.

    A unit holds the trained or the frozen parameters of one segment. Those that several pipeline ranks hold
    are a unit of their own, and so are those of which several ranks of tp hold the same part. What each
    pipeline rank holds of each kind is dealt evenly to the ranks of its fsdp axis.

    Args:
        model: gives names and shapes.
        segments: the modules of each segment by its name, in order.
        rank_of_segment: the pipeline rank of each.
        shards: ranks of the fsdp axis.
        pieces: how units are cut; see `fourfold.batch.pieces.cut`.
        dtype: what computation runs in.
        copies: of each parameter, by name; those that are not there have none.
    """
    named = dict(model.named_parameters())
    grouped = _grouped(model, segments, rank_of_segment, copies)
    shapes = [{name: tuple(named[name].shape) for name in group.users} for group in grouped]
    kinds = [(group.holders, group.copies) for group in grouped]
    cuts = cut_apart(shapes, kinds, ranks=shards, how=pieces)
    return [
        UnitSpec(
            group.name,
            slots(shapes[number], cuts[number].order),
            cuts[number],
            tuple(sorted({user for users in group.users.values() for user in users})),
            group.holders,
            group.copies,
            group.is_trained,
            master_dtype(dtype),
        )
        for number, group in enumerate(grouped)
    ]


def _grouped(
    model: nn.Module,
    segments: Mapping[str, Sequence[nn.Module]],
    rank_of_segment: Sequence[int],
    copies: Mapping[str, Copies],
) -> list[_Group]:
    named = dict(model.named_parameters())
    grouped = []
    owned = parameter_users(model, [tuple(modules) for modules in segments.values()])
    for title, parameters in zip(segments, owned, strict=True):
        found: dict[tuple[bool, tuple[int, ...], Copies], _Group] = {}
        for name, users in parameters.items():
            trained = named[name].requires_grad
            holders = tuple(sorted({rank_of_segment[user] for user in users}))
            on_tp = copies.get(name, Copies())
            group = found.setdefault((trained, holders, on_tp), _Group(title, trained, holders, on_tp, {}))
            group.users[name] = users
        grouped += sorted(
            found.values(), key=lambda group: (not group.is_trained, group.holders, group.copies)
        )
    return grouped
