"""A model's parameters by name and whole, whatever a rank holds of them: in and out of the units' buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.batch.unit_specs import UnitSpec
from fourfold.batch.units import Unit
from fourfold.channel.cuts import Cut
from fourfold.channel.parts import Parts
from fourfold.collectives import broadcast_
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
            yield slot.name, self._parts.whole(slot.name, slot.view(flat))

    def load_(self, value_of: Callable[[str], Tensor]) -> None:
        """Set this rank's master pieces, given whole parameters by name."""

        for unit in self.units.values():
            unit.load_(lambda name: self._parts.of(name, value_of(name)))

    def masters(self) -> Iterator[Part]:
        """The runs of flattened whole parameters whose master weights this rank owns, to be written."""
        for unit in self.units.values():
            for owned in unit.owned:
                for first, target in self._parts.runs(owned.name, owned.first, unit.master[owned.part]):
                    yield Part(owned.name, first, target)

    @property
    def _parts(self) -> Parts:
        return Parts(self.mesh.tp, self.cuts)
