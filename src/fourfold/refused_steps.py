"""Parameters that no optimizer may step, with the reason: it would do nothing, or harm, silently."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fourfold.errors import UserError

_REFUSAL = "_fourfold_refusal"


def refuse_steps_(parameters: Iterable[nn.Parameter], refusal: str | None) -> None:
    """Let the ``step`` of every optimizer that has one of these raise UserError; None lets it work again."""
    _watch_optimizers()
    for parameter in parameters:
        setattr(parameter, _REFUSAL, refusal)


def is_refused(parameter: nn.Parameter) -> bool:
    """Whether no optimizer may step the parameter."""
    return getattr(parameter, _REFUSAL, None) is not None


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_refused(parameter):
                raise UserError(getattr(parameter, _REFUSAL))
