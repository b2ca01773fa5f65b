"""Pipelines on ranks give the numbers of one process, whatever the schedule, microbatches and lengths."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fourfold.assembly import parallelize
from fourfold.collectives import agreement, all_reduce_
from fourfold.data import SyntheticDataset
from fourfold.layer.schedule_file import write_schedule
from fourfold.layer.transport import Transport
from fourfold.mesh import Mesh
from fourfold.models import IGNORE, Decoder, Microbatch
from fourfold.optimizer import Update, clip_, gradient_norm, optimizers
from fourfold.oracle import Oracle
from fourfold.parallel_model import ParallelModel
from fourfold.program import Kind, Program
from fourfold.program.actions import SUMS
from fourfold.program.clock import peak_in_flight
from fourfold.segment import Segment
from fourfold.specs import (
    BATCH_AXES,
    SCHEDULE_RULES,
    Layout,
    ModelSpec,
    OptimizerSection,
    ScheduleName,
    ShardingSection,
)
from fourfold.training import initialized
from fourfold.verify import Verification, verify
from tests.layer.random_schedules import right_schedules
from tests.ranks import RankPool

LENGTH = 16
EMBEDDING = "model.embed_tokens.weight"
TINY, TIED = ModelSpec.preset("tiny"), ModelSpec.preset("tiny-qwen3")
SCHEDULES = [f"{name}2" if rule.needs_number else name for name, rule in SCHEDULE_RULES.items()]
WITH_BOUNDS = [*SCHEDULES, "1f1b7", "auto4"]
"""Also those with a number of microbatches that the first rank, or any, may hold."""

Lengths = Sequence[tuple[int, int]]
"""(rows, tokens of a row) for each microbatch."""


def pieces_of(count: int, rows: int = 24) -> Lengths:
    """So many rows, cut into microbatches as even as can be."""
    borders = [rows * m // count for m in range(count + 1)]
    return [(stop - start, LENGTH) for start, stop in pairwise(borders)]


def batches_of(spec: ModelSpec, lengths: Lengths, *, share: int = 0, shares: int = 1) -> list[Microbatch]:
    """One rank's microbatches: of each, its share of the rows.

    Rows of one length are numbered through, so that they are the same however they are cut.
    """
    seen: dict[int, int] = {}
    found = []
    for rows, length in lengths:
        first = seen.get(length, 0)
        seen[length] = first + rows
        data = SyntheticDataset(spec.vocab_size, sequence_length=length, seed=length)
        mine = range(first + rows * share // shares, first + rows * (share + 1) // shares)
        found.append(data.rows(0, 1000, mine))
    return found


def valid_tokens_of(batches: Sequence[Microbatch]) -> int:
    return sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches)


def nothing(_: Tensor) -> None:
    pass


@dataclass(frozen=True)
class Step:
    """What a step gave."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]


def one_process(spec: ModelSpec, batches: Sequence[Microbatch], frozen: Sequence[str] = ()) -> Step:
    """By plain autograd, one loss and one backward over all."""
    model = Decoder(spec).double()
    start = dict(initialized(spec, Mesh(Layout()), microbatches=1, dtype="float64", seed=0).named_masters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(start[name])
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    loss = torch.stack([model.loss_sum(batch) for batch in batches]).sum() / valid_tokens_of(batches)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    return Step(float(loss.detach()), norm, gradients)


def rows_of_each_length(lengths: Lengths) -> dict[int, int]:
    found: dict[int, int] = {}
    for rows, length in lengths:
        found[length] = found.get(length, 0) + rows
    return found


@cache
def of_rows(spec: ModelSpec, rows_of_length: tuple[tuple[int, int], ...]) -> Step:
    """In one process: a microbatch of all rows of a length."""
    return one_process(spec, batches_of(spec, [(rows, length) for length, rows in rows_of_length]))


def step_of(parallel: ParallelModel, batches: Sequence[Microbatch], valid_tokens: int) -> Step:
    norms: list[float] = []

    def update(_: Tensor) -> None:
        norms.append(gradient_norm(parallel.counted_units, parallel.norm_axis))

    loss_sum = parallel.step(batches, valid_tokens=valid_tokens, update=update)
    gradients = {name: gradient.clone() for name, gradient in parallel.named_gradients()}
    return Step(float(loss_sum) / valid_tokens, norms[0], gradients)


def same(found: Step, expected: Step, rtol: float = 1e-12) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=rtol)
    assert found.norm == pytest.approx(expected.norm, rel=rtol)
    assert set(found.gradients) == set(expected.gradients)
    for name, gradient in expected.gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=rtol * largest, msg=name)


def laid_out(
    spec: ModelSpec,
    mesh: Mesh,
    *,
    microbatches: int,
    dtype: str = "float64",
    sharding: ShardingSection = ShardingSection(),  # noqa: B008
) -> ParallelModel:
    """A model on a mesh, with stages for rows of the usual length."""
    return initialized(
        spec,
        mesh,
        microbatches=microbatches,
        dtype=dtype,
        seed=0,
        sharding=sharding,
        sequence_length=LENGTH,
    )


def steps_on_a_rank(
    layout: str,
    cases: Sequence[tuple[ModelSpec, Lengths]],
    sharding: ShardingSection = ShardingSection(),  # noqa: B008
    debug: bool = False,
) -> list[Step]:
    """A step for each case, on one mesh."""
    mesh, found = Mesh(Layout.parse(layout)), []
    for spec, lengths in cases:
        parallel = laid_out(spec, mesh, microbatches=len(lengths), sharding=sharding)
        valid_tokens = valid_tokens_of(batches_of(spec, lengths))
        mine = batches_of(spec, lengths, share=mesh.data.rank, shares=mesh.data.size)
        with agreement() if debug else nullcontext():
            found.append(step_of(parallel, mine, valid_tokens))
    return found


def on_ranks(
    ranks: RankPool, layout: str, cases: Sequence[tuple[ModelSpec, Lengths]], **options: object
) -> None:
    """Every rank knows the loss, the norm and every gradient of one process."""
    results = ranks(Layout.parse(layout).world_size, steps_on_a_rank, layout, cases, **options)
    for steps in results:
        for (spec, lengths), found in zip(cases, steps, strict=True):
            same(found, of_rows(spec, tuple(sorted(rows_of_each_length(lengths).items()))))


# Every schedule, any number of microbatches


@pytest.mark.parametrize("schedule", WITH_BOUNDS)
def test_two_ranks_equal_one_process(ranks: RankPool, schedule: str) -> None:
    """1, 2, 3 and 8 microbatches, tied and untied by turns."""
    turn = WITH_BOUNDS.index(schedule)
    cases = [((TINY, TIED)[(turn + m) % 2], pieces_of(count)) for m, count in enumerate((1, 2, 3, 8))]
    on_ranks(ranks, f"pp2:{schedule}", cases)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks_equal_one_process(ranks: RankPool, schedule: str) -> None:
    """Fewer microbatches than stages, and numbers that the ranks do not divide."""
    # PP-02
    turn = SCHEDULES.index(schedule)
    counts = (1, 2, 3, 4, 5) if schedule in ("gpipe", "1f1b", "interleaved2") else (2, 5)
    models = [TINY, TIED]
    if ScheduleName.parse(schedule).stages_per_rank != 1:
        models = [spec.replace({"num_hidden_layers": 8}) for spec in models]
    cases = [(models[(turn + m) % 2], pieces_of(count)) for m, count in enumerate(counts)]
    on_ranks(ranks, f"pp4:{schedule}", cases)


@settings(max_examples=6, derandomize=True)
@given(program=right_schedules(min_ranks=2))
def test_any_schedule_that_can_run_equals_one_process(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, program: Program
) -> None:
    """Stages on any ranks, also neighbours on one; backwards whole and in halves; in any order."""
    path = tmp_path_factory.mktemp("schedules") / "any.json"
    write_schedule(program, path)
    spec = TIED.replace({"num_hidden_layers": 8})
    on_ranks(ranks, f"pp{len(program.ranks)}:{path}", [(spec, pieces_of(program.microbatches, 8))])


def verified(layout: str, model: str, options: dict[str, object]) -> Verification:
    spec = ModelSpec.preset(model)
    data = SyntheticDataset(spec.vocab_size, sequence_length=LENGTH, seed=3)
    steps = options.pop("steps", 3)
    oracle = Oracle(spec, data, batch=options.pop("batch"), steps=steps, seed=0)  # type: ignore[arg-type]
    return verify(oracle, Mesh(Layout.parse(layout)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "model", "microbatches", "dtype"),
    [
        ("pp2", "tiny-qwen3", 3, "float64"),
        ("pp2:zbv", "tiny-qwen2", 8, "float64"),
        ("pp4:zb-h1", "tiny", 2, "float64"),
        ("pp2,dp2", "tiny-qwen3", 2, "float64"),
        ("pp2:interleaved2,fsdp2", "tiny-qwen3", 3, "float64"),
        ("pp2,fsdp2:zero1", "tiny", 2, "float32"),
        ("pp2", "tiny", 3, "bfloat16"),
        ("pp2:zb-h1,fsdp2", "tiny-qwen3", 2, "bfloat16"),
    ],
)
def test_steps_equal_one_process(
    ranks: RankPool, layout: str, model: str, microbatches: int, dtype: str
) -> None:
    """`verify`: losses, norms, gradients and weights of two steps."""
    options = {"batch": 24, "microbatches": microbatches, "dtype": dtype, "steps": 2}
    results = ranks(Layout.parse(layout).world_size, verified, layout, model, options)
    assert all(result == results[0] for result in results)
    assert results[0].passes, results[0].to_json()


@pytest.mark.parametrize("schedule", ["1f1b", "bfs2"])
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2"])
def test_with_the_batch_axis(ranks: RankPool, layout: str, schedule: str) -> None:
    """Tied and untied, summed to the owners each time and at the end. (The tied one is PP-07.)"""
    cases = [(TIED, pieces_of(4)), (TINY, pieces_of(2))]
    for accumulate in ("pieces", "whole") if "fsdp" in layout else ("auto",):
        on_ranks(ranks, f"pp2:{schedule},{layout}", cases, sharding=ShardingSection(accumulate=accumulate))


# Accumulation, lengths


def twice_on_a_rank(layout: str) -> tuple[Step, Step]:
    """4 microbatches, and the same ones twice in one step, divided by the tokens of once."""
    mesh, batches = Mesh(Layout.parse(layout)), batches_of(TINY, pieces_of(4))
    tokens = valid_tokens_of(batches)
    once, twice = (laid_out(TINY, mesh, microbatches=count) for count in (4, 8))
    return step_of(once, batches, tokens), step_of(twice, [*batches, *batches], tokens)


@pytest.mark.parametrize("layout", ["pp2", "pp2:zb-h1"])
def test_accumulated_gradients_are_a_sum(ranks: RankPool, layout: str) -> None:
    """The same batch twice: 2.00 times the gradient, not 1.25 times."""
    # PP-01
    expected = one_process(TINY, batches_of(TINY, pieces_of(4)))
    for once, twice in ranks(2, twice_on_a_rank, layout):
        same(once, expected)
        assert twice.norm == pytest.approx(2.0 * expected.norm, rel=1e-12)
        doubled = {name: 2.0 * gradient for name, gradient in expected.gradients.items()}
        same(twice, Step(2.0 * expected.loss, 2.0 * expected.norm, doubled))


@pytest.mark.parametrize("layout", ["pp2", "pp2:interleaved2", "pp2:zbv", "pp2:bfs2,fsdp2", "pp4:gpipe"])
def test_microbatches_of_different_lengths(ranks: RankPool, layout: str) -> None:
    """Sequences of 8, 16, 12 and 4 tokens in one step, of rows that differ too."""
    # PP-04, PP-14
    cases = [(TIED, [(2, 8), (2, 16), (2, 12), (2, 4)]), (TINY, [(4, 8), (2, 16)])]
    on_ranks(ranks, layout, cases)


@pytest.mark.parametrize("layout", ["pp2", "pp2:interleaved2,dp2"])
def test_ranks_may_agree_on_every_message(ranks: RankPool, layout: str) -> None:
    """Debug mode, in which each message is announced and answered, changes nothing and ends."""
    on_ranks(ranks, layout, [(TIED, [(2, 8), (4, 16), (2, 12)])], debug=True)


def test_large_messages(ranks: RankPool) -> None:
    """More than 1 MB each, both ways at once: what is sent does not fit into the buffers of sockets."""
    # PP-16
    rows, length = 260, 16
    assert rows * length * TINY.hidden_size * 8 > 2**20
    on_ranks(ranks, "pp2:interleaved2", [(TINY, [(rows, length)] * 2)])


# A tied embedding


def tied_steps(layout: str) -> tuple[list[tuple[float, Tensor | None]], dict[str, Tensor]]:
    """After each of 5 steps of AdamW: the norm, and what this rank has of the tied weight; all at the end."""
    mesh = Mesh(Layout.parse(layout))
    parallel = laid_out(TIED, mesh, microbatches=4)
    update = Update(parallel, optimizers(parallel, OptimizerSection(learning_rate=1e-2)), clip_norm=0.5)
    update.learning_rate = 1e-2
    seen: list[tuple[float, Tensor | None]] = []
    for step in range(5):
        lengths = [(2, 8 + 4 * step), (2, 12), (4, 16), (2, 4)]
        mine = batches_of(TIED, lengths, share=mesh.data.rank, shares=mesh.data.size)
        parallel.step(mine, valid_tokens=valid_tokens_of(batches_of(TIED, lengths)), update=update)
        held = {
            name: weight.clone()
            for unit in parallel.units
            for name, weight in unit.named(unit.whole(unit.master))
            if name == EMBEDDING
        }
        seen.append((update.norm, held.get(EMBEDDING)))
    return seen, {name: master.clone() for name, master in parallel.named_masters()}


@pytest.mark.parametrize("layout", ["pp2,dp2", "pp2,fsdp2:zero1", "pp4", "pp2:zbv", "pp2:bfs2,fsdp2"])
def test_a_tied_embedding_stays_one(ranks: RankPool, layout: str) -> None:
    """5 clipped steps of AdamW: the same bits on the first and the last rank (in a V, on one) after each."""
    # PP-07, PP-08
    expected, weights = tied_steps("dp1")
    assert min(norm for norm, _ in expected) > 0.5  # it clips
    results = ranks(Layout.parse(layout).world_size, tied_steps, layout)
    stages = Layout.parse(layout).pp
    world = len(results)
    first, last = range(world // stages), range(world - world // stages, world)
    holders = [*first] if "zbv" in layout else [*first, *last]
    for step, (norm, weight) in enumerate(expected):
        assert weight is not None
        held = [results[rank][0][step][1] for rank in range(world)]
        assert [rank for rank in range(world) if held[rank] is not None] == holders
        for rank in holders:
            assert torch.equal(held[rank], held[0]), f"step {step}, rank {rank}"
        torch.testing.assert_close(held[0], weight, rtol=1e-7, atol=1e-9)
        for seen, _ in results:
            assert seen[step][0] == pytest.approx(norm, rel=1e-9)
    for _, found in results:
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-8, msg=name)


# Clipping

FIRST, LAST = "model.layers.0.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"


def clipped_by_hand(layout: str, gradients: dict[str, float]) -> tuple[float, dict[str, float]]:
    """The norm of gradients with these sums over the ranks that hold them, and what clipping to 1 leaves."""
    parallel = laid_out(TIED, Mesh(Layout.parse(layout)), microbatches=4)
    for unit in parallel.units:
        unit.summed.zero_()
        for name, gradient in unit.named(unit.summed):
            gradient.view(-1)[0] = gradients.get(name, 0.0)
    norm = gradient_norm(parallel.counted_units, parallel.norm_axis)
    clip_(parallel.units, norm=norm, max_norm=1.0)
    return norm, {name: float(found.sum()) for name, found in parallel.named_gradients() if name in gradients}


@pytest.mark.parametrize("layout", ["pp2", "pp2:interleaved2"])
@pytest.mark.parametrize(("embedding", "norm"), [(0.0, 5.0), (2.0, math.sqrt(29))])
def test_all_stages_clip_by_one_norm(ranks: RankPool, layout: str, embedding: float, norm: float) -> None:
    """Of stages with norms 3 and 4 it is 5; a tied embedding, on both with the same sum, counts once."""
    # GC-03, GC-05
    gradients = {FIRST: 3.0, LAST: 4.0, EMBEDDING: embedding}
    for found, clipped in [clipped_by_hand("dp1", gradients), *ranks(2, clipped_by_hand, layout, gradients)]:
        assert found == pytest.approx(norm, rel=1e-15)
        assert clipped == pytest.approx({name: value / norm for name, value in gradients.items()}, rel=1e-15)


def clipped_in_float32(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a step before clipping, and after it."""
    parallel = laid_out(TINY, Mesh(Layout.parse(layout)), microbatches=4, dtype="float32")
    found: list[dict[str, Tensor]] = []

    def update(_: Tensor) -> None:
        found.append({name: gradient.clone() for name, gradient in parallel.named_gradients()})
        norm = gradient_norm(parallel.counted_units, parallel.norm_axis)
        clip_(parallel.units, norm=norm, max_norm=0.1)
        found.append({name: gradient.clone() for name, gradient in parallel.named_gradients()})

    batches = batches_of(TINY, [(2, 8)] * 4)
    parallel.step(batches, valid_tokens=valid_tokens_of(batches), update=update)
    return found[0], found[1]


def test_clipping_differs_by_no_more_than_the_order_of_the_norm(ranks: RankPool) -> None:
    """On one stage and on two: the same bits of every gradient before; after, the norm is another sum."""
    # GC-06
    expected, expected_clipped = clipped_in_float32("dp1")
    for gradients, clipped in ranks(2, clipped_in_float32, "pp2"):
        for name, gradient in expected.items():
            assert torch.equal(gradients[name], gradient), name
            torch.testing.assert_close(clipped[name], expected_clipped[name], rtol=1e-6, atol=0, msg=name)


# Evaluation


def evaluated(parallel: ParallelModel, batches: Sequence[Microbatch]) -> float:
    total = all_reduce_(parallel.evaluate(batches), parallel.mesh.joint("pp", *BATCH_AXES))
    return float(total)


def train_and_evaluate(layout: str, evaluates: bool) -> tuple[list[float], list[float]]:
    """(evaluate, train) twice, with other numbers of microbatches and lengths each time."""
    mesh = Mesh(Layout.parse(layout))
    parallel = laid_out(TIED, mesh, microbatches=3)
    update = Update(parallel, optimizers(parallel, OptimizerSection(learning_rate=1e-2)), clip_norm=1.0)
    update.learning_rate = 1e-2
    shares = {"share": mesh.data.rank, "shares": mesh.data.size}
    losses, evaluations = [], []
    plan: list[tuple[Lengths, Lengths]] = [
        ([(2, 8)], [(2, 16)] * 3),
        ([(4, 12)] * 5, [(2, 8), (4, 4), (2, 12)]),
        ([(2, 12), (2, 4)], [(2, 12)] * 3),
    ]
    for held_out, training in plan:
        if evaluates:
            evaluations.append(evaluated(parallel, batches_of(TIED, held_out, **shares)))
        tokens = valid_tokens_of(batches_of(TIED, training))
        loss = parallel.step(batches_of(TIED, training, **shares), valid_tokens=tokens, update=update)
        losses.append(float(loss))
    return losses, evaluations


@pytest.mark.parametrize("layout", ["pp2", "pp4", "pp2:interleaved2,fsdp2", "pp2:zbv,dp2"])
def test_evaluation_between_steps(ranks: RankPool, layout: str) -> None:
    """Other counts and lengths than those of training; training goes on as if there had been none."""
    # PP-10
    losses, evaluations = train_and_evaluate("dp1", True)
    world_size = Layout.parse(layout).world_size
    with_evaluation = ranks(world_size, train_and_evaluate, layout, True)
    without = ranks(world_size, train_and_evaluate, layout, False)
    for (found, found_evaluations), (alone, _) in zip(with_evaluation, without, strict=True):
        assert found == alone
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_evaluations == pytest.approx(evaluations, rel=1e-9)


COUNTS = (5, 0, 17, 10)


def counted(which: int) -> Microbatch:
    """Two rows of 16 tokens, of which so many labels count."""
    [batch] = batches_of(TINY, [(2 * (which + 1), LENGTH)])
    rows = slice(2 * which, None)
    ids, positions = batch.input_ids_BS[rows], torch.arange(LENGTH).expand(2, LENGTH)
    labels = ids.roll(-1, 1).flatten()
    labels[COUNTS[which] :] = IGNORE
    return Microbatch(ids, labels.view(2, LENGTH), positions, ((LENGTH,),) * 2)


def losses_by_token(layout: str) -> tuple[float, float]:
    """Of training and of evaluation, where each of two data-parallel ranks has two microbatches."""
    mesh = Mesh(Layout.parse(layout))
    parallel = laid_out(TINY, mesh, microbatches=2)
    mine = [counted(2 * mesh.data.rank), counted(2 * mesh.data.rank + 1)]
    loss = float(parallel.step(mine, valid_tokens=sum(COUNTS), update=nothing))
    return loss / sum(COUNTS), evaluated(parallel, mine) / sum(COUNTS)


def test_losses_count_by_token(ranks: RankPool) -> None:
    """5, 0, 17 and 10 labels in the microbatches of two data-parallel ranks: one division, at the end."""
    # PP-13
    batches = [counted(which) for which in range(4)]
    assert tuple(valid_tokens_of([batch]) for batch in batches) == COUNTS
    expected = one_process(TINY, batches).loss
    for layout in ("pp2,dp2", "pp2:bfs2,fsdp2"):
        for training, evaluation in ranks(4, losses_by_token, layout):
            assert training == pytest.approx(expected, rel=1e-12)
            assert evaluation == pytest.approx(expected, rel=1e-12)


# What is kept


def gradients_on_a_rank(layout: str) -> dict[str, Tensor]:
    [step] = steps_on_a_rank(layout, [(TINY, pieces_of(8))])
    return step.gradients


def test_halves_give_the_bits_of_the_whole(ranks: RankPool) -> None:
    """Input and weight gradients apart, as in zb-h1, sum the same terms in the same order as 1F1B."""
    whole = ranks(2, gradients_on_a_rank, "pp2:1f1b")[0]
    for schedule in ("zb-h1", "zb-h2"):
        halves = ranks(2, gradients_on_a_rank, f"pp2:{schedule}")[0]
        assert [name for name in whole if not torch.equal(whole[name], halves[name])] == []


@contextmanager
def watching(patch: pytest.MonkeyPatch, parallel: ParallelModel) -> Iterator[tuple[list[int], list[int]]]:
    """Note the activations in flight after each forward, and the sends under way after each send."""
    in_flight: list[int] = []
    sends: list[int] = []
    segments = list(parallel.executor._segments.values())
    forward, send = Segment.forward, Transport.send

    def noted_forward(self: Segment, *args: object, **options: object) -> Tensor:
        y = forward(self, *args, **options)  # type: ignore[arg-type]
        in_flight.append(sum(segment.in_flight for segment in segments))
        return y

    def noted_send(self: Transport, *args: object) -> None:
        send(self, *args)  # type: ignore[arg-type]
        sends.append(len(self._sends))

    patch.setattr(Segment, "forward", noted_forward)
    patch.setattr(Transport, "send", noted_send)
    yield in_flight, sends
    assert sum(segment.in_flight for segment in segments) == 0


def kept_on_a_rank(layout: str, microbatches: int) -> tuple[int, int, int]:
    """The peak of activations in flight, measured and simulated, and the most sends under way."""
    mesh = Mesh(Layout.parse(layout))
    parallel = laid_out(TINY, mesh, microbatches=microbatches)
    batches = batches_of(TINY, [(1, 4)] * microbatches)
    with pytest.MonkeyPatch.context() as patch, watching(patch, parallel) as (in_flight, sends):
        parallel.step(batches, valid_tokens=valid_tokens_of(batches), update=nothing)
    return max(in_flight), peak_in_flight(parallel.program)[mesh.pp.rank], max(sends)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_many_activations_are_kept_as_simulated(ranks: RankPool, schedule: str) -> None:
    for measured, simulated, _ in ranks(2, kept_on_a_rank, f"pp2:{schedule}", 12):
        assert measured == simulated


def test_what_was_sent_is_released_once_it_has_arrived(ranks: RankPool) -> None:
    """In 1F1B two messages of a rank are under way at most, however many microbatches; in GPipe P + 1."""
    for microbatches in (4, 16):
        for _, _, sends in ranks(2, kept_on_a_rank, "pp2", microbatches):
            # The last backwards of the second rank are answered by nothing.
            assert sends <= 3
    first, _ = ranks(2, kept_on_a_rank, "pp2:gpipe", 16)
    assert first[2] == 3  # nothing comes back during its forwards, so the oldest is waited for


# Frozen parameters


def with_frozen(layout: str, spec: ModelSpec, names: Sequence[str]) -> tuple[Step, dict[str, Tensor]]:
    """A step of AdamW's sums, and the weights after it."""
    mesh, lengths = Mesh(Layout.parse(layout)), pieces_of(3)
    with torch.device("meta"):
        model = Decoder(spec)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(names)))
    parallel = parallelize(model, mesh=mesh, microbatches=3, dtype=torch.float64, sequence_length=LENGTH)
    parallel.load_(
        dict(initialized(spec, Mesh(Layout()), microbatches=1, dtype="float64", seed=0).named_masters())
    )
    trains = any(unit.is_trained for unit in parallel.units)
    assert any(action.kind is Kind.REDUCE for action in parallel.program.ranks[mesh.pp.rank]) == trains
    assert any(action.kind in SUMS for action in parallel.program.ranks[mesh.pp.rank])
    mine = batches_of(spec, lengths, share=mesh.data.rank, shares=mesh.data.size)
    found = step_of(parallel, mine, valid_tokens_of(batches_of(spec, lengths)))
    update = Update(parallel, optimizers(parallel, OptimizerSection(learning_rate=1e-2)), clip_norm=0.1)
    update.learning_rate = 1e-2
    parallel.step(mine, valid_tokens=valid_tokens_of(batches_of(spec, lengths)), update=update)
    assert update.norm == pytest.approx(found.norm, rel=1e-12)
    return found, {name: master.clone() for name, master in parallel.named_masters()}


FIRST_STAGE = [EMBEDDING, "model.layers.0.", "model.layers.1."]


@pytest.mark.parametrize(
    ("layout", "spec", "names"),
    [
        ("pp2", TINY, [EMBEDDING]),
        ("pp2", TIED, [EMBEDDING]),
        ("pp2", TINY, FIRST_STAGE),
        ("pp2:zb-h1", TINY, FIRST_STAGE),
        ("pp2,fsdp2", TINY, FIRST_STAGE),
        ("pp2:interleaved2", TINY, ["model.layers.1.", "model.layers.2.", "model.norm", "lm_head"]),
    ],
)
def test_frozen_parameters(ranks: RankPool, layout: str, spec: ModelSpec, names: list[str]) -> None:
    """A frozen embedding, a first rank with nothing to train: gradients and norm are one process's."""
    start = dict(initialized(spec, Mesh(Layout()), microbatches=1, dtype="float64", seed=0).named_masters())
    expected = one_process(spec, batches_of(spec, pieces_of(3)), frozen=names)
    assert 0 < len(expected.gradients) < len(start)
    _, moved = with_frozen("dp1", spec, names)
    for found, weights in ranks(Layout.parse(layout).world_size, with_frozen, layout, spec, names):
        same(found, expected)
        for name, weight in weights.items():
            assert torch.equal(weight, start[name]) == (name not in expected.gradients), name
            torch.testing.assert_close(weight, moved[name], rtol=1e-6, atol=1e-8, msg=name)
