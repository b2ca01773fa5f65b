"""What a run says of itself at its end: where the time went, what was sent and foreseen."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.collectives import Wait
from fourfold.data import SyntheticDataset
from fourfold.explain import explain, memory_of_rank
from fourfold.gauges import (
    Gauges,
    Held,
    MemoryRow,
    RunFlops,
    TrafficRow,
    mean_parts,
    memory,
    memory_lines,
    summary,
    time_lines,
    traffic,
    traffic_lines,
)
from fourfold.measured import TimeSpent
from fourfold.memory import Category
from fourfold.mesh import Mesh
from fourfold.outline import Step
from fourfold.rank_memory import RankMemory
from fourfold.specs import Layout, ModelSpec, RunSpec
from fourfold.step_flops import StepFlops
from fourfold.traffic import Event
from fourfold.training import StepReport, Trainer
from tests.ranks import RankPool


def report(number: int, **spent: float) -> StepReport:
    return StepReport(
        step=number,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=8,
        valid_tokens=8,
        seconds=1.0,
        memory_bytes=0,
        spent=TimeSpent(**spent),
        events=[Event("all_gather", "tp", 8, "float32")] * 3 + [Event("barrier", "dp", 0, "float32")],
        waits=[Wait("all_gather", "tp", 1.0, 1.25, 0.5), Wait("all_gather", "tp", 2.0, 2.25, 0.25)],
    )


def test_the_first_step_is_left_out_where_there_are_more() -> None:
    gauges = Gauges()
    gauges.add(report(1, compute=100.0))
    assert gauges.mean()["compute"] == 100.0
    gauges.add(report(2, compute=1.0))
    gauges.add(report(3, compute=2.0))
    assert gauges.mean()["compute"] == 1.5


def test_the_mean_over_ranks_has_every_part_once() -> None:
    by_rank = [{"compute": 1.0, "other": 0.5}, {"compute": 2.0, "exposed tp": 3.0, "other": 0.5}]
    assert mean_parts(by_rank) == {"compute": 1.5, "exposed tp": 1.5, "other": 0.5}
    assert list(mean_parts(by_rank)) == ["compute", "exposed tp", "other"]
    assert time_lines(by_rank)[0] == "where the 3.500 s of a step went, mean of 2 ranks (least and most):"
    assert time_lines(by_rank)[1].split() == [
        "compute",
        "1.500",
        "s",
        "42.9%",
        "(1.000",
        "s",
        "to",
        "2.000",
        "s)",
    ]


def test_recorded_beside_predicted() -> None:
    predicted = [Event("all_gather", "tp", 8, "float32")] * 2 + [Event("send", "pp", 4, "float32")]
    rows = traffic(report(1), predicted)
    assert rows == [
        TrafficRow("all_gather", "tp", 3, 24, 2, 16, 0.5, 0.75),
        TrafficRow("barrier", "dp", 1, 0, 0, 0, 0.0, 0.0),
        TrafficRow("send", "pp", 0, 0, 1, 4, 0.0, 0.0),
    ]
    assert traffic_lines(rows)[2].split()[:4] == ["all_gather", "tp", "3", "(2)"]
    assert traffic_lines([]) == []


def held(activations: int, logits: int) -> RankMemory:
    rest = dict.fromkeys(Category, 0) | {Category.WEIGHTS: 4_000_000}
    at_peak = rest | {Category.ACTIVATIONS: activations}
    return RankMemory(rest, at_peak, at_peak | {Category.LOGITS: logits})


def test_what_was_held_is_known_with_its_step() -> None:
    """A run that goes on counts in the first step that it takes, whose documents are that step's."""
    gauges = Gauges()
    gauges.add(replace(report(5), held=held(1, 2)))
    gauges.add(report(6))
    assert (gauges.held, gauges.held_at_step) == (held(1, 2), 5)


def test_counted_beside_predicted() -> None:
    """Of each pipeline rank the rank that held most; one of them by category."""
    step = Step(
        ModelSpec.preset("tiny"), Layout.parse("pp2,dp2"), batch=4, sequence_length=16, microbatches=2
    )
    counted = [held(activations, 500_000) for activations in (5_000_000, 6_000_000, 1_000_000, 0)]
    documents = ((16,), (3, 13), (16,), (16,))  # the second is a row of ranks 1 and 3
    rows = memory([Held(one, 7_000_000) for one in counted], step, documents, device_type="cpu")
    assert [(row.rank, row.pipeline_rank) for row in rows] == [(1, 0), (2, 1)]
    assert [row.counted for row in rows] == counted[1:3]
    assert [row.predicted for row in rows] == [
        memory_of_rank(step, 1, device_type="cpu", documents=[((3, 13),), ((16,),)]),
        memory_of_rank(step, 2, device_type="cpu"),
    ]
    rows = [
        replace(rows[0], predicted=held(5_000_000, 0)),
        replace(rows[1], predicted=held(1_000_000, 0)),
    ]
    lines = [line.split() for line in memory_lines(rows)]
    assert lines[2:] == [
        ["weights", "4.000", "(4.000)", "4.000", "(4.000)"],
        ["activations", "6.000", "(5.000)", "6.000", "(5.000)"],
        ["logits", "0.000", "(0.000)", "0.500", "(0.000)"],
        ["all", "10.000", "(9.000)", "+11.1%"],
        ["pipeline", "rank", "1,", "rank", "2", "5.000", "(5.000)", "+0.0%"],
        ["with", "all", "else,", "rank", "1", "(pipeline", "rank", "0)", "took", "7", "MB", "at", "most"],
    ]


def two_steps(layout: str, *, counts_memory: bool) -> tuple[list[float], Tensor, list[MemoryRow], list[Any]]:
    """Losses and weights after two steps; what was held beside what was predicted; what goes to a file."""
    run = RunSpec.model_validate(
        {
            "model": {"preset": "tiny"},
            "layout": layout,
            "data": {"sequence_length": 32},
            "training": {"steps": 2, "batch": 8, "microbatches": 2},
            "optimizer": {"learning_rate": 1e-3},
        }
    )
    spec, mesh = ModelSpec.preset("tiny"), Mesh(run.layout)
    data = SyntheticDataset(spec.vocab_size, sequence_length=32, seed=0)
    trainer, gauges = Trainer(run, spec, mesh, data=data), Gauges()
    losses = []
    for step in range(2):
        gauges.add(trainer.step(step, counts_memory=counts_memory and step == 0))
        assert gauges.last is not None
        losses.append(gauges.last.loss)
    weights = torch.cat([unit.master.clone() for unit in trainer.parallel.units])
    if not counts_memory:
        return losses, weights, [], []
    by_rank = gauges.held_by_all_ranks(trainer.parallel)
    rows = memory(by_rank, Step.of_run(run, spec), data.documents(0, 8), device_type="cpu")
    return losses, weights, rows, json.loads(json.dumps(summary([], [], rows)))["memory"]


@pytest.mark.parametrize("layout", ["dp1", "fsdp2", "tp2", "pp2", "cp2:ring"])
def test_what_a_run_holds_is_counted_and_predicted_and_the_count_changes_no_bit(
    ranks: RankPool, layout: str
) -> None:
    size = Layout.parse(layout).world_size
    plain = ranks(size, two_steps, layout, counts_memory=False)
    counted = ranks(size, two_steps, layout, counts_memory=True)
    for (losses, weights, _, _), (same_losses, same_weights, rows, written) in zip(
        plain, counted, strict=True
    ):
        assert losses == same_losses
        assert torch.equal(weights, same_weights)
        assert len(rows) == (2 if layout == "pp2" else 1)
        for row, line in zip(rows, written, strict=True):
            assert row.counted.peak == pytest.approx(row.predicted.peak, rel=0.05)
            for category in (Category.WEIGHTS, Category.GRADIENTS, Category.GATHERED):
                assert row.counted.most[category] == row.predicted.most[category]
            assert line["counted"]["at_peak"]["weights"] == row.counted.at_peak[Category.WEIGHTS] > 0
            assert line["predicted"]["most"]["logits"] == row.predicted.most[Category.LOGITS]
            assert row.memory_bytes > row.counted.peak


def of_a_run(layout: str) -> tuple[StepFlops, list[TrafficRow], list[dict[str, float]]]:
    """A step's FLOPs, what this rank sent and was to send, and where all ranks' time went."""
    run = RunSpec.model_validate(
        {
            "model": {"preset": "tiny"},
            "layout": layout,
            "data": {"sequence_length": 16},
            "training": {"steps": 1, "batch": 8, "microbatches": 2, "recompute": "full"},
            "optimizer": {"learning_rate": 1e-3},
        }
    )
    spec, mesh = ModelSpec.preset("tiny"), Mesh(run.layout)
    data = SyntheticDataset(spec.vocab_size, sequence_length=16, seed=0)
    trainer, gauges = Trainer(run, spec, mesh, data=data), Gauges()
    gauges.add(trainer.step(0))
    assert gauges.last is not None
    rows = data.documents(0, 8)
    step = Step.of_run(run, spec)
    documents = [rows[m * 4 : m * 4 + step.rows] for m in range(2)]
    predicted = explain(step, device_type="cpu").events(0, shard=0, documents=documents)
    flops = RunFlops(trainer.parallel, lambda step: data.documents(step, 8), keeps=frozenset())
    return flops(0), traffic(gauges.last, predicted), gauges.of_all_ranks(trainer.parallel)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2", "cp2:ring"])
def test_the_same_work_has_the_same_flops_and_rank_0_sends_what_was_foreseen(
    ranks: RankPool, layout: str
) -> None:
    # MFU-06
    alone, nothing, _ = of_a_run("dp1")
    assert nothing == []
    found = ranks(2, of_a_run, layout)
    for flops, _, by_rank in found:
        assert flops.model == alone.model
        assert flops.recomputed >= alone.recomputed  # a pipeline's last block runs again, too
        assert len(by_rank) == 2
        assert by_rank == found[0][2]
    for row in found[0][1]:
        assert (row.calls, row.bytes) == (row.predicted_calls, row.predicted_bytes), row
