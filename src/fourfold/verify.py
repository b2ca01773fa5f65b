"""Compare a layout with one process: the same steps, the same numbers.

[Note: the oracle] The reference is a plain PyTorch loop in one process: the whole model, one row of the
global batch at a time, autograd's own gradients, plain SGD. It shares the model, the initial weights and the
data with the layout, and none of the machinery that is on trial: no segments, no flat buffers, no program,
no collectives. Every rank then compares what it holds with the reference, parameter by parameter.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fourfold.batch.units import master_dtype
from fourfold.collectives import all_gather, broadcast_
from fourfold.data import Dataset
from fourfold.initialize import initialize_, whole
from fourfold.mesh import Mesh
from fourfold.models import IGNORE, Decoder
from fourfold.optimizer import gradient_norm, owned_parameters
from fourfold.parallel_model import DEFAULT_SHARDING, ParallelModel
from fourfold.specs import ModelSpec, ShardingSection
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
from fourfold.training import initialized, rank_batches

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
"""The largest error that passes, relative to the largest magnitude."""

BFLOAT16_FACTOR = 3.0
"""In bfloat16 a layout passes within this multiple of one bfloat16 process' own error against float64."""

LEARNING_RATE = 0.1
"""Of the plain SGD steps. SGD shows a gradient that is off by a factor; Adam would hide it."""


@dataclass(frozen=True)
class Difference:
    """How far one quantity is from the reference, relative to the largest magnitude of the reference."""

    name: str
    error: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether the error is within the tolerance; an error that is no number is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`.

    Attributes:
        layout: as printed.
        dtype: what the layout computed in.
        steps: how many SGD steps were compared.
        loss: worst step.
        norm: of the gradient norm, worst step.
        gradients: each parameter's gradient, worst step, the worst first.
        weights: each parameter after the last step, the worst first.
        valid_tokens: labels that counted in the first step, rank by rank of the data axes.
        tokens_agree: whether the dataset's count of valid labels equals the labels in the batches.
    """

    layout: str
    dtype: str
    steps: int
    loss: Difference
    norm: Difference
    gradients: tuple[Difference, ...]
    weights: tuple[Difference, ...]
    valid_tokens: tuple[int, ...]
    tokens_agree: bool

    @property
    def passes(self) -> bool:
        """Whether every quantity is within its tolerance."""
        differences = (self.loss, self.norm, *self.gradients, *self.weights)
        return self.tokens_agree and all(difference.passes for difference in differences)

    def to_json(self) -> dict[str, object]:
        """The summary that ``fourfold verify --json`` prints."""
        worst = self.gradients[0]
        return {
            "layout": self.layout,
            "dtype": self.dtype,
            "steps": self.steps,
            "loss_error": self.loss.error,
            "gradient_error": worst.error,
            "gradient_worst": worst.name,
            "norm_error": self.norm.error,
            "weight_error": self.weights[0].error,
            "valid_tokens": list(self.valid_tokens),
            "tolerances": {
                "loss": self.loss.tolerance,
                "gradient": worst.tolerance,
                "norm": self.norm.tolerance,
                "weight": self.weights[0].tolerance,
            },
            "pass": self.passes,
        }


@dataclass
class _Trajectory:
    """What a few SGD steps gave: a loss, a norm and named gradients for each, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    row_losses: list[list[float]] = field(default_factory=list)
    """Of the reference only: the summed loss of each row of the global batch, for each step."""


def verify(
    model_spec: ModelSpec,
    mesh: Mesh,
    data: Dataset,
    *,
    batch: int,
    microbatches: int = 1,
    steps: int = 3,
    dtype: str = "float64",
    seed: int = 0,
    sharding: ShardingSection = DEFAULT_SHARDING,
    recompute: RecomputeName = NO_RECOMPUTATION,
) -> Verification:
    """Run ``steps`` SGD steps on ``mesh`` and in one process, and compare. Called on every rank of ``mesh``.

    Args:
        model_spec: the model.
        mesh: the layout on trial.
        data: gives the same global batches to both.
        batch: rows of the global batch.
        microbatches: into how many pieces a rank cuts its share.
        steps: how many steps.
        dtype: ``float64``, ``float32`` or ``bfloat16``.
        seed: of the initial weights.
        sharding: how weights are cut over the fsdp axis.
        recompute: which forwards the layout runs again.
    """
    parallel = initialized(
        model_spec,
        mesh,
        microbatches=microbatches,
        dtype=dtype,
        seed=seed,
        sharding=sharding,
        sequence_length=data.rows(0, batch, range(1)).input_ids_BS.shape[1],
        batch=batch,
        recompute=recompute,
    )
    ours, counts, agree = _run_layout(parallel, data, batch=batch, microbatches=microbatches, steps=steps)
    # Rank 0 alone runs the reference; the others receive it tensor by tensor. In bfloat16 the reference is
    # float64, and one bfloat16 process gives the scale of the error.
    exact = "float64" if dtype == "bfloat16" else dtype
    reference = scale = None
    if mesh.world.rank == 0:
        one_process = partial(
            _run_one_process, model_spec, data=data, batch=batch, steps=steps, seed=seed, device=mesh.device
        )
        reference = one_process(dtype=exact)
        scale = one_process(dtype=dtype) if dtype != exact else None

    losses = _broadcast_floats(mesh, reference.losses + reference.norms if reference else None, 2 * steps)
    ours_floats = ours.losses + ours.norms
    float_errors = _over_ranks(mesh, [_relative(a, b) for a, b in zip(ours_floats, losses, strict=True)])
    gradient_errors = dict.fromkeys(ours.weights, 0.0)
    for step in range(steps):
        errors = _tensor_errors(mesh, ours.gradients[step], reference.gradients[step] if reference else None)
        gradient_errors = {name: _worse(error, errors[name]) for name, error in gradient_errors.items()}
    weight_errors = _tensor_errors(mesh, ours.weights, reference.weights if reference else None)
    tolerances = _broadcast_floats(mesh, _tolerances(dtype, reference, scale) if reference else None, 4)
    loss_tolerance, norm_tolerance, gradient_tolerance, weight_tolerance = tolerances
    return Verification(
        layout=str(mesh.layout),
        dtype=dtype,
        steps=steps,
        loss=Difference("loss", _worst(float_errors[:steps]), loss_tolerance),
        norm=Difference("gradient norm", _worst(float_errors[steps:]), norm_tolerance),
        gradients=_ranked(gradient_errors, gradient_tolerance),
        weights=_ranked(weight_errors, weight_tolerance),
        valid_tokens=counts,
        tokens_agree=agree,
    )


def _run_layout(
    parallel: ParallelModel, data: Dataset, *, batch: int, microbatches: int, steps: int
) -> tuple[_Trajectory, tuple[int, ...], bool]:
    mesh = parallel.mesh
    owned = owned_parameters(parallel.units)
    optimizer = torch.optim.SGD([{"params": owned.decayed}, {"params": owned.plain}], lr=LEARNING_RATE)
    trajectory = _Trajectory([], [], [], {})
    counts: list[list[int]] = []

    def update(loss_sum: Tensor) -> None:
        trajectory.gradients.append({name: g.clone() for name, g in parallel.named_gradients()})
        trajectory.norms.append(gradient_norm(parallel.counted_units, parallel.norm_axis))
        optimizer.step()
        parallel.publish_()

    agree = True
    for step in range(steps):
        batches = rank_batches(data, mesh, step=step, batch=batch, microbatches=microbatches)
        mine = sum(int((microbatch.labels_BS != IGNORE).sum()) for microbatch in batches)
        counts.append(all_gather(torch.tensor([mine], device=mesh.device), mesh.data).tolist())
        valid_tokens = data.valid_tokens(step, batch)
        agree = agree and valid_tokens == sum(counts[-1])
        loss_sum = parallel.step(batches, valid_tokens=valid_tokens, update=update)
        trajectory.losses.append(float(loss_sum) / max(valid_tokens, 1))
    trajectory.weights = {name: master.clone() for name, master in parallel.named_masters()}
    return trajectory, tuple(counts[0]), agree


def _run_one_process(
    model_spec: ModelSpec,
    *,
    data: Dataset,
    batch: int,
    steps: int,
    dtype: str,
    seed: int,
    device: torch.device,
) -> _Trajectory:
    """See [Note: the oracle]."""
    compute = getattr(torch, dtype)
    with device:
        model = Decoder(model_spec).to(compute)
    masters = {
        name: torch.empty(p.shape, dtype=master_dtype(compute), device=device)
        for name, p in model.named_parameters()
    }
    initialize_(whole(masters), model, seed=seed, std=model_spec.initializer_range)
    parameters = dict(model.named_parameters())
    trajectory = _Trajectory([], [], [], {})
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.data.copy_(masters[name])
            parameter.grad = None
            parameter.grad_dtype = masters[name].dtype
        valid_tokens = max(data.valid_tokens(step, batch), 1)
        row_losses = []
        for row in range(batch):
            loss_sum = model.loss_sum(data.rows(step, batch, range(row, row + 1)).to(device))
            (loss_sum / valid_tokens).backward()
            row_losses.append(float(loss_sum.detach()))
        gradients = {name: _whole(parameter.grad, masters[name]) for name, parameter in parameters.items()}
        trajectory.row_losses.append(row_losses)
        trajectory.losses.append(sum(row_losses) / valid_tokens)
        trajectory.norms.append(sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5)
        trajectory.gradients.append(gradients)
        for name, master in masters.items():
            master -= LEARNING_RATE * gradients[name]
    trajectory.weights = masters
    return trajectory


def _whole(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _scales(reference: dict[str, Tensor], names: Iterable[str]) -> list[float]:
    """What the error of each named tensor is relative to: its own largest magnitude.

    Or 1e-4 of the largest of all tensors where that is more: a tensor of pure rounding noise has no scale of
    its own.
    """
    maxima = [float(reference[name].abs().max()) for name in names]
    return [max(maximum, 1e-4 * max(maxima)) or 1.0 for maximum in maxima]


def _tensor_error(tensor: Tensor, expected: Tensor, scale: float) -> float:
    return float((tensor.double() - expected.double()).abs().max()) / scale


def _tensor_errors(
    mesh: Mesh, ours: dict[str, Tensor], reference: dict[str, Tensor] | None
) -> dict[str, float]:
    """The error of every named tensor, the worst over ranks; rank 0 holds the reference and broadcasts it."""
    scales = _broadcast_floats(mesh, _scales(reference, ours) if reference else None, len(ours))
    errors = []
    for (name, tensor), scale in zip(ours.items(), scales, strict=True):
        expected = reference[name].double() if reference else torch.empty_like(tensor, dtype=torch.float64)
        broadcast_(expected, mesh.world, source=0)
        errors.append(_tensor_error(tensor, expected, scale))
    return dict(zip(ours, _over_ranks(mesh, errors), strict=True))


def _tolerances(dtype: str, reference: _Trajectory, scale: _Trajectory | None) -> list[float]:
    """Of loss, norm, gradients and weights."""
    if scale is None:
        return [TOLERANCE[dtype]] * 4

    def worst(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
        scales = _scales(expected, expected)
        return _worst(
            _tensor_error(tensors[name], expected[name], s) for name, s in zip(expected, scales, strict=True)
        )

    # Errors of a loss may cancel over rows by luck: the scale is the sum of the rows' errors without signs.
    loss = _worst(
        sum(abs(a - b) for a, b in zip(rows, expected, strict=True)) / (abs(sum(expected)) or 1.0)
        for rows, expected in zip(scale.row_losses, reference.row_losses, strict=True)
    )
    norm = _worst(_relative(a, b) for a, b in zip(scale.norms, reference.norms, strict=True))
    gradient = _worst(worst(a, b) for a, b in zip(scale.gradients, reference.gradients, strict=True))
    errors = [loss, norm, gradient, worst(scale.weights, reference.weights)]
    return [BFLOAT16_FACTOR * error for error in errors]


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / (abs(reference) or 1.0)


def _worst(errors: Iterable[float]) -> float:
    worst = 0.0
    for error in errors:
        worst = _worse(worst, error)
    return worst


def _worse(a: float, b: float) -> float:
    """The larger error; what is no number counts as infinite."""
    return max(a if a == a else float("inf"), b if b == b else float("inf"))


def _ranked(errors: dict[str, float], tolerance: float) -> tuple[Difference, ...]:
    ordered = sorted(errors.items(), key=lambda item: -item[1])
    return tuple(Difference(name, error, tolerance) for name, error in ordered)


def _broadcast_floats(mesh: Mesh, values: list[float] | None, count: int) -> list[float]:
    tensor = torch.tensor(
        values if values is not None else [0.0] * count, dtype=torch.float64, device=mesh.device
    )
    return broadcast_(tensor, mesh.world, source=0).tolist()


def _over_ranks(mesh: Mesh, errors: list[float]) -> list[float]:
    """For each error the worst over all ranks."""
    mine = torch.tensor([errors], dtype=torch.float64, device=mesh.device)
    gathered = all_gather(mine, mesh.world)
    return [_worst(column) for column in gathered.t().tolist()]
