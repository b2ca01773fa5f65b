"""What the oracle found, as ranks hear of it: rank 0 has it, and each compares what it holds."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.collectives import all_gather, broadcast_
from fourfold.mesh import Mesh
from fourfold.oracle import Oracle, Trajectory

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
"""The largest error that passes, relative to the largest magnitude."""

BFLOAT16_FACTOR = 3.0
"""In bfloat16 a layout passes within this multiple of one bfloat16 process' own error against float64."""


class Tolerances(NamedTuple):
    """The largest relative errors that pass."""

    loss: float
    norm: float
    gradient: float
    weight: float


class Reference:
    """The oracle's steps beside those of a layout. All ranks call all of it, in one order.

    Rank 0 alone asks the oracle; the others receive what it says. An error is relative, and the worst over
    ranks.

    Args:
        oracle: what one process computes.
        mesh: the ranks of the layout.
        dtype: what the layout computed in.

    Attributes:
        dtype: what the reference was computed in: float64 where the layout is bfloat16. Then one process in
            bfloat16 gives the scale of the error.
    """

    def __init__(self, oracle: Oracle, mesh: Mesh, dtype: str):
        self.dtype = "float64" if dtype == "bfloat16" else dtype
        self._mesh = mesh
        self._exact: Trajectory | None = None
        self._rounded: Trajectory | None = None
        if mesh.world.rank == 0:
            self._exact = oracle.trajectory(self.dtype, mesh.device)
            self._rounded = oracle.trajectory(dtype, mesh.device) if dtype != self.dtype else None

    def loss_and_norm_errors(self, ours: Trajectory) -> tuple[float, float]:
        """Of the losses and of the gradient norms, the worst step."""
        mine, exact, steps = ours.losses + ours.norms, self._exact, len(ours.losses)
        expected = self._floats(exact.losses + exact.norms if exact else None, len(mine))
        errors = self._over_ranks([_relative(a, b) for a, b in zip(mine, expected, strict=True)])
        return worst(errors[:steps]), worst(errors[steps:])

    def gradient_errors(self, ours: Trajectory) -> list[dict[str, float]]:
        """Of every gradient by name, for each step."""
        return [
            self._tensor_errors(gradients, self._exact.gradients[step] if self._exact else None)
            for step, gradients in enumerate(ours.gradients)
        ]

    def weight_errors(self, ours: Trajectory) -> dict[str, float]:
        """Of the weights after the last step, by name."""
        return self._tensor_errors(ours.weights, self._exact.weights if self._exact else None)

    def tolerances(self) -> Tolerances:
        """What passes."""
        found = None
        if self._exact is not None and self._rounded is None:
            found = [TOLERANCE[self.dtype]] * len(Tolerances._fields)
        elif self._exact is not None and self._rounded is not None:
            found = [BFLOAT16_FACTOR * error for error in _rounding_errors(self._rounded, self._exact)]
        return Tolerances(*self._floats(found, len(Tolerances._fields)))

    def _tensor_errors(self, ours: dict[str, Tensor], exact: dict[str, Tensor] | None) -> dict[str, float]:
        scales = self._floats(_scales(exact, ours) if exact else None, len(ours))
        sizes = [tensor.numel() for tensor in ours.values()]
        # One message for all: a model has hundreds of tensors, and each message waits for all ranks.
        expected = torch.empty(sum(sizes), dtype=torch.float64, device=self._mesh.device)
        if exact:
            torch.cat([exact[name].double().flatten() for name in ours], out=expected)
        broadcast_(expected, self._mesh.world, source=0)
        errors = [
            _tensor_error(tensor, part.view_as(tensor), scale)
            for tensor, part, scale in zip(ours.values(), expected.split(sizes), scales, strict=True)
        ]
        return dict(zip(ours, self._over_ranks(errors), strict=True))

    def _floats(self, values: list[float] | None, count: int) -> list[float]:
        """So many numbers of rank 0, on all ranks."""
        mine = values if values is not None else [0.0] * count
        tensor = torch.tensor(mine, dtype=torch.float64, device=self._mesh.device)
        return broadcast_(tensor, self._mesh.world, source=0).tolist()

    def _over_ranks(self, errors: list[float]) -> list[float]:
        """For each error the worst over all ranks."""
        mine = torch.tensor([errors], dtype=torch.float64, device=self._mesh.device)
        gathered = all_gather(mine, self._mesh.world)
        return [worst(column) for column in gathered.t().tolist()]


def worst(errors: Iterable[float]) -> float:
    """The largest error; what is no number counts as infinite."""
    return max((error if error == error else float("inf") for error in errors), default=0.0)


def _rounding_errors(rounded: Trajectory, exact: Trajectory) -> Tolerances:
    """How far one process in low precision is from the reference."""

    def worst_of(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
        scales = _scales(expected, expected)
        return worst(
            _tensor_error(tensors[name], expected[name], s) for name, s in zip(expected, scales, strict=True)
        )

    # Errors of a loss may cancel over rows by luck: the scale is the sum of the rows' errors without signs.
    loss = worst(
        sum(abs(a - b) for a, b in zip(rows, expected, strict=True)) / (abs(sum(expected)) or 1.0)
        for rows, expected in zip(rounded.row_losses, exact.row_losses, strict=True)
    )
    norm = worst(_relative(a, b) for a, b in zip(rounded.norms, exact.norms, strict=True))
    gradient = worst(worst_of(a, b) for a, b in zip(rounded.gradients, exact.gradients, strict=True))
    return Tolerances(loss, norm, gradient, worst_of(rounded.weights, exact.weights))


def _scales(exact: dict[str, Tensor], names: Iterable[str]) -> list[float]:
    """What the error of each named tensor is relative to: its own largest magnitude.

    Or 1e-4 of the largest of all tensors where that is more: a tensor of pure rounding noise has no scale of
    its own.
    """
    maxima = [float(exact[name].abs().max()) for name in names]
    return [max(maximum, 1e-4 * max(maxima)) or 1.0 for maximum in maxima]


def _tensor_error(tensor: Tensor, expected: Tensor, scale: float) -> float:
    return float((tensor.double() - expected.double()).abs().max()) / scale


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / (abs(expected) or 1.0)
