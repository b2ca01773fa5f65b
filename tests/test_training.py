"""The training loop on real ranks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.data import SyntheticDataset
from fourfold.errors import RunStopped
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.specs import Layout, ModelSpec, RunSpec
from fourfold.training import EvaluationReport, Report, StepReport, evaluate, initialized, rank_batches, train
from tests.ranks import RankPool


def run_spec(layout: str, **sections: dict[str, Any]) -> RunSpec:
    values: dict[str, Any] = {
        "layout": layout,
        "model": {"preset": "tiny"},
        "data": {"sequence_length": 16},
        "training": {"steps": 4, "batch": 12, "dtype": "float64"},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "evaluation": {"every": 2, "batches": 2},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return RunSpec.model_validate(values)


def reports_of(layout: str, sections: dict[str, dict[str, Any]]) -> tuple[list[Report], dict[str, Tensor]]:
    run, spec = run_spec(layout, **sections), ModelSpec.preset("tiny")
    data = SyntheticDataset(spec.vocab_size, run.data.sequence_length, seed=1)
    held_out = SyntheticDataset(spec.vocab_size, run.data.sequence_length, seed=2)
    reports: list[Report] = []
    parallel = train(
        run, spec, Mesh(run.layout), train_data=data, eval_data=held_out, on_report=reports.append
    )
    return reports, {name: master.clone() for name, master in parallel.named_masters()}


def test_every_layout_trains_alike(ranks: RankPool) -> None:
    """Loss, norm and weights of AdamW with clipping, evaluation in between: dp1 against other layouts."""
    [(expected, weights)] = ranks(1, reports_of, "dp1", {})
    assert [type(report) for report in expected] == [
        StepReport, StepReport, EvaluationReport, StepReport, StepReport, EvaluationReport,
    ]  # fmt: skip
    for layout, microbatches in (
        ("dp2", 3), ("dp3", 2), ("dp4", 1),
        ("fsdp2", 3), ("fsdp3:zero1", 2), ("fsdp4:zero2", 1), ("dp2,fsdp2", 3),
    ):  # fmt: skip
        for reports, ours in ranks(
            Layout.parse(layout).world_size, reports_of, layout, {"training": {"microbatches": microbatches}}
        ):
            for report, reference in zip(reports, expected, strict=True):
                assert report.loss == pytest.approx(reference.loss, rel=1e-10)
                assert report.valid_tokens == reference.valid_tokens
                if isinstance(report, StepReport) and isinstance(reference, StepReport):
                    assert report.grad_norm == pytest.approx(reference.grad_norm, rel=1e-10)
                    assert report.learning_rate == reference.learning_rate
            for name, weight in weights.items():
                torch.testing.assert_close(ours[name], weight, rtol=1e-8, atol=1e-10)


def test_evaluation_does_not_disturb_training(ranks: RankPool) -> None:
    # RNG-06
    [(with_evaluation, _)] = ranks(1, reports_of, "dp1", {})
    [(without, _)] = ranks(1, reports_of, "dp1", {"evaluation": {"every": 0}})
    losses = [
        [r.loss for r in reports if isinstance(r, StepReport)] for reports in (with_evaluation, without)
    ]
    assert losses[0] == losses[1]


def test_ranks_of_one_job_take_disjoint_rows_that_make_up_the_batch(ranks: RankPool) -> None:
    spec = ModelSpec.preset("tiny")
    whole = SyntheticDataset(spec.vocab_size, 8, seed=0).rows(5, 12, range(12)).input_ids_BS
    parts = ranks(3, rows_of_rank, "dp3")
    found = torch.cat([torch.cat(rows) for rows in parts])
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, whole.tolist()))


def rows_of_rank(layout: str) -> list[Tensor]:
    data = SyntheticDataset(ModelSpec.preset("tiny").vocab_size, 8, seed=0)
    batches = rank_batches(data, Mesh(Layout.parse(layout)), step=5, batch=12, microbatches=2)
    return [microbatch.input_ids_BS for microbatch in batches]


class SpoiledOnOneRank(SyntheticDataset):
    """Synthetic data whose positions are not a number at step 2, as one rank alone may see it."""

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        microbatch = super().rows(step, batch, rows)
        return (
            replace(microbatch, position_ids_BS=microbatch.position_ids_BS * math.nan)
            if step == 2
            else microbatch
        )


def stopped_by(layout: str, bad_rank: int) -> tuple[str, list[float]]:
    """Train with spoiled data on one rank; return the message and the losses that were reported."""
    run, spec, mesh = run_spec(layout), ModelSpec.preset("tiny"), Mesh(Layout.parse(layout))
    kind = SpoiledOnOneRank if mesh.data.rank == bad_rank else SyntheticDataset
    data = kind(spec.vocab_size, run.data.sequence_length, 1)
    reports: list[Report] = []
    try:
        train(run, spec, mesh, train_data=data, eval_data=data, on_report=reports.append)
    except RunStopped as error:
        return str(error), [report.loss for report in reports if isinstance(report, StepReport)]
    return "did not stop", []


@pytest.mark.parametrize("layout", ["dp4", "fsdp4", "fsdp4:zero1", "fsdp4:zero2", "dp2,fsdp2"])
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_one(ranks: RankPool, layout: str) -> None:
    results = ranks(4, stopped_by, layout, 2)
    for message, losses in results:
        assert message.startswith("step 3 is not finite; no weight was changed by it: ")
        assert "the loss is not finite on rank 2; the backward meets it first in lm_head.weight" in message
        assert [math.isnan(loss) for loss in losses] == [False, False, True]


def test_diverged_weights_stop_the_run() -> None:
    with pytest.raises(
        RunStopped, match=r"step 2 is not finite; .* on rank 0; the backward meets it first in"
    ):
        reports_of("dp1", {"optimizer": {"learning_rate": 1e300, "warmup_steps": 0}})


def test_an_update_that_breaks_the_weights_stops_the_run() -> None:
    """The step itself was finite, the weights after it are not: the evaluation says so."""
    sections = {
        "training": {"steps": 1, "dtype": "float32"},
        "optimizer": {"learning_rate": 3e38, "warmup_steps": 0, "schedule": "constant"},
    }
    with pytest.raises(RunStopped, match=r"held-out loss after step 1 is nan.*lower optimizer.learning_rate"):
        reports_of("dp1", sections)


def test_a_batch_without_any_valid_token_has_loss_0() -> None:
    spec = ModelSpec.preset("tiny")
    mesh = Mesh(Layout())
    parallel = initialized(spec, mesh, microbatches=1, dtype="float64", seed=0)
    empty = SyntheticDataset(spec.vocab_size, 16, seed=0).rows(0, 3, range(1, 2))  # the row without labels
    loss = parallel.step([empty], valid_tokens=0, update=lambda _: None)
    assert float(loss) == 0.0
    assert all(float(gradient.abs().max()) == 0.0 for _, gradient in parallel.named_gradients())


def test_a_step_does_not_remember_the_one_before() -> None:
    """Gradients of step 2 equal those of a fresh model on the same batch."""
    spec, mesh = ModelSpec.preset("tiny-qwen3"), Mesh(Layout())
    data = SyntheticDataset(spec.vocab_size, 16, seed=0)
    used, fresh = (initialized(spec, mesh, microbatches=2, dtype="float64", seed=0) for _ in range(2))
    for step, models in ((0, [used]), (1, [used, fresh])):
        batches = rank_batches(data, mesh, step=step, batch=12, microbatches=2)
        for parallel in models:
            parallel.step(batches, valid_tokens=data.valid_tokens(step, 12), update=lambda _: None)
    for (name, a), (_, b) in zip(used.named_gradients(), fresh.named_gradients(), strict=True):
        assert torch.equal(a, b), name


def test_evaluation_is_weighted_by_tokens() -> None:
    """The mean over all valid tokens of all batches, not the mean of the batches' means."""
    run, spec, mesh = run_spec("dp1"), ModelSpec.preset("tiny"), Mesh(Layout())
    data = SyntheticDataset(spec.vocab_size, 16, seed=2)
    parallel = initialized(spec, mesh, microbatches=1, dtype="float64", seed=0)
    report = evaluate(parallel, run, data, step=0)
    with torch.no_grad():
        total = sum(float(parallel.model.loss_sum(data.rows(k, 12, range(12)))) for k in range(2))
    assert report.valid_tokens == data.valid_tokens(0, 12) + data.valid_tokens(1, 12)
    assert report.loss == pytest.approx(total / report.valid_tokens, rel=1e-12)
