"""The mesh: which rank stands where on the axes, and the process group of every axis.

Ranks are numbered with pp outermost and tp innermost, so that neighbours on the fastest links share the
axis that talks most.

[Note: groups in one order] A process group comes into being only when every rank of the job asks for it,
its members or not, in the same order. So a mesh makes all its groups at once, from the layout alone: pp, dp,
fsdp, cp, tp, then data, batch, shards, world, and for each of them the groups of all ranks. Nothing depends
on the rank or on the data. A group that is not needed is not made: an axis of one rank has none, an axis of
all ranks is the world's, and axes with the same members share theirs. The groups are made here, not by
``init_device_mesh``, which has no timeout and no public way to joint axes; ``Mesh.device_mesh`` hands the
same groups to torch.
"""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fourfold.errors import UserError
from fourfold.specs import AXES, BATCH_AXES, DATA_AXES, Layout
from fourfold.threads import let_each_other_finish

Members = tuple[tuple[int, ...], ...]

# The groups made so far, by world, members and purpose, so that a second mesh makes none again. The world is
# the key since its groups end with it.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Members, str], dist.ProcessGroup | None]]
_groups = weakref.WeakKeyDictionary()


class StandIn:
    """Stands where a process group would, in a rehearsal: tensors have shapes alone and nothing is sent.

    Args:
        backend: whose ways the collectives take, ``nccl`` or ``gloo``.
    """

    def __init__(self, backend: str):
        self.backend = backend


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, or several joined to one, as this rank sees it.

    ``rank`` counts within the axis, ``ranks`` are the global ranks in its order. ``group`` is None only
    where ``size`` is 1: there is nobody to talk to.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | StandIn | None


def backend_of(axis: Axis) -> str:
    """Return the name of the backend that an axis of several ranks communicates with."""
    return axis.group.backend if isinstance(axis.group, StandIn) else dist.get_backend(axis.group)


class Mesh:
    """The ranks of a layout, and the axes on which they meet.

    Every rank of the job makes the same meshes in the same order. A layout of one rank needs no process
    group, so it also serves one rank of a larger job for work of its own. On a CPU the threads of a process
    that is one rank of several are scheduled as batch work: [Note: the lock that is tried for].

    Args:
        layout: the degree of each axis.
        device_type: ``cpu`` or ``cuda``; with cuda, the current device is this rank's.
        timeout_seconds: how long a collective on a group made here may take, None for torch's default. The
            group of all ranks keeps the timeout that it was made with.

    Raises ``UserError`` where the number of ranks is not the layout's.
    """

    def __init__(self, layout: Layout, device_type: str = "cpu", *, timeout_seconds: float | None = None):
        self.layout = layout
        self.world_size = layout.world_size
        self.rank = self._find_rank()
        self.device = _current_device(device_type)
        self._timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        self._axes: dict[tuple[str, ...], Axis] = {}
        if self.device.type == "cpu" and self.world_size > 1:
            let_each_other_finish()  # [Note: the lock that is tried for]
        self.pp = self.joint("pp")
        self.dp = self.joint("dp")
        self.fsdp = self.joint("fsdp")
        self.cp = self.joint("cp")
        self.tp = self.joint("tp")
        self.data = self.joint(*DATA_AXES)
        self.batch = self.joint(*BATCH_AXES)
        self.shards = self.joint(*layout.shard_axes)
        self.world = self.joint(*AXES)

    @property
    def counts_its_loss(self) -> bool:
        """Whether the loss of this rank goes into the sum: ranks of tp have the same, the first adds it."""
        return self.tp.rank == 0

    def joint(self, *names: str) -> Axis:
        """Return the axis that joins these, in the mesh's order whatever the order of the names.

        Axes of one rank add nothing: where a single axis is left, the result is that axis. A joint axis
        that is not of the mesh's own is made at the first call, which all ranks must then do alike.
        """
        ordered = [name for name in AXES if name in names]
        cut = tuple(name for name in ordered if self.layout.size(name) > 1) or (ordered[0],)
        if cut not in self._axes:
            self._axes[cut] = self._make_axis(cut)
        return self._axes[cut]

    def sharing(self, *names: str, stages: Sequence[int] = (), copies: int = 1) -> Axis:
        """Return the ranks that hold the same part of a parameter as this one, itself among them.

        They differ from it on the axes ``names`` alone; also on pp, where both are among ``stages``; and on
        tp, where both are in the same run of ``copies`` neighbours. All ranks call it alike; for those that
        are not in ``stages`` it is an axis of one.
        """
        among = set(stages) if len(set(stages)) > 1 else set()
        free = tuple(n for n in AXES if n in names or (n == "pp" and among) or (n == "tp" and copies > 1))
        if among in (set(), set(range(self.pp.size))) and copies in (1, self.tp.size):
            return self.joint(*free)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.layout.coordinates(rank)
            if not among or at["pp"] in among:
                key = [at[axis] for axis in AXES if axis not in free]
                groups.setdefault((*key, at["tp"] // copies if copies > 1 else 0), []).append(rank)
        members = tuple(map(tuple, groups.values()))
        mine = next((ranks for ranks in members if self.rank in ranks), (self.rank,))
        group = self._make_groups(members) if len(members[0]) > 1 else None
        name = self.layout.axis_name(*free)
        return Axis(name, len(mine), mine.index(self.rank), mine, group if len(mine) > 1 else None)

    def split(self, name: str, inner: int) -> tuple[Axis, Axis]:
        """Return an axis as two: the outer one of every ``inner``-th rank, the inner one of neighbours.

        Rank r of the axis is rank ``r // inner`` of the outer one and ``r % inner`` of the inner one. All
        ranks call it alike.
        """
        axis = self.joint(name)
        whole = _members(self.layout, (name,))
        outer = tuple(ranks[first::inner] for ranks in whole for first in range(inner))
        near = tuple(ranks[first : first + inner] for ranks in whole for first in range(0, axis.size, inner))
        return self._part(name, outer), self._part(name, near)

    def _part(self, name: str, members: Members) -> Axis:
        mine = next(ranks for ranks in members if self.rank in ranks)
        group = self._make_groups(members) if len(mine) > 1 else None
        return Axis(name, len(mine), mine.index(self.rank), mine, group)

    def edges(self, pairs: Sequence[tuple[int, int, str]]) -> dict[tuple[int, int, str], Axis]:
        """Return for each (sender, receiver, kind of message) of pipeline ranks what its messages travel on.

        gloo tells messages apart by tags, so all go over the pp axis. NCCL pairs them by order on a
        communicator: there each edge has one of its own, so that no kind of message waits for another. All
        ranks call it alike.
        """
        if self.pp.group is None or backend_of(self.pp) != "nccl":
            return dict.fromkeys(pairs, self.pp)
        found = {}
        columns = _members(self.layout, ("pp",))
        for sender, receiver, kind in sorted(pairs):
            # A process group counts its ranks in the order of their numbers, however they are given.
            members = tuple(
                (min(ranks[sender], ranks[receiver]), max(ranks[sender], ranks[receiver]))
                for ranks in columns
            )
            group = self._make_groups(members, f"{kind} from {sender} to {receiver}")
            mine = next((ranks for ranks in members if self.rank in ranks), None)
            if mine is not None:
                found[sender, receiver, kind] = Axis("pp", 2, mine.index(self.rank), mine, group)
        return found

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's own mesh of the axes larger than 1, on the same groups: for use with PyTorch's modules."""
        names = [name for name in AXES if self.layout.size(name) > 1]
        groups = [g for name in names if isinstance(g := self.joint(name).group, dist.ProcessGroup)]
        if not groups:
            raise ValueError(f"layout {self.layout} has one rank: torch's mesh needs a process group")
        ranks = torch.arange(self.world_size).view([self.layout.size(name) for name in names])
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=tuple(names))
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(names))

    def _make_axis(self, names: tuple[str, ...]) -> Axis:
        members = _members(self.layout, names)
        mine = next(ranks for ranks in members if self.rank in ranks)
        group = self._make_groups(members) if len(mine) > 1 else None
        return Axis(self.layout.axis_name(*names), len(mine), mine.index(self.rank), mine, group)

    def _find_rank(self) -> int:
        return _rank_in_world(self.layout)

    def _make_groups(self, members: Members, purpose: str = "") -> dist.ProcessGroup | StandIn | None:
        """Make the group of each tuple of ranks, on all ranks, and return this rank's, None if in none.

        Groups of the same members for another ``purpose`` are others.
        """
        world = dist.group.WORLD
        assert world is not None
        if members == (tuple(range(self.world_size)),) and not purpose:
            return world
        made = _groups.setdefault(world, {})
        if (members, purpose) not in made:
            made[members, purpose] = None
            for ranks in members:
                group = dist.new_group(list(ranks), timeout=self._timeout)
                if self.rank in ranks:
                    made[members, purpose] = group
        return made[members, purpose]


class RehearsedMesh(Mesh):
    """The mesh as one rank of any layout sees it, without the others: on the meta device, on a stand-in.

    Args:
        layout: the degree of each axis.
        rank: which rank of it.
        stand_in: takes the place of every process group.
    """

    def __init__(self, layout: Layout, rank: int, stand_in: StandIn):
        self._rank = rank
        self._stand_in = stand_in
        super().__init__(layout, "meta")

    def _find_rank(self) -> int:
        return self._rank

    def _make_groups(self, members: Members, purpose: str = "") -> StandIn | None:
        return self._stand_in if any(self.rank in ranks for ranks in members) else None


def _current_device(device_type: str) -> torch.device:
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def _members(layout: Layout, names: tuple[str, ...]) -> Members:
    """Return the global ranks of every group of a joint axis, each in axis order."""
    grid = np.arange(layout.world_size).reshape([layout.size(name) for name in AXES])
    chosen = [AXES.index(name) for name in names]
    others = [index for index in range(len(AXES)) if index not in chosen]
    rows = grid.transpose(others + chosen).reshape(-1, layout.size(*names))
    return tuple(tuple(row) for row in rows.tolist())


def _rank_in_world(layout: Layout) -> int:
    """Return this rank, 0 where the layout has only one."""
    if layout.world_size == 1:
        return 0
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"layout {layout} needs a process group: call torch.distributed.init_process_group() before Mesh"
        )
    present = dist.get_world_size() if dist.is_initialized() else 1
    if present != layout.world_size:
        raise UserError(
            f"layout {layout} needs {layout.world_size} ranks, this job has {present}: "
            f"start {layout.world_size}, or use a layout of {present}"
        )
    return dist.get_rank()
