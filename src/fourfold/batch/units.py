"""Flat buffers: the parameters of some segments, packed, so that they are reduced and updated as one.

[Note: views for ever] A unit allocates one flat buffer of weights and one of gradients. The parameters are
views into the first and their ``.grad`` are views into the second, from construction on: nothing is copied in
before a reduction, nothing is copied out after it, and the parameter objects never change.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.collectives import Pending, all_reduce_
from fourfold.mesh import Axis


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its unit's flat buffers."""

    name: str
    offset: int
    shape: torch.Size

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat buffer, in its shape."""
        return flat[self.offset : self.offset + self.shape.numel()].view(self.shape)


class Unit:
    """The parameters of one or more neighbouring segments in flat buffers.

    Args:
        name: what error messages and tables call it, as in ``layer.3``.
        parameters: the parameters by name. Their values are not kept: the unit allocates new storage.
        sites: for each parameter, every (module, attribute) that holds it; a tied weight has two.
        dtype: of the weights that computation reads.
        master_dtype: of the weights that the optimizer updates, of gradients and of their reduction.
        device: where the buffers live.

    Attributes:
        weights: flat, in ``dtype``; the parameters are views into it.
        master: flat, in ``master_dtype``; the same tensor as `weights` where the two dtypes agree.
        gradient: flat, in ``master_dtype``; the parameters' ``.grad`` are views into it.
        num_decayed: matrices lie first in the buffers, then norms and biases; so many elements are matrices.
    """

    def __init__(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        sites: dict[str, list[tuple[nn.Module, str]]],
        *,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
    ):
        # Weight decay is decided here, by the parameter's own shape, before anything is flat.
        order = sorted(parameters, key=lambda key: parameters[key].ndim < 2)
        self.name = name
        self.slots: list[Slot] = []
        self.parameters: list[nn.Parameter] = []
        offset = 0
        for key in order:
            self.slots.append(Slot(key, offset, parameters[key].shape))
            offset += parameters[key].numel()
        self.num_decayed = sum(slot.shape.numel() for slot in self.slots if len(slot.shape) >= 2)
        self.master = torch.zeros(offset, dtype=master_dtype, device=device)
        self.gradient = torch.zeros(offset, dtype=master_dtype, device=device)
        self.weights = self.master if dtype == master_dtype else self.master.to(dtype)
        for slot in self.slots:
            parameter = nn.Parameter(slot.view(self.weights))
            parameter.grad_dtype = master_dtype
            parameter.grad = slot.view(self.gradient)
            self.parameters.append(parameter)
            for module, attribute in sites[slot.name]:
                setattr(module, attribute, parameter)

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name with its view of ``flat``, one of the unit's buffers."""
        return ((slot.name, slot.view(flat)) for slot in self.slots)

    def reduce(self, axis: Axis) -> Pending:
        """Start to sum the gradients over ``axis``, in place."""
        return all_reduce_(self.gradient, axis, blocking=False)

    def publish_(self) -> None:
        """Bring the weights that computation reads up to date with the master weights."""
        if self.weights is not self.master:
            self.weights.copy_(self.master)


def parameter_sites(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter by its first name, every (module, attribute) that holds it."""
    first_name: dict[int, str] = {}
    sites: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = first_name.setdefault(id(parameter), f"{prefix}.{attribute}" if prefix else attribute)
            sites.setdefault(name, []).append((module, attribute))
    return sites


def parameter_users(
    model: nn.Module, segments: Iterable[tuple[nn.Module, ...]]
) -> list[dict[str, tuple[int, ...]]]:
    """For each segment, the parameters that belong to it, each with the segments that use it.

    A parameter that several segments share belongs to the first one.

    Args:
        model: gives the names.
        segments: the modules of each segment, in order.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users: dict[str, list[int]] = {}
    count = 0
    for index, modules in enumerate(segments):
        count += 1
        for module in modules:
            for parameter in module.parameters():
                known = users.setdefault(names[id(parameter)], [])
                if index not in known:
                    known.append(index)
    missing = sorted(set(names.values()) - set(users))
    assert not missing, f"parameters in no segment: {missing}"
    owned: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
    for name, segments_of in users.items():
        owned[segments_of[0]][name] = tuple(segments_of)
    return owned
