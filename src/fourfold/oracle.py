"""What one process computes: the reference that every layout is held against.

[Note: the oracle] The reference is a plain PyTorch loop in one process: the whole model, one row of the
global batch at a time, autograd's own gradients, plain SGD. It shares the model, the initial weights and the
data with the layout, and none of the machinery that is on trial: no segments, no flat buffers, no program,
no collectives. With the model it shares the kernels of attention, which tests hold against plain formulas.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.batch.units import master_dtype
from fourfold.data import Dataset
from fourfold.initialize import initialize_, whole
from fourfold.models import Decoder
from fourfold.specs import ModelSpec

LEARNING_RATE = 0.1
"""Of the plain SGD steps. SGD shows a gradient that is off by a factor; Adam would hide it."""


@dataclass
class Trajectory:
    """What a few SGD steps gave: a loss, a norm and named gradients for each, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    row_losses: list[list[float]] = field(default_factory=list)
    """Of the reference only: the summed loss of each row of the global batch, for each step."""


class Oracle:
    """A few SGD steps of a model in one process; see [Note: the oracle].

    Each precision is computed once, at its first use, and kept: several layouts are held against one oracle.

    Args:
        model_spec: the model.
        data: gives the global batches.
        batch: rows of a global batch.
        steps: how many steps.
        seed: of the initial weights.
    """

    def __init__(self, model_spec: ModelSpec, data: Dataset, *, batch: int, steps: int, seed: int):
        self.model_spec = model_spec
        self.data = data
        self.batch = batch
        self.steps = steps
        self.seed = seed
        self._found: dict[tuple[str, torch.device], Trajectory] = {}

    def trajectory(self, dtype: str, device: torch.device) -> Trajectory:
        """What the steps give in ``float64``, ``float32`` or ``bfloat16``."""
        if (dtype, device) not in self._found:
            self._found[dtype, device] = self._run(getattr(torch, dtype), device)
        return self._found[dtype, device]

    def model(self, dtype: torch.dtype, device: torch.device) -> tuple[Decoder, dict[str, Tensor]]:
        """The model with its initial weights, and their masters by name."""
        with device:
            model = Decoder(self.model_spec).to(dtype)
        masters = {
            name: torch.empty(p.shape, dtype=master_dtype(dtype), device=device)
            for name, p in model.named_parameters()
        }
        initialize_(whole(masters), model, seed=self.seed, std=self.model_spec.initializer_range)
        publish_(model, masters)
        return model, masters

    def _run(self, dtype: torch.dtype, device: torch.device) -> Trajectory:
        model, masters = self.model(dtype, device)
        parameters = dict(model.named_parameters())
        trajectory = Trajectory([], [], [], {})
        for step in range(self.steps):
            valid_tokens = max(self.data.valid_tokens(step, self.batch), 1)
            row_losses = []
            for row in range(self.batch):
                rows = self.data.rows(step, self.batch, range(row, row + 1)).to(device)
                loss_sum = model.loss_sum(rows)
                (loss_sum / valid_tokens).backward()
                row_losses.append(float(loss_sum.detach()))
            gradients = {
                name: _whole(parameter.grad, masters[name]) for name, parameter in parameters.items()
            }
            trajectory.row_losses.append(row_losses)
            trajectory.losses.append(sum(row_losses) / valid_tokens)
            trajectory.norms.append(sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5)
            trajectory.gradients.append(gradients)
            for name, master in masters.items():
                master -= LEARNING_RATE * gradients[name]
            publish_(model, masters)
        trajectory.weights = masters
        return trajectory


def publish_(model: Decoder, masters: dict[str, Tensor]) -> None:
    """Give a model its master weights, in its own precision, and no gradients."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(masters[name])
        parameter.grad = None
        parameter.grad_dtype = masters[name].dtype


def _whole(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
