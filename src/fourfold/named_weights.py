"""A model's parameters by name and whole, whatever a rank holds of them: in and out of the units' buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.batch.unit_specs import UnitSpec
from fourfold.batch.units import Unit
from fourfold.channel.cuts import Cut
from fourfold.channel.parts import assembled, part
from fourfold.collectives import all_gather, broadcast_
from fourfold.initialize import Part
from fourfold.mesh import Mesh


@dataclass(frozen=True)
class NamedWeights:
    """Where the parameters of a model are.

    Attributes:
        mesh: the ranks.
        unit_specs: the units of all pipeline ranks, by number.
        units: those that this rank holds, by number.
        cuts: what the ranks of tp hold of each parameter, by name; none where tp is 1.
    """

    mesh: Mesh
    unit_specs: Sequence[UnitSpec]
    units: Mapping[int, Unit]
    cuts: Mapping[str, Cut]

    def whole(self, number: int, piece: Callable[[Unit], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of a unit by name, whole, on all ranks, which all go through it together.

        Their order in the buffer is no common one: ranks of tp that hold unequal parts of a vocabulary may
        cut their units differently.

        Args:
            number: of the unit.
            piece: says which of its buffers is meant: the rank's piece of it.
        """
        spec, unit, pp = self.unit_specs[number], self.units.get(number), self.mesh.pp
        flat = None if unit is None else unit.whole(piece(unit))
        if flat is None or pp.rank != spec.holders[0]:
            flat = torch.empty(spec.numel, dtype=spec.master_dtype, device=self.mesh.device)
        broadcast_(flat, pp, source=spec.holders[0])
        for slot in sorted(spec.slots, key=lambda slot: slot.name):
            yield slot.name, self._over_channels(slot.name, slot.view(flat))

    def _over_channels(self, name: str, held: Tensor) -> Tensor:
        """Bring the whole parameter together, of which this rank of tp has a part."""
        cut, tp = self.cuts.get(name), self.mesh.tp
        if cut is None or cut.is_whole:
            return held
        shapes = [torch.Size(cut.local_shape(rank)) for rank in range(tp.size)]
        counts = [shape.numel() for shape in shapes]
        parts = all_gather(held.flatten(), tp, counts=counts).split(counts)
        return assembled([flat.view(shape) for flat, shape in zip(parts, shapes, strict=True)], cut)

    def load_(self, value_of: Callable[[str], Tensor]) -> None:
        """Set this rank's master pieces, given whole parameters by name."""

        def held(name: str) -> Tensor:
            cut = self.cuts.get(name)
            return value_of(name) if cut is None else part(value_of(name), cut, self.mesh.tp.rank)

        for unit in self.units.values():
            unit.load_(held)

    def masters(self) -> Iterator[Part]:
        """The runs of flattened whole parameters whose master weights this rank owns, to be written."""
        for unit in self.units.values():
            for owned in unit.owned:
                target, cut = unit.master[owned.part], self.cuts.get(owned.name)
                if cut is None:
                    yield Part(owned.name, owned.first, target)
                    continue
                written = 0
                for start, stop in cut.global_runs(self.mesh.tp.rank, owned.first, len(target)):
                    yield Part(owned.name, start, target[written : written + stop - start])
                    written += stop - start
