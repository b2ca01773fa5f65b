"""The timeline of a step that ran: every action of every pipeline rank, at its time."""

import pytest
import torch

from fourfold.collectives import Wait
from fourfold.data import SyntheticDataset
from fourfold.measured import Trace, Waited, by_op, gathered, measured_timeline, time_spent
from fourfold.mesh import Mesh
from fourfold.program import Timeline
from fourfold.program.actions import COMPUTE, SENDS, Action
from fourfold.program.clock import Span
from fourfold.program.program import Program
from fourfold.specs import Layout, ModelSpec, RunSpec
from fourfold.training import Trainer, initialized, rank_batches
from tests.ranks import RankPool


def timeline_of_a_step(layout: str) -> tuple[Timeline, Program]:
    spec, mesh = ModelSpec.preset("tiny"), Mesh(Layout.parse(layout))
    parallel = initialized(spec, mesh, microbatches=3, dtype="float32", seed=0, sequence_length=16)
    data = SyntheticDataset(spec.vocab_size, sequence_length=16, seed=0)
    batches = rank_batches(data, mesh, step=0, batch=6, microbatches=3)
    parallel.step(batches, valid_tokens=data.valid_tokens(0, 6), update=lambda _: None)
    return measured_timeline(parallel.executor.trace, mesh.pp), parallel.program


def test_every_pipeline_rank_gets_the_timeline_of_all(ranks: RankPool) -> None:
    (timeline, program), (other, _) = ranks(2, timeline_of_a_step, "pp2")
    assert timeline == other
    for rank, actions in enumerate(program.ranks):
        compute = [action for action in actions if action.kind in COMPUTE]
        mine = [span for span in timeline.spans if span.rank == rank]
        assert [span.action for span in mine if span.action.kind in COMPUTE] == compute
        # A SEND is not timed; a RECV spans the wait for it.
        assert {span.action for span in mine} == {a for a in actions if a.kind not in SENDS}
        assert all(0 <= span.start_seconds <= span.end_seconds for span in mine)


def test_a_message_is_used_after_what_makes_it(ranks: RankPool) -> None:
    timeline, program = ranks(2, timeline_of_a_step, "pp2")[0]
    ends: dict[Action, float] = {}
    for span in sorted(timeline.spans, key=lambda span: span.end_seconds):
        ends.setdefault(span.action, span.end_seconds)
    starts = {span.action: span.start_seconds for span in timeline.spans}
    crossings = 0
    for rank, action in program.actions():
        receive = program.message_needed(action) if action.kind in COMPUTE else None
        if receive is not None:
            maker = program.maker(receive.other_end)
            assert program.rank_of_segment[maker.segment] != rank
            assert ends[maker] <= starts[action]
            crossings += 1
    assert crossings == 2 * program.microbatches


def test_one_rank_has_a_timeline_of_its_own() -> None:
    timeline, program = timeline_of_a_step("dp1")
    assert timeline.num_ranks == 1
    assert {span.action for span in timeline.spans} == set(program.ranks[0])


def span(text: str, start: float, end: float) -> Span:
    return Span(0, Action.parse(text), start, end)


def test_where_the_time_of_a_step_went() -> None:
    trace = Trace(torch.device("cpu"), 0)
    trace.began = 10.0
    trace.spans = [
        span("0F0", 0.0, 1.0),
        span("0GATHER0", 0.0, 1.5),  # runs behind: no part of its own
        span("1RECV_F0", 1.0, 1.75),
        span("1F0", 2.0, 4.0),
        span("1R0", 4.0, 5.0),
        span("1B0", 5.0, 7.0),
        span("UPDATE", 8.0, 9.0),
    ]
    waits = [
        Wait("all_gather", "tp", 10.25, 10.5),  # within 0F0
        Wait("recv", "pp", 11.0, 11.75, behind_seconds=0.5),
        Wait("exchange", "cp", 12.5, 13.0),  # within 1F0
        Wait("all_gather", "tp", 14.25, 14.5),  # within 1R0
        Wait("send", "pp", 17.0, 17.125),
        Wait("reduce_scatter", "fsdp", 17.25, 17.75, behind_seconds=2.0),
        Wait("all_reduce", "pp,fsdp", 18.5, 18.625),  # within UPDATE: the norm
    ]
    found = time_spent(trace, waits, seconds=9.5, data_seconds=0.25)
    assert found is not None
    assert found.parts() == {
        "compute": 0.75 + 1.5 + 2.0,
        "recompute": 0.75,
        "exposed cp": 0.5,
        "exposed fsdp": 0.5,
        "exposed pp": 0.125,
        "exposed tp": 0.5,
        "bubble": 0.75 + 0.125,
        "optimizer": 0.875,
        "data": 0.25,
        "other": 9.5 - 4.25 - 0.75 - 1.625 - 0.875 - 0.875 - 0.25,
    }
    assert sum(found.parts().values()) == 9.5
    assert by_op(waits)["all_gather", "tp"] == Waited(0.5, 0.0)
    assert by_op(waits)["reduce_scatter", "fsdp"] == Waited(0.5, 2.0)


def steps_of_a_run(layout: str, policy: str) -> list[tuple[float, dict[str, float], list[dict[str, float]]]]:
    """Of two steps: their seconds, this rank's parts, and those of all ranks."""
    spec = ModelSpec.preset("tiny")
    run = RunSpec.model_validate(
        {
            "model": {"preset": "tiny"},
            "layout": layout,
            "data": {"sequence_length": 16},
            "training": {"steps": 2, "batch": 8, "microbatches": 2, "recompute": policy},
            "optimizer": {"learning_rate": 1e-3},
        }
    )
    mesh = Mesh(run.layout)
    data = SyntheticDataset(spec.vocab_size, sequence_length=16, seed=0)
    trainer = Trainer(run, spec, mesh, data=data)
    found = []
    for step in range(2):
        report = trainer.step(step)
        assert report.spent is not None
        parts = report.spent.parts()
        found.append((report.seconds, parts, gathered(parts, mesh.world, mesh.device)))
    return found


@pytest.mark.parametrize(
    ("layout", "policy", "axes"),
    [
        ("dp2", "none", {"dp"}),
        ("fsdp2", "full", {"fsdp"}),
        ("tp2", "full", {"tp"}),
        ("cp2:ring", "none", {"cp"}),
        ("pp2", "full", {"pp"}),
    ],
)
def test_the_parts_of_a_real_step_add_up(ranks: RankPool, layout: str, policy: str, axes: set[str]) -> None:
    by_rank = ranks(2, steps_of_a_run, layout, policy)
    for rank, steps in enumerate(by_rank):
        for step, (seconds, parts, of_all) in enumerate(steps):
            assert of_all[rank] == parts
            assert of_all == by_rank[1 - rank][step][2]
            assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9)
            assert all(value >= 0 for value in parts.values()), parts
            assert parts["compute"] > 0
            assert parts["optimizer"] > 0
            assert parts["data"] > 0
            assert (parts["recompute"] > 0) == (policy == "full")
            assert {name.removeprefix("exposed ") for name in parts if name.startswith("exposed")} == axes
            assert (parts["bubble"] > 0) == (layout == "pp2")
