"""The state dict of a module whose weights are in pieces on the ranks: by its own names, and whole."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.batch.units import Unit
from fourfold.channel.parts import Parts
from fourfold.errors import UserError


class ModuleState:
    """What a sharded module's state dict is, in and out. The module's own two functions are refused.

    Args:
        module: what was sharded.
        units: all of its units.
        parts: what this rank of tp has of its parameters.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit], parts: Parts):
        self._module = module
        self._units = units
        self._parts = parts
        self._reads_names = False
        module.register_state_dict_pre_hook(self._refuse)
        module.register_load_state_dict_pre_hook(self._refuse)

    @torch.no_grad()
    def whole(self) -> dict[str, Any]:
        """Copies of everything, weights whole and in master precision. All ranks call it."""
        found: dict[int, Tensor] = {}
        for unit in self._units:
            named = zip(unit.parameters, unit.named(unit.whole(unit.master)), strict=True)
            # By name: ranks of tp that hold unequal parts of a vocabulary may have another order.
            for parameter, (name, view) in sorted(named, key=lambda pair: pair[1][0]):
                value = self._parts.whole(name, view)
                found[id(parameter)] = value.clone() if value is view else value
        return {
            name: found[id(value)] if id(value) in found else _copy(value)
            for name, value in self._names().items()
        }

    @torch.no_grad()
    def load_(self, state: Mapping[str, Any]) -> None:
        """Set masters and buffers. Raises UserError for names or shapes that do not fit."""
        names = self._names()
        values = {id(names[name]): value for name, value in state.items() if name in names}
        problems = [f"{name} is not in the module" for name in state if name not in names]
        first = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for name, here in names.items():
            if id(here) not in values:
                problems.append(f"{name} is missing")
            elif isinstance(here, Tensor):
                wanted = self._parts.shape(first.get(id(here), name), here.shape)
                if (found := tuple(values[id(here)].shape)) != wanted:
                    problems.append(f"{name} has the shape {found}, in the module {wanted}")
        if problems:
            raise UserError(*problems)
        rest = {name: state[name] for name, here in names.items() if name in state}
        for unit in self._units:
            of_name = dict(zip((slot.name for slot in unit.slots), unit.parameters, strict=True))
            whole = {name: values[id(parameter)] for name, parameter in of_name.items()}
            unit.load_(lambda name, whole=whole: self._parts.of(name, whole[name]))  # type: ignore[misc]
            here = {id(parameter) for parameter in unit.parameters}
            rest = {name: value for name, value in rest.items() if id(names[name]) not in here}
        self._reads_names = True
        self._module.load_state_dict(rest, strict=False)
        self._reads_names = False

    def _names(self) -> dict[str, Any]:
        """What the module's own state dict lists; for parameters, themselves."""
        self._reads_names = True
        names: dict[str, Any] = self._module.state_dict(keep_vars=True)
        self._reads_names = False
        return names

    def _refuse(self, *_: Any) -> None:
        if not self._reads_names:
            raise RuntimeError(
                "the module is sharded: use state_dict and load_state_dict of its ShardedModule"
            )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
