"""The units of one rank of a mesh, and the guard in front of weights that are elsewhere."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from fourfold.batch.unit_specs import UnitSpec
from fourfold.batch.units import Unit
from fourfold.mesh import Mesh
from fourfold.models.parameters import parameter_sites


def rank_units_(
    model: nn.Module, specs: Sequence[UnitSpec], *, mesh: Mesh, dtype: torch.dtype
) -> dict[int, Unit]:
    """Make the units of this rank, by number. All ranks make the same process groups in the same order."""
    named = dict(model.named_parameters())
    sites = parameter_sites(model)
    units = {}
    for number, spec in enumerate(specs):
        replicas = mesh.sharing(*mesh.layout.replica_axes, stages=spec.holders, copies=spec.copies.summed)
        if mesh.pp.rank in spec.holders:
            units[number] = Unit(
                spec.name,
                {slot.name: named[slot.name] for slot in spec.slots},
                sites,
                pieces=spec.pieces,
                placement=mesh.layout.placement,
                shards=mesh.shards,
                replicas=replicas,
                dtype=dtype,
                master_dtype=spec.master_dtype,
                device=mesh.device,
            )
    if mesh.layout.placement.weights:
        _guard_(model, list(units.values()), sites)
    return units


def _guard_(
    model: nn.Module, units: Sequence[Unit], sites: Mapping[str, Sequence[tuple[nn.Module, str]]]
) -> None:
    """Refuse to use weights that are not there: memory would be read that is not the process's any more."""

    def refuse(unit: Unit, *_: object) -> None:
        if not unit.is_present:
            raise RuntimeError(
                f"the weights of {unit.name} are not on this rank: between its uses in a step a sharded unit "
                "holds a piece only; call ParallelModel.gather_ on all ranks to use the model outside a step"
            )

    def refuse_all(*_: object) -> None:
        for unit in units:
            refuse(unit)

    for unit in units:
        for module in {module for slot in unit.slots for module, _ in sites[slot.name]}:
            module.register_forward_pre_hook(partial(refuse, unit))
    model.register_state_dict_pre_hook(refuse_all)
