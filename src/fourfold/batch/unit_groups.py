"""The units of any module, in groups whose weights come and go together: one a block, one for the rest."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.batch.pieces import cut_apart
from fourfold.batch.unit_specs import NO_COPIES, Copies
from fourfold.batch.units import Unit, master_dtype
from fourfold.collectives import Pending, broadcast_
from fourfold.errors import UserError, nearest
from fourfold.mesh import Mesh
from fourfold.models.parameters import parameter_sites

Initialize = Callable[[str, int, Tensor], None]
"""Writes initial values: given a parameter's name, the index of the first element in the flattened parameter,
and the flat run to write. A buffer comes whole and in its shape."""


class UnitGroup:
    """Units that are gathered and freed together.

    Attributes:
        name: of the block, for messages.
        module: the block; for the group of what is in no block, the whole module.
        units: at most one for each dtype, and for trained and frozen parameters.
        uses: forwards of this step that a backward is to follow.
        is_ready: whether the weights are on this rank and up to date.
        in_use: whether a forward or a backward computes with them now.
    """

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self.units: list[Unit] = []
        self.uses = 0
        self.is_ready = False
        self.in_use = False
        self._pending: list[Pending] = []

    def start_gather(self) -> None:
        """Start to bring the weights here, if they are neither here nor on their way."""
        if not self.is_ready and not self._pending:
            self._pending = [unit.gather() for unit in self.units]

    def finish_gather(self) -> None:
        """Wait until the weights are here."""
        self.start_gather()
        while self._pending:
            self._pending.pop().wait()
        self.is_ready = True

    @contextmanager
    def gathered(self, *, ahead: "UnitGroup | None", keep: bool = False) -> Iterator[None]:
        """Have the weights here while the context computes with them.

        Args:
            ahead: is gathered while this computes.
            keep: do not free the weights afterwards.
        """
        self.start_gather()
        if ahead is not None:
            ahead.start_gather()
        self.finish_gather()
        self.in_use = True
        try:
            yield
        finally:
            self.in_use = False
            if not keep:
                self.release()

    def release(self) -> None:
        """Free the weights after a use, where they are sharded."""
        if any(unit.placement.weights for unit in self.units):
            self.expire()

    def expire(self) -> None:
        """Have the weights gathered anew before their next use, because they changed or are to be freed."""
        while self._pending:
            self._pending.pop().wait()
        for unit in self.units:
            unit.free_()
        self.is_ready = False


def refuse_without_weights(groups: Collection[UnitGroup], module: nn.Module, *_: object) -> None:
    """A forward pre-hook for a module that needs the weights of ``groups``: raise where one is not here."""
    for group in groups:
        if not group.is_ready:
            raise RuntimeError(
                f"the weights of this {type(module).__name__} are not on this rank now: they belong to "
                f"{group.name}, and come for its own forward and backward"
            )


@dataclass(frozen=True)
class Alike:
    """What the parameters of a unit have in common.

    Attributes:
        home: the index of their block, or of the group of the rest.
        is_trained: whether they need gradients.
        dtype: what computation reads.
        copies: how they stand on the tp axis.
    """

    home: int
    is_trained: bool
    dtype: torch.dtype
    copies: Copies

    @property
    def master_dtype(self) -> torch.dtype:
        """What the unit keeps them in: float32 or higher, where they are no integers."""
        return master_dtype(self.dtype) if self.dtype.is_floating_point else self.dtype


def unit_groups(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    mesh: Mesh,
    pieces: str,
    dtype: torch.dtype | None,
    float32: Collection[str],
    initialize: Initialize | None,
    copies: Mapping[str, Copies] = NO_COPIES,
) -> list[UnitGroup]:
    """Move the parameters of ``module`` into units; return the groups of the blocks and, last, of the rest.

    A parameter that is in several blocks, or in one and outside, belongs to the rest. One unit after another
    is made, so that no rank holds more than its pieces and one unit, besides what ``module`` came with.

    Args:
        module: on any device; on the meta device ``initialize`` is needed.
        blocks: modules of it that do not contain each other.
        mesh: the ranks.
        pieces: how units are cut; see `fourfold.batch.pieces.cut`.
        dtype: what computation reads, None for the parameters' own. Masters are float32 or higher.
        float32: parameters whose names contain one of these are read in float32.
        initialize: writes the values; None keeps those of the first rank.
        copies: how parameters stand on the tp axis, by name; those that are not there have none.

    Raises UserError with all that is wrong with the arguments.
    """
    names = _block_names(module, blocks)
    named = dict(module.named_parameters())
    _check(module, named, float32, initialize)
    sites = parameter_sites(module)
    groups = [UnitGroup(name, block) for name, block in zip(names, blocks, strict=True)]
    groups.append(UnitGroup("what is in no block", module))
    homes = _homes(module, blocks)
    members: dict[Alike, list[str]] = {}
    for name, parameter in named.items():
        read = _dtype_read(name, parameter.dtype, dtype, float32)
        alike = Alike(homes[id(parameter)], parameter.requires_grad, read, copies.get(name, Copies()))
        members.setdefault(alike, []).append(name)
    # A parameter without dims counts as one row.
    shapes = [{name: tuple(named[name].shape) or (1,) for name in found} for found in members.values()]
    cuts = cut_apart(shapes, [alike.copies for alike in members], ranks=mesh.shards.size, how=pieces)
    for alike, laid_out in zip(members, cuts, strict=True):
        values = {name: named.pop(name) for name in laid_out.order}
        unit = Unit(
            groups[alike.home].name,
            values,
            sites,
            pieces=laid_out,
            placement=mesh.layout.placement,
            shards=mesh.shards,
            replicas=mesh.sharing(*mesh.layout.replica_axes, copies=alike.copies.summed),
            dtype=alike.dtype,
            master_dtype=alike.master_dtype,
            device=mesh.device,
        )
        groups[alike.home].units.append(unit)
        _set_values_(unit, values, mesh, initialize)
    _settle_buffers(module, mesh, initialize)
    return groups


def _block_names(module: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    names = {id(part): name or "the module itself" for name, part in module.named_modules()}
    problems = []
    first: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if id(block) not in names:
            problems.append(
                f"blocks[{index}] is a {type(block).__name__} that is not in the module: "
                "give parts of it, as in list(module.layers)"
            )
        elif id(block) in first:
            problems.append(
                f"blocks[{index}] is blocks[{first[id(block)]}] again, {names[id(block)]}: "
                "give each block once"
            )
        else:
            first[id(block)] = index
    for index in first.values():
        outer = blocks[index]
        problems += [
            f"block {names[id(part)]} is inside of block {names[id(outer)]}: give one of them"
            for part in outer.modules()
            if part is not outer and id(part) in first
        ]
    if problems:
        raise UserError(*problems)
    return [names[id(block)] for block in blocks]


def _check(
    module: nn.Module, named: dict[str, nn.Parameter], float32: Collection[str], initialize: Initialize | None
) -> None:
    problems = []
    if isinstance(float32, str):
        problems.append(f"float32='{float32}' is one text: give a list of them, ['{float32}']")
    else:
        words = {word for name in named for word in name.split(".")}
        problems += [
            f"float32: no parameter's name contains '{part}'.{nearest(part, words)}"
            for part in float32
            if not any(part in name for name in named)
        ]
    tensors = [*named.items(), *module.named_buffers()]
    if initialize is None and (empty := [name for name, tensor in tensors if tensor.is_meta]):
        problems.append(f"{empty[0]} is on the meta device and has no values: give initialize")
    if problems:
        raise UserError(*problems)


def _homes(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, int]:
    """For each parameter by id, the block that it is in; ``len(blocks)`` for one in none, or in several."""
    homes: dict[int, set[int]] = {}
    inside: set[int] = set()
    for index, block in enumerate(blocks):
        inside.update(map(id, block.modules()))
        for parameter in block.parameters():
            homes.setdefault(id(parameter), set()).add(index)
    for part in module.modules():
        if id(part) not in inside:
            for parameter in part.parameters(recurse=False):
                homes.setdefault(id(parameter), set()).add(len(blocks))
    return {key: home.pop() if len(home) == 1 else len(blocks) for key, home in homes.items()}


def _dtype_read(
    name: str, own: torch.dtype, dtype: torch.dtype | None, float32: Collection[str]
) -> torch.dtype:
    if not own.is_floating_point:
        return own
    if any(part in name for part in float32):
        return master_dtype(dtype or own)
    return dtype or own


def _set_values_(
    unit: Unit, values: Mapping[str, nn.Parameter], mesh: Mesh, initialize: Initialize | None
) -> None:
    """Give a unit its first values: written by ``initialize``, or those that the first rank came with."""
    if initialize is None:
        unit.load_(lambda name: _of_first_rank(values[name], mesh))
        return
    for owned in unit.owned:
        initialize(owned.name, owned.first, unit.master[owned.part])


def _of_first_rank(tensor: Tensor, mesh: Mesh) -> Tensor:
    value = tensor.detach().to(mesh.device)
    return broadcast_(value, mesh.batch, source=0) if value.numel() else value


def _settle_buffers(module: nn.Module, mesh: Mesh, initialize: Initialize | None) -> None:
    """Bring the buffers to the mesh's device, the same on every rank."""
    settled: dict[int, Tensor] = {}
    for prefix, part in module.named_modules():
        for attribute, buffer in part.named_buffers(recurse=False):
            if id(buffer) not in settled:
                if initialize is None:
                    settled[id(buffer)] = _of_first_rank(buffer, mesh)
                elif buffer.is_meta:
                    settled[id(buffer)] = torch.empty_like(buffer, device=mesh.device)
                    initialize(f"{prefix}.{attribute}".lstrip("."), 0, settled[id(buffer)])
                else:
                    settled[id(buffer)] = buffer.to(mesh.device)
            setattr(part, attribute, settled[id(buffer)])
