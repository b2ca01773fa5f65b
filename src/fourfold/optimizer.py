"""The optimizer on flat buffers: AdamW or SGD, the gradient norm, clipping."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fourfold.batch.units import Unit
from fourfold.specs import OptimizerSection


def flat_parameters(units: Sequence[Unit]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The master weights as few flat parameters whose ``.grad`` are the flat gradients.

    Returns:
        Those that decay (matrices) and those that do not (norms, biases), views into the units' buffers.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for unit in units:
        for target, part in ((decayed, slice(unit.num_decayed)), (plain, slice(unit.num_decayed, None))):
            if unit.master[part].numel():
                parameter = nn.Parameter(unit.master[part])
                parameter.grad = unit.gradient[part]
                target.append(parameter)
    return decayed, plain


def adamw(units: Sequence[Unit], spec: OptimizerSection) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) on the units' master weights; only matrices decay."""
    decayed, plain = flat_parameters(units)
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, fused=True)


NORM_ROW = 4096
"""Squares of so many elements are summed in the gradients' own dtype, sums of those in float64."""


def gradient_norm(units: Sequence[Unit]) -> float:
    """The 2-norm of all gradients together, each parameter counted once.

    One float32 sum over 8 million squares is off by 4e-4; sums over short rows, added in float64, are off by
    1e-8 and take no longer. Where a square overflows although the gradients are finite, all is float64.
    """
    total = torch.stack([_square_sum(unit.gradient) for unit in units]).sum()
    if not torch.isfinite(total):
        total = torch.stack([unit.gradient.double().square().sum() for unit in units]).sum()
    return math.sqrt(float(total)) if torch.isfinite(total) else float(total)


def _square_sum(flat: Tensor) -> Tensor:
    whole = flat.numel() - flat.numel() % NORM_ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    return norms.double().square().sum() + flat[whole:].double().square().sum()


def clip_(units: Sequence[Unit], *, norm: float, max_norm: float) -> None:
    """Scale all gradients by ``max_norm / norm`` where ``norm`` is larger."""
    if norm > max_norm:
        torch._foreach_mul_([unit.gradient for unit in units], max_norm / norm)


class Update:
    """What UPDATE does: the norm, the check that all is finite, clipping, the optimizer.

    Args:
        units: whose weights and gradients it works on.
        optimizer: on the units' flat parameters.
        clip_norm: the largest gradient norm, 0 for none.

    Attributes:
        learning_rate: of the next update.
        norm: of the whole gradient at the last update, before clipping.
    """

    def __init__(self, units: Sequence[Unit], optimizer: torch.optim.Optimizer, *, clip_norm: float):
        self._units = units
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self.learning_rate = 0.0
        self.norm = math.nan

    def __call__(self, loss_sum: Tensor) -> None:
        """Update the weights, given the loss of the global batch; not at all if it or the norm is not finite.

        Loss and gradients are sums over ranks, so every rank comes to the same decision.
        """
        self.norm = gradient_norm(self._units)
        if not (math.isfinite(self.norm) and math.isfinite(float(loss_sum))):
            return
        if self._clip_norm:
            clip_(self._units, norm=self.norm, max_norm=self._clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.step()
        for unit in self._units:
            unit.publish_()
