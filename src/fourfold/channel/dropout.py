"""Dropout in a module that is cut on the tp axis.

[Note: whose masks] Ranks draw random numbers apart. Behind a row-wise matrix each would mask its summand by
another mask, and where the stream is whole on every rank, the ranks would go on with different streams: both
compute something else than one process, and no error shows it. So modules of dropout are refused in training.
"""

from torch import nn

from fourfold.errors import UserError

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""The modules that draw a mask."""


def dropout_problems(model: nn.Module) -> list[str]:
    """A message for every module of dropout that is training."""
    return [message for name, module in model.named_modules() for message in _problem(module, name)]


def refuse_dropout_(model: nn.Module) -> None:
    """Have every module of dropout raise `UserError` where it is called in training."""
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS):
            module.register_forward_pre_hook(lambda module, _args, name=name: _refuse(module, name))


def _refuse(module: nn.Module, name: str) -> None:
    if found := _problem(module, name):
        raise UserError(*found)


def _problem(module: nn.Module, name: str) -> list[str]:
    if not (isinstance(module, DROPOUTS) and module.training and module.p > 0):
        return []
    return [
        f"'{name}' drops out with p={module.p} in training (Channel axis): each rank of tp would draw "
        "another mask for the same stream; use p=0, or tp=1"
    ]
