"""A step depends on the batch and its number alone: not on ranks, replicas or microbatches."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.optimizer import Update, gradient_norm, owned_parameters
from fourfold.specs import Layout, ModelSpec, RunSpec
from fourfold.training import Report, StepReport, initialized, rank_batches, train
from tests.ranks import RankPool

TINY = ModelSpec.preset("tiny")


@dataclass(frozen=True)
class NumberedRows:
    """Rows of equal length, all labels valid; the first token of a row is its number."""

    vocab_size: int = TINY.vocab_size
    sequence_length: int = 8

    def valid_tokens(self, step: int, batch: int) -> int:
        """Return the labels of the whole batch."""
        return batch * self.sequence_length

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return rows whose tokens are drawn from their number."""
        S = self.sequence_length
        tokens = np.stack([np.random.default_rng(row).integers(self.vocab_size, size=S + 1) for row in rows])
        tokens[:, 0] = list(rows)
        ids = torch.from_numpy(tokens)
        return Microbatch(
            ids[:, :-1].contiguous(),
            ids[:, 1:].contiguous(),
            torch.arange(S).expand(len(rows), S),
            ((S,),) * len(rows),
        )


def nothing(_: Tensor) -> None:
    pass


def norms_of_accumulation(layout: str) -> list[float]:
    """The gradient norm of the same 32 rows as 1, 2 and 8 microbatches a rank."""
    mesh, data = Mesh(Layout.parse(layout)), NumberedRows()
    norms = []
    for microbatches in (1, 2, 8):
        parallel = initialized(TINY, mesh, microbatches=microbatches, dtype="float64", seed=0)
        batches = rank_batches(data, mesh, step=0, batch=32, microbatches=microbatches)
        assert len(batches) == microbatches
        parallel.step(batches, valid_tokens=data.valid_tokens(0, 32), update=nothing)
        norms.append(gradient_norm(parallel.units, mesh.fsdp))
    return norms


ON_TWO_RANKS = ["dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2"]


def test_accumulation_keeps_the_gradient_norm(ranks: RankPool) -> None:
    """32 equal rows as 1, 2 and 8 microbatches, on 1 rank and on 2: ratios 1.000, not 1, 1/2, 1/8."""
    # DP-05
    expected = norms_of_accumulation("dp1")
    assert expected[0] > 0.1
    on_two = [norms for layout in ON_TWO_RANKS for norms in ranks(2, norms_of_accumulation, layout)]
    for norms in [expected, *on_two]:
        assert [norm / expected[0] for norm in norms] == pytest.approx([1.0, 1.0, 1.0], rel=1e-12)


def clipped_step(layout: str) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, norm and weights of one SGD step, clipped to a tenth of its norm, in float32."""
    mesh = Mesh(Layout.parse(layout))
    data = SyntheticDataset(TINY.vocab_size, sequence_length=16, seed=1)
    parallel = initialized(TINY, mesh, microbatches=2, dtype="float32", seed=0)
    owned = owned_parameters(parallel.units)
    optimizer = torch.optim.SGD([*owned.decayed, *owned.plain], lr=1.0)
    update = Update(parallel, [optimizer], clip_norm=0.1)
    update.learning_rate = 1.0
    valid_tokens = data.valid_tokens(0, 12)
    batches = rank_batches(data, mesh, step=0, batch=12, microbatches=2)
    loss_sum = parallel.step(batches, valid_tokens=valid_tokens, update=update)
    weights = {name: master.clone() for name, master in parallel.named_masters()}
    return float(loss_sum) / valid_tokens, update.norm, weights


def test_one_step_on_one_rank_and_on_two(ranks: RankPool) -> None:
    """The same batch in float32: loss, norm before clipping and weights after the step agree to 1e-6."""
    # DP-07
    loss, norm, weights = clipped_step("dp1")
    start = dict(initialized(TINY, Mesh(Layout()), microbatches=1, dtype="float32", seed=0).named_masters())
    moved = sum(float((weights[name] - start[name]).square().sum()) for name in weights) ** 0.5
    assert norm > 0.2
    assert moved == pytest.approx(0.1, rel=1e-4)
    for layout in ON_TWO_RANKS:
        for other_loss, other_norm, other_weights in ranks(2, clipped_step, layout):
            assert other_loss == pytest.approx(loss, rel=1e-6)
            assert other_norm == pytest.approx(norm, rel=1e-6)
            for name, weight in weights.items():
                torch.testing.assert_close(other_weights[name], weight, rtol=1e-6, atol=1e-6, msg=name)


def learning_rates(layout: str, microbatches: int, steps: int, warmup_steps: int, stop: int) -> list[float]:
    """What the updates of the first steps of a run used, as reported."""

    class Enough(Exception):
        """Ends the run: every rank raises it after the same report."""

    values: dict[str, Any] = {
        "layout": layout,
        "model": {"preset": "tiny"},
        "data": {"sequence_length": 8},
        "training": {"steps": steps, "batch": 16, "microbatches": microbatches},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": warmup_steps},
    }
    run = RunSpec.model_validate(values)
    found: list[float] = []

    def note(report: Report) -> None:
        if isinstance(report, StepReport):
            found.append(report.learning_rate)
            if report.step == stop:
                raise Enough

    data = NumberedRows()
    with pytest.raises(Enough):
        train(run, TINY, Mesh(run.layout), train_data=data, eval_data=data, on_report=note)
    return found


def test_the_learning_rate_of_4_ranks_warms_up_step_by_step(ranks: RankPool) -> None:
    """Linear over 100 steps to 1e-3: 2.5e-4 after 25 steps on 4 ranks, not 1e-3."""
    # OPT-01
    alone = learning_rates("dp1", 1, steps=200, warmup_steps=100, stop=25)
    assert alone == pytest.approx([1e-5 * step for step in range(1, 26)], rel=1e-12)
    assert alone[-1] == pytest.approx(2.5e-4, rel=1e-12)
    assert ranks(4, learning_rates, "dp4", 1, steps=200, warmup_steps=100, stop=25) == [alone] * 4


def test_the_learning_rate_does_not_depend_on_microbatches() -> None:
    """10 steps of 4 microbatches have the rates of 10 steps of 1, through warm-up and decay."""
    # OPT-02
    of_one = learning_rates("dp1", 1, steps=10, warmup_steps=3, stop=10)
    assert len(set(of_one)) > 5
    assert learning_rates("dp1", 4, steps=10, warmup_steps=3, stop=10) == of_one


def rows_of_replica(layout: str) -> tuple[int, list[list[int]]]:
    """This rank's place on the data axes, and the numbers of its rows, batch by batch of 2 steps."""
    mesh, data = Mesh(Layout.parse(layout)), NumberedRows()
    batches = [
        batch for step in range(2) for batch in rank_batches(data, mesh, step=step, batch=16, microbatches=4)
    ]
    return mesh.data.rank, [batch.input_ids_BS[:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("layout", ["dp2,tp2", "dp2,cp2", "pp2,dp2", "fsdp2,tp2", "dp2,fsdp2", "tp4"])
def test_ranks_of_a_replica_read_the_same_rows(ranks: RankPool, layout: str) -> None:
    """Rows 0 to 15, two in a microbatch. Only the data axes cut them: ranks that differ on pp, cp or tp read
    the same rows, replicas read different ones, and together all of them.
    """
    # DATA-08
    replicas: dict[int, list[list[int]]] = {}
    for place, rows in ranks(4, rows_of_replica, layout):
        assert replicas.setdefault(place, rows) == rows
    degree = Layout.parse(layout).size("dp", "fsdp")
    assert sorted(replicas) == list(range(degree))
    for step in range(2):
        of_step = [rows[4 * step : 4 * step + 4] for rows in replicas.values()]
        assert all(len(rows) == 16 // 4 // degree for batches in of_step for rows in batches)
        assert sorted(row for batches in of_step for rows in batches for row in rows) == list(range(16))
        for microbatch in range(4):
            together = sorted(row for batches in of_step for row in batches[microbatch])
            assert together == list(range(4 * microbatch, 4 * microbatch + 4))
