"""Compare a layout with one process: the same steps, the same numbers.

Every rank compares what it holds with the reference, parameter by parameter: [Note: the oracle] in
`fourfold.oracle`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourfold.assembly import DEFAULT_SHARDING
from fourfold.collectives import all_gather
from fourfold.data import SyntheticDataset
from fourfold.first_difference import SUMS, FirstDifference, first_difference, suspects
from fourfold.mesh import Mesh
from fourfold.models import IGNORE
from fourfold.optimizer import gradient_norm, owned_parameters
from fourfold.oracle import LEARNING_RATE, Oracle, Trajectory
from fourfold.parallel_model import ParallelModel
from fourfold.reference import Reference, worst
from fourfold.specs import Layout, ShardingSection
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
from fourfold.training import initialized, rank_batches
from fourfold.trial import Trial


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
    ours, counts, agree = _run_layout(parallel, oracle, microbatches=microbatches)
    reference = Reference(oracle, mesh, dtype)
    loss_error, norm_error = reference.loss_and_norm_errors(ours)
    gradient_errors = reference.gradient_errors(ours)
    weight_errors = reference.weight_errors(ours)
    tolerances = reference.tolerances()
    worst_gradients = {name: worst(errors[name] for errors in gradient_errors) for name in ours.weights}
    verification = Verification(
        layout=str(mesh.layout.resolved(oracle.model_spec)),
        sequence_length=sequence_length,
        dtype=dtype,
        steps=oracle.steps,
        loss=Difference("loss", loss_error, tolerances.loss),
        norm=Difference("gradient norm", norm_error, tolerances.norm),
        gradients=_ranked(worst_gradients, tolerances.gradient),
        weights=_ranked(weight_errors, tolerances.weight),
        valid_tokens=counts,
        tokens_agree=agree,
    )
    if verification.passes:
        return verification
    where = first_difference(
        parallel,
        oracle,
        microbatches=microbatches,
        dtype=reference.dtype,
        tolerance=tolerances.gradient,
    )
    if where is None and worst(gradient_errors[0].values()) > tolerances.gradient:
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


def _ranked(errors: dict[str, float], tolerance: float) -> tuple[Difference, ...]:
    ordered = sorted(errors.items(), key=lambda item: -item[1])
    return tuple(Difference(name, error, tolerance) for name, error in ordered)
