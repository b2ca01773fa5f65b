"""What one pipeline rank does without the others: it may build its stages, but not evaluate."""

import time

import pytest

from fourfold.collectives import CollectiveMismatch, agreement, barrier, record
from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.specs import Layout, ModelSpec, RunSpec
from fourfold.traffic import Event
from fourfold.training import EvaluationReport, StepReport, initialized, train
from tests.ranks import RankPool

TINY, TIED = ModelSpec.preset("tiny"), ModelSpec.preset("tiny-qwen3")
LENGTH = 16


def built_in_turns(layout: str) -> tuple[list[Event], float]:
    """What building a model on this rank sends while the others wait, and the seconds that it computed."""
    mesh = Mesh(Layout.parse(layout))
    six = TIED.replace({"num_hidden_layers": 6})
    for turn in range(mesh.world.size):
        if turn == mesh.world.rank:
            start = time.process_time()
            with record() as events:
                initialized(six, mesh, microbatches=4, dtype="float64", seed=0, sequence_length=LENGTH)
            seconds = time.process_time() - start
        barrier(mesh.world)
    return events, seconds


def test_a_rank_builds_its_stages_alone(ranks: RankPool) -> None:
    """Three stages a rank, tied: no constructor waits for another rank, so no two can wait crosswise."""
    # PP-09
    for events, seconds in ranks(2, built_in_turns, "pp2:interleaved3"):
        assert events == []
        assert seconds < 10


def run_of(layout: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "layout": layout,
            "model": {"preset": "tiny"},
            "data": {"sequence_length": LENGTH},
            "training": {"steps": 2, "batch": 4, "microbatches": 2, "dtype": "float64"},
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
            "evaluation": {"every": 1, "batches": 1},
        }
    )


def reported(layout: str, *, only_last: bool) -> list[StepReport | EvaluationReport]:
    """What a run tells a callback, registered on all ranks or on the last pipeline rank alone."""
    mesh, data = Mesh(Layout.parse(layout)), SyntheticDataset(TINY.vocab_size, LENGTH, seed=1)
    reports: list[StepReport | EvaluationReport] = []
    listens = not only_last or mesh.pp.rank == mesh.pp.size - 1
    on_report = reports.append if listens else lambda _: None
    train(run_of(layout), TINY, mesh, train_data=data, eval_data=data, on_report=on_report)
    return reports


def test_evaluation_runs_on_all_ranks_whoever_listens(ranks: RankPool) -> None:
    # PP-11
    [expected] = ranks(1, reported, "dp1", only_last=False)
    first, last = ranks(2, reported, "pp2", only_last=True)
    assert first == []
    assert [type(report) for report in last] == [StepReport, EvaluationReport] * 2
    assert [report.loss for report in last] == pytest.approx([report.loss for report in expected], rel=1e-9)


def one_evaluates_by_itself(layout: str) -> str:
    """The error where the last rank evaluates in a callback of its own and the other goes on to train."""
    mesh, data = Mesh(Layout.parse(layout)), SyntheticDataset(TINY.vocab_size, LENGTH, seed=1)
    parallel = initialized(TINY, mesh, microbatches=2, dtype="float64", seed=0, sequence_length=LENGTH)
    batches = [data.rows(0, 4, range(2 * m, 2 * m + 2)) for m in range(2)]

    def train_or_evaluate() -> None:
        if mesh.pp.rank == 1:
            parallel.evaluate(batches)
        parallel.step(batches, valid_tokens=64, update=lambda _: None)

    with agreement(), pytest.raises(CollectiveMismatch) as error:
        train_or_evaluate()
    return str(error.value)


def test_a_rank_that_evaluates_alone_is_told_at_once(ranks: RankPool) -> None:
    """In debug mode. Without it the messages of a step are never taken for those of an evaluation."""
    # PP-11
    first, last = ranks(2, one_evaluates_by_itself, "pp2")
    assert first == last
    assert "rank 0: run a training step of 2 microbatches" in first
    assert "rank 1: run forwards alone of 2 microbatches" in first
