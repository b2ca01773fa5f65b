"""Compare a layout with one process: the same steps, the same numbers.

Every rank compares what it holds with the reference, parameter by parameter: [Note: the oracle] in
`fourfold.oracle`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourfold.collectives import all_gather, broadcast_
from fourfold.data import SyntheticDataset
from fourfold.first_difference import SUMS, FirstDifference, first_difference, suspects
from fourfold.mesh import Mesh
from fourfold.models import IGNORE
from fourfold.optimizer import gradient_norm, owned_parameters
from fourfold.oracle import LEARNING_RATE, Oracle, Trajectory
from fourfold.parallel_model import DEFAULT_SHARDING, ParallelModel
from fourfold.specs import Layout, ShardingSection
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
from fourfold.training import initialized, rank_batches
from fourfold.trial import Trial

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
"""The largest error that passes, relative to the largest magnitude."""

BFLOAT16_FACTOR = 3.0
"""In bfloat16 a layout passes within this multiple of one bfloat16 process' own error against float64."""


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
        sequence_length: tokens of a sequence.
        dtype: what the layout computed in.
        steps: how many SGD steps were compared.
        loss: worst step.
        norm: of the gradient norm, worst step.
        gradients: each parameter's gradient, worst step, the worst first.
        weights: each parameter after the last step, the worst first.
        valid_tokens: labels that counted in the first step, rank by rank of the data axes.
        tokens_agree: whether the dataset's count of valid labels equals the labels in the batches.
        where: the first place at which a rank is off, empty where it passes.
        why_cp: why the option of cp is this one, empty where it was given.
    """

    layout: str
    sequence_length: int
    dtype: str
    steps: int
    loss: Difference
    norm: Difference
    gradients: tuple[Difference, ...]
    weights: tuple[Difference, ...]
    valid_tokens: tuple[int, ...]
    tokens_agree: bool
    where: str = ""
    why_cp: str = ""

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
            "sequence_length": self.sequence_length,
            "sequence_parallel": Layout.parse(self.layout).sequence_parallel(self.sequence_length),
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
            "where": self.where,
            "pass": self.passes,
        }


def verify(
    oracle: Oracle,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    dtype: str = "float64",
    sharding: ShardingSection = DEFAULT_SHARDING,
    recompute: RecomputeName = NO_RECOMPUTATION,
) -> Verification:
    """Run the oracle's steps on ``mesh`` and compare. Called on every rank of ``mesh``.

    Args:
        oracle: the model, its data and what one process computes: rank 0 asks it, the others need not.
        mesh: the layout on trial.
        microbatches: into how many pieces a rank cuts its share.
        dtype: ``float64``, ``float32`` or ``bfloat16``.
        sharding: how weights are cut over the fsdp axis.
        recompute: which forwards the layout runs again.
    """
    sequence_length = oracle.data.rows(0, oracle.batch, range(1)).input_ids_BS.shape[1]
    parallel = initialized(
        oracle.model_spec,
        mesh,
        microbatches=microbatches,
        dtype=dtype,
        seed=oracle.seed,
        sharding=sharding,
        sequence_length=sequence_length,
        batch=oracle.batch,
        recompute=recompute,
    )
    steps = oracle.steps
    ours, counts, agree = _run_layout(parallel, oracle, microbatches=microbatches)
    # Rank 0 alone asks the oracle; the others receive what it says. In bfloat16 the
    # reference is float64, and one bfloat16 process gives the scale of the error.
    exact = "float64" if dtype == "bfloat16" else dtype
    reference = scale = None
    if mesh.world.rank == 0:
        reference = oracle.trajectory(exact, mesh.device)
        scale = oracle.trajectory(dtype, mesh.device) if dtype != exact else None

    losses = _broadcast_floats(mesh, reference.losses + reference.norms if reference else None, 2 * steps)
    ours_floats = ours.losses + ours.norms
    float_errors = _over_ranks(mesh, [_relative(a, b) for a, b in zip(ours_floats, losses, strict=True)])
    gradient_errors = [
        _tensor_errors(mesh, ours.gradients[step], reference.gradients[step] if reference else None)
        for step in range(steps)
    ]
    weight_errors = _tensor_errors(mesh, ours.weights, reference.weights if reference else None)
    tolerances = _broadcast_floats(mesh, _tolerances(dtype, reference, scale) if reference else None, 4)
    loss_tolerance, norm_tolerance, gradient_tolerance, weight_tolerance = tolerances
    worst_gradients = {name: _worst(errors[name] for errors in gradient_errors) for name in ours.weights}
    verification = Verification(
        layout=str(mesh.layout.resolved(oracle.model_spec)),
        sequence_length=sequence_length,
        dtype=dtype,
        steps=steps,
        loss=Difference("loss", _worst(float_errors[:steps]), loss_tolerance),
        norm=Difference("gradient norm", _worst(float_errors[steps:]), norm_tolerance),
        gradients=_ranked(worst_gradients, gradient_tolerance),
        weights=_ranked(weight_errors, weight_tolerance),
        valid_tokens=counts,
        tokens_agree=agree,
    )
    if verification.passes:
        return verification
    where = first_difference(
        parallel, oracle, microbatches=microbatches, dtype=exact, tolerance=gradient_tolerance
    )
    if where is None and _worst(gradient_errors[0].values()) > gradient_tolerance:
        axes = suspects(mesh.layout, mesh.world.ranks, SUMS)
        where = FirstDifference(SUMS, None, mesh.world.ranks, axes)
    return replace(verification, where="later than the first step's sums" if where is None else str(where))


def oracle_of(trial: Trial) -> Oracle:
    """What a trial is held against, on made-up data."""
    data = SyntheticDataset(trial.spec.vocab_size, trial.sequence_length, trial.seed)
    return Oracle(trial.spec, data, batch=trial.batch, steps=trial.steps, seed=trial.seed)


def verify_trial(trial: Trial, oracle: Oracle, *, device_type: str = "cpu") -> Verification:
    """Hold a trial against its oracle. Called on every rank of its layout."""
    return verify(
        oracle,
        Mesh(trial.layout, device_type),
        microbatches=trial.microbatches,
        dtype=trial.dtype,
        sharding=trial.sharding,
        recompute=trial.recompute,
    )


def _run_layout(
    parallel: ParallelModel, oracle: Oracle, *, microbatches: int
) -> tuple[Trajectory, tuple[int, ...], bool]:
    mesh, data, batch = parallel.mesh, oracle.data, oracle.batch
    owned = owned_parameters(parallel.units)
    optimizer = torch.optim.SGD([{"params": owned.decayed}, {"params": owned.plain}], lr=LEARNING_RATE)
    trajectory = Trajectory([], [], [], {})
    counts: list[list[int]] = []

    def update(loss_sum: Tensor) -> None:
        trajectory.gradients.append({name: g.clone() for name, g in parallel.named_gradients()})
        trajectory.norms.append(gradient_norm(parallel.counted_units, parallel.norm_axis))
        optimizer.step()
        parallel.publish_()

    agree = True
    for step in range(oracle.steps):
        batches = rank_batches(data, mesh, step=step, batch=batch, microbatches=microbatches)
        mine = sum(int((microbatch.labels_BS != IGNORE).sum()) for microbatch in batches)
        counts.append(all_gather(torch.tensor([mine], device=mesh.device), mesh.data).tolist())
        valid_tokens = data.valid_tokens(step, batch)
        agree = agree and valid_tokens == sum(counts[-1])
        loss_sum = parallel.step(batches, valid_tokens=valid_tokens, update=update)
        trajectory.losses.append(float(loss_sum) / max(valid_tokens, 1))
    trajectory.weights = {name: master.clone() for name, master in parallel.named_masters()}
    return trajectory, tuple(counts[0]), agree


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
    sizes = [tensor.numel() for tensor in ours.values()]
    # One message for all: a model has hundreds of tensors, and each message waits for all ranks.
    expected = torch.empty(sum(sizes), dtype=torch.float64, device=mesh.device)
    if reference:
        torch.cat([reference[name].double().flatten() for name in ours], out=expected)
    broadcast_(expected, mesh.world, source=0)
    errors = [
        _tensor_error(tensor, part.view_as(tensor), scale)
        for tensor, part, scale in zip(ours.values(), expected.split(sizes), scales, strict=True)
    ]
    return dict(zip(ours, _over_ranks(mesh, errors), strict=True))


def _tolerances(dtype: str, reference: Trajectory, scale: Trajectory | None) -> list[float]:
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
