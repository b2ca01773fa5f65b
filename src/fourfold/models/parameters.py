"""Where the parameters of a module are, and who uses them."""

from collections.abc import Iterable

from torch import nn


def parameter_sites(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter by its first name, every (module, attribute) that holds it."""
    first_name: dict[int, str] = {}
    sites: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
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
