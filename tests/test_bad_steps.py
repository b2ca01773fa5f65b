"""Steps whose loss or gradient is not finite: passed over where that is asked for, by all ranks alike."""

import math
import re
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
from fourfold.training import Report, StepReport, Trainer, train
from tests.ranks import RankPool

SPEC = ModelSpec.preset("tiny")
Result = tuple[list[float], dict[str, Tensor], int, list[str]]
"""The losses, the weights, the number of updates, and what was told of bad steps."""


def run_spec(layout: str, steps: int, skip: int) -> RunSpec:
    values: dict[str, Any] = {
        "layout": layout,
        "model": {"preset": "tiny"},
        "data": {"sequence_length": 16},
        "training": {
            "steps": steps,
            "batch": 4,
            "dtype": "float64",
            "microbatches": 2,
            "skip_bad_steps": skip,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "evaluation": {"batches": 1},
    }
    return RunSpec.model_validate(values)


class Spoiled(SyntheticDataset):
    """Of which a rank sees no numbers at some steps."""

    bad_steps: frozenset[int] = frozenset()

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        found = super().rows(step, batch, rows)
        if step in self.bad_steps:
            found = replace(found, position_ids_BS=found.position_ids_BS * math.nan)
        return found


class Lacking(SyntheticDataset):
    """Without the batches of steps 2 and 3."""

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        return super().rows(step if step < 2 else step + 2, batch, rows)


def spoiled_on(rank: int, layout: str, skip: int) -> Result:
    """Train six steps, of which one rank spoils two."""
    mesh = Mesh(Layout.parse(layout))
    data = Spoiled(SPEC.vocab_size, 16, seed=1)
    if mesh.rank == rank:
        data.bad_steps = frozenset({2, 3})
    return trained(run_spec(layout, 6, skip), mesh, data)


def without_the_two(layout: str) -> Result:
    return trained(run_spec(layout, 4, 0), Mesh(Layout.parse(layout)), Lacking(SPEC.vocab_size, 16, seed=1))


def trained(run: RunSpec, mesh: Mesh, data: SyntheticDataset) -> Result:
    reports: list[Report] = []
    held_out = SyntheticDataset(SPEC.vocab_size, 16, seed=2)
    trainers: list[Trainer] = []
    told: list[str] = []
    try:
        train(
            run,
            SPEC,
            mesh,
            train_data=data,
            eval_data=held_out,
            on_report=reports.append,
            on_step=lambda trainer, _: trainers.append(trainer),
            on_skip=told.append,
        )
    except RunStopped as error:
        told.append(str(error))
    losses = [report.loss for report in reports if isinstance(report, StepReport)]
    weights = {name: master.clone() for name, master in trainers[-1].parallel.named_masters()}
    return losses, weights, trainers[-1].update.updates, told


@pytest.mark.parametrize("layout", ["dp2,tp2", "pp2,fsdp2"])
def test_two_bad_steps_leave_no_trace(ranks: RankPool, layout: str) -> None:
    """What comes after equals a run whose data lacks these batches: weights, moments, bias correction."""
    # MP-10, MP-11, RUN-03
    expected = ranks(4, without_the_two, layout)
    for found, reference in zip(ranks(4, spoiled_on, 3, layout, 2), expected, strict=True):
        losses, weights, updates, told = found
        assert [line.split(":")[0] for line in told] == [
            f"step {step} is not finite; no weight was changed by it" for step in (3, 4)
        ]
        assert [re.search(r"on rank (\d)", line)[1] in "23" for line in told] == [True, True], told
        assert [line[-25:] for line in told] == [f"; passed over, {n} in a row" for n in (1, 2)]
        assert [math.isnan(loss) for loss in losses] == [False, False, True, True, False, False]
        assert losses[:2] + losses[4:] == reference[0]
        assert updates == reference[2] == 4
        for name, weight in reference[1].items():
            assert torch.equal(weights[name], weight), name


def test_one_more_than_asked_for_stops_all_ranks(ranks: RankPool) -> None:
    for losses, _, updates, told in ranks(4, spoiled_on, 3, "dp2,tp2", 1):
        assert len(told) == 2
        assert told[-1].startswith("step 4 is not finite; no weight was changed by it: ")
        assert "passed over" not in told[-1]
        assert [math.isnan(loss) for loss in losses] == [False, False, True, True]
        assert updates == 2
