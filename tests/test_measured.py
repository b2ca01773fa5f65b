"""The timeline of a step that ran: every action of every pipeline rank, at its time."""

from fourfold.data import SyntheticDataset
from fourfold.measured import measured_timeline
from fourfold.mesh import Mesh
from fourfold.program import Timeline
from fourfold.program.actions import COMPUTE, SENDS, Action, Program
from fourfold.specs import Layout, ModelSpec
from fourfold.training import initialized, rank_batches
from tests.ranks import RankPool


def timeline_of_a_step(layout: str) -> tuple[Timeline, Program]:
    spec, mesh = ModelSpec.preset("tiny"), Mesh(Layout.parse(layout))
    parallel = initialized(spec, mesh, microbatches=3, dtype="float32", seed=0)
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
