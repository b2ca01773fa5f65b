"""What a rank owns of a model in training: parts of weights and of their moments, by name and place."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fourfold.batch.unit_specs import UnitSpec
from fourfold.batch.units import Owned
from fourfold.checkpoint.manifest import WEIGHT, Stored
from fourfold.checkpoint.stripes import Stripes, stripes
from fourfold.mesh import Mesh
from fourfold.optimizer import Update
from fourfold.parallel_model import ParallelModel


@dataclass(frozen=True)
class Held:
    """A part of a tensor that this rank owns.

    Attributes:
        tensor: as a whole.
        stripes: the part's elements in the whole, in the order of ``values``.
        values: flat; the memory that training works on.
        owners: how many ranks own the same part.
    """

    tensor: Stored
    stripes: tuple[Stripes, ...]
    values: Tensor
    owners: int


def held(parallel: ParallelModel, update: Update, *, divided: bool = False) -> Iterator[Held]:
    """Yield what this rank owns.

    With ``divided`` the ranks that own the same deal it among themselves evenly: then all ranks together
    yield every element of every tensor exactly once.
    """
    for number, unit in parallel.units_by_number.items():
        spec = parallel.unit_specs[number]
        index, owners = owner(spec, parallel.mesh)
        moments = list(update.moments(unit)) if unit.is_trained else []
        for owned in unit.owned:
            first, stop = owned.part.start, owned.part.stop
            if divided:
                count = stop - first
                first, stop = first + count * index // owners, first + count * (index + 1) // owners
            if first == stop:
                continue
            shape, where = _place(parallel, owned, first - owned.part.start, stop - first)
            values = {WEIGHT: unit.master[first:stop]}
            for part, states in moments:
                if part.start <= owned.part.start < part.stop:
                    values |= {
                        name: flat[first - part.start : stop - part.start] for name, flat in states.items()
                    }
            for state, flat in values.items():
                dtype = str(flat.dtype).removeprefix("torch.")
                yield Held(Stored(owned.name, state, shape, dtype), where, flat, owners)


def _place(
    parallel: ParallelModel, owned: Owned, skipped: int, count: int
) -> tuple[tuple[int, ...], tuple[Stripes, ...]]:
    """Return the shape of the whole parameter, and where a run of what a rank owns of it lies in it."""
    first, cut = owned.first + skipped, parallel.cuts.get(owned.name)
    if cut is None:
        return tuple(owned.shape), (Stripes(first, count),)
    return cut.shape, tuple(stripes(cut.global_runs(parallel.mesh.tp.rank, first, count)))


def owner(spec: UnitSpec, mesh: Mesh) -> tuple[int, int]:
    """Which of how many owners of the same piece of a unit this rank is.

    They differ on the axes over which the unit is replicated; on pp, where several ranks hold it; and on tp,
    where neighbours hold the same part.
    """
    layout, at = mesh.layout, mesh.layout.coordinates(mesh.rank)
    index, count = 0, 1
    for axis in layout.replica_axes:
        index, count = index * layout.size(axis) + at[axis], count * layout.size(axis)
    index, count = index * len(spec.holders) + spec.holders.index(at["pp"]), count * len(spec.holders)
    copies = spec.copies.count
    return index * copies + at["tp"] % copies, count * copies


def owners_of(parallel: ParallelModel) -> dict[str, int]:
    """How many ranks own the same part of a parameter, by name: of all parameters, on every rank."""
    return {
        slot.name: parallel.mesh.layout.size(*parallel.mesh.layout.replica_axes)
        * len(spec.holders)
        * spec.copies.count
        for spec in parallel.unit_specs
        for slot in spec.slots
    }
