"""The interpreter of programs: what it computes, what it keeps, what it notes."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fourfold.batch import reduction
from fourfold.batch.pieces import cut
from fourfold.batch.reduction import with_reductions
from fourfold.batch.units import Unit
from fourfold.build import Sharding, evaluation, expanded
from fourfold.collectives import record
from fourfold.data import SyntheticDataset
from fourfold.errors import UserError
from fourfold.execute import Executor
from fourfold.layer.schedules import gpipe, one_forward_one_backward
from fourfold.mesh import Mesh
from fourfold.models import IGNORE, Decoder, Microbatch, Piece
from fourfold.models.norm import RMSNorm
from fourfold.models.parameters import parameter_sites
from fourfold.optimizer import gradient_norm
from fourfold.parallel_model import ParallelModel
from fourfold.program import COMMUNICATION, Action, Kind, Program, check
from fourfold.segment import Segment
from fourfold.specs import Layout, ModelSpec
from fourfold.training import initialized
from fourfold.weight_gradients import WeightGradients
from tests.memory import counting_kept_bytes
from tests.programs import REPLICAS, one_stage
from tests.ranks import RankPool

MODELS = ["tiny", "tiny-qwen2", "tiny-qwen3"]
MICROBATCHES = 3


@pytest.fixture(autouse=True)
def several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one process has them of a model whose blocks are large."""
    monkeypatch.setattr(reduction, "SEGMENT_BYTES", 16 * 2**10)


def model_of(name: str, dtype: str = "float64") -> ParallelModel:
    return initialized(ModelSpec.preset(name), Mesh(Layout()), microbatches=1, dtype=dtype, seed=0)


def microbatches(count: int, rows: int = 2, seed: int = 5) -> list[Microbatch]:
    data = SyntheticDataset(ModelSpec.preset("tiny").vocab_size, sequence_length=16, seed=seed)
    return [data.rows(0, count * rows, range(m * rows, (m + 1) * rows)) for m in range(count)]


def valid_tokens_of(batches: list[Microbatch]) -> int:
    return sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches)


def nothing(_: Tensor) -> None:
    pass


def halves(action: Action) -> list[Action]:
    return [action._replace(kind=Kind.INPUT_GRADIENT), action._replace(kind=Kind.WEIGHT_GRADIENT)]


def whole(actions: list[Action]) -> list[Action]:
    return actions


def halves_in_turn(actions: list[Action]) -> list[Action]:
    return [half for a in actions for half in (halves(a) if a.kind is Kind.BACKWARD else [a])]


def weights_at_the_end(actions: list[Action]) -> list[Action]:
    split = halves_in_turn(actions)
    late = [a for a in split if a.kind is Kind.WEIGHT_GRADIENT]
    return [a for a in split if a.kind is not Kind.WEIGHT_GRADIENT] + late


def mixed(actions: list[Action]) -> list[Action]:
    """Every other backward in halves, each W three actions after its I."""
    written: list[Action] = []
    waiting: list[tuple[int, Action]] = []
    for position, action in enumerate(actions):
        written += [w for due, w in waiting if due == position]
        waiting = [(due, w) for due, w in waiting if due != position]
        if action.kind is Kind.BACKWARD and (action.segment + action.microbatch) % 2:
            i, w = halves(action)
            written.append(i)
            waiting.append((position + 3, w))
        else:
            written.append(action)
    return written + [w for _, w in waiting]


def program_of(
    parallel: ParallelModel,
    microbatches: int,
    order: Callable[[list[Action]], list[Action]] = whole,
    schedule: Callable[..., Program] = one_forward_one_backward,
) -> Program:
    computed = expanded(
        schedule(ranks=1, microbatches=microbatches),
        segments_of_stage=[parallel.program.num_segments],
    )
    ordered = replace(computed, ranks=(tuple(order(list(computed.ranks[0]))),), users=parallel.program.users)
    program = with_reductions(ordered, every_microbatch=False)
    check(program)
    return program


def run(
    parallel: ParallelModel, program: Program, batches: list[Microbatch]
) -> tuple[float, dict[str, Tensor]]:
    """Return the sum of the losses and a copy of every gradient."""
    loss_sum = parallel.executor.step(
        program.ranks[0], batches, valid_tokens=valid_tokens_of(batches), update=nothing
    )
    return float(loss_sum), {name: gradient.clone() for name, gradient in parallel.named_gradients()}


def by_autograd(
    name: str, parallel: ParallelModel, batches: list[Microbatch]
) -> tuple[float, dict[str, Tensor]]:
    """The same from a plain model and plain autograd: one loss, one backward."""
    model = Decoder(ModelSpec.preset(name)).double()
    weights = dict(parallel.named_masters())
    for key, parameter in model.named_parameters():
        parameter.data.copy_(weights[key])
    loss_sum = torch.stack([model.loss_sum(batch) for batch in batches]).sum()
    (loss_sum / valid_tokens_of(batches)).backward()
    return float(loss_sum.detach()), {
        key: p.grad for key, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("order", [whole, halves_in_turn, weights_at_the_end, mixed])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_autograds(name: str, order: Callable[[list[Action]], list[Action]]) -> None:
    parallel, batches = model_of(name), microbatches(MICROBATCHES)
    loss_sum, gradients = run(parallel, program_of(parallel, MICROBATCHES, order), batches)
    expected_loss_sum, expected = by_autograd(name, parallel, batches)
    assert loss_sum == pytest.approx(expected_loss_sum, rel=1e-14)
    assert set(gradients) == set(expected)
    for key, gradient in expected.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(gradients[key], gradient, rtol=0, atol=1e-14 * largest, msg=key)


@pytest.mark.parametrize("order", [halves_in_turn, weights_at_the_end, mixed])
@pytest.mark.parametrize("name", MODELS)
def test_halves_give_the_bits_of_the_whole(name: str, order: Callable[[list[Action]], list[Action]]) -> None:
    """A tied weight gets its two contributions in another order, so there the last bit may differ."""
    parallel, batches = model_of(name), microbatches(MICROBATCHES)
    in_halves = program_of(parallel, MICROBATCHES, order)
    assert any(action.kind is Kind.WEIGHT_GRADIENT for action in in_halves.ranks[0])
    expected = run(parallel, program_of(parallel, MICROBATCHES), batches)
    found = run(parallel, in_halves, batches)
    assert found[0] == expected[0]
    for key, gradient in expected[1].items():
        tied = name == "tiny-qwen3" and key == "model.embed_tokens.weight"
        tolerance = 1e-14 * float(gradient.abs().max()) if tied else 0.0
        torch.testing.assert_close(found[1][key], gradient, rtol=0, atol=tolerance, msg=key)


def test_weight_gradients_wait_for_their_action() -> None:
    """After all the I and before any W, the layers' matrices have no gradient, the norms have theirs."""
    parallel, batches = model_of("tiny"), microbatches(1)
    program = program_of(parallel, 1, weights_at_the_end)
    no_w = [a for a in program.ranks[0] if a.kind is not Kind.WEIGHT_GRADIENT]
    parallel.executor.step(no_w, batches, valid_tokens=valid_tokens_of(batches), update=nothing)
    _, expected = by_autograd("tiny", parallel, batches)
    for key, gradient in parallel.named_gradients():
        late = gradient.ndim == 2 and key != "model.embed_tokens.weight"
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if late else expected[key])
    # What was put off belongs to the step that ended; the next one starts without it.
    run(parallel, program_of(parallel, 1), batches)
    for key, gradient in parallel.named_gradients():
        torch.testing.assert_close(gradient, expected[key])


def test_a_failed_step_leaves_the_executor_usable() -> None:
    """A label outside the vocabulary stops the second microbatch, with the first one's activations alive."""
    parallel, batches = model_of("tiny-qwen2"), microbatches(MICROBATCHES)
    program = program_of(parallel, MICROBATCHES, weights_at_the_end, schedule=gpipe)
    expected = run(parallel, program, batches)
    bad = list(batches)
    bad[1] = replace(bad[1], labels_BS=torch.full_like(bad[1].labels_BS, 10_000))
    with counting_kept_bytes() as kept:
        with pytest.raises(UserError, match="label 10000 is outside the vocabulary"):
            run(parallel, program, bad)
        gc.collect()  # the traceback held the frames of the forward that failed
        assert kept.peak_bytes > 0
        assert kept.now_bytes == 0
    found = run(parallel, program, batches)
    assert found[0] == expected[0]
    for key, gradient in expected[1].items():
        assert torch.equal(found[1][key], gradient), key


def test_a_step_that_fails_between_the_halves_leaves_the_executor_usable() -> None:
    parallel, batches = model_of("tiny"), microbatches(2)
    program = program_of(parallel, 2, weights_at_the_end)
    expected = run(parallel, program, batches)

    def refuse(_: Tensor) -> None:
        raise ZeroDivisionError

    # Once while weight gradients are put off, by an action out of its turn; once in the update.
    out_of_turn = [a for a in program.ranks[0] if a.kind is not Kind.WEIGHT_GRADIENT]
    out_of_turn.append(Action(Kind.INPUT_GRADIENT, 1, 0))
    with pytest.raises(KeyError):
        parallel.executor.step(out_of_turn, batches, valid_tokens=7, update=nothing)
    with pytest.raises(ZeroDivisionError):
        parallel.executor.step(program.ranks[0], batches, valid_tokens=7, update=refuse)
    found = run(parallel, program, batches)
    assert found[0] == expected[0]
    for key, gradient in expected[1].items():
        assert torch.equal(found[1][key], gradient), key


def test_evaluation_is_the_loss_of_the_forwards_and_keeps_nothing() -> None:
    parallel, batches = model_of("tiny-qwen3"), microbatches(MICROBATCHES)
    before = run(parallel, program_of(parallel, MICROBATCHES), batches)
    program = evaluation(parallel.program, microbatches=MICROBATCHES, sharding=REPLICAS)
    with counting_kept_bytes() as kept:
        losses = parallel.executor.forward(program, batches)
    assert kept.peak_bytes == 0
    assert len(losses) == MICROBATCHES
    assert not any(loss.requires_grad for loss in losses)
    loss_sum = parallel.evaluate(batches)
    assert loss_sum.dtype == torch.float64
    assert float(loss_sum) == pytest.approx(before[0], rel=1e-14)
    assert float(loss_sum) == sum(map(float, losses))
    for key, gradient in parallel.named_gradients():
        assert torch.equal(gradient, before[1][key]), key


def test_activations_of_one_microbatch_at_a_time() -> None:
    """Accumulation over 8 equal microbatches keeps no more than one microbatch does, and nothing after it."""
    # DP-10
    parallel = model_of("tiny")
    peaks = []
    for count in (1, 8):
        program = program_of(parallel, count)
        with counting_kept_bytes() as kept:
            run(parallel, program, microbatches(1) * count)
            assert kept.now_bytes == 0
        peaks.append(kept.peak_bytes)
    assert 0 < peaks[1] <= 1.05 * peaks[0]


def test_what_is_kept_may_be_packed_elsewhere() -> None:
    """Hooks on saved tensors, as those that keep activations on the host, do not change a gradient."""
    parallel, batches = model_of("tiny-qwen2"), microbatches(2)
    _, expected = run(parallel, program_of(parallel, 2), batches)
    with torch.autograd.graph.save_on_cpu():
        _, found = run(parallel, program_of(parallel, 2, weights_at_the_end), batches)
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient), key


def test_the_schedule_decides_how_much_is_kept() -> None:
    """All forwards first: 4 microbatches keep four times as much, and let go of all of it."""
    parallel = model_of("tiny")
    peaks = []
    for count in (1, 4):
        with counting_kept_bytes() as kept:
            run(parallel, program_of(parallel, count, schedule=gpipe), microbatches(1) * count)
            assert kept.now_bytes == 0
        peaks.append(kept.peak_bytes)
    assert 3.5 * peaks[0] < peaks[1] <= 4 * peaks[0]


def traced(layout: str) -> None:
    """Every action once, in order, with times that a step can have."""
    mesh = Mesh(Layout.parse(layout))
    parallel = initialized(ModelSpec.preset("tiny"), mesh, microbatches=3, dtype="float32", seed=0)
    batches = microbatches(3)
    for _ in range(2):
        began = time.perf_counter()
        parallel.step(batches, valid_tokens=valid_tokens_of(batches) * mesh.world_size, update=nothing)
        seconds = time.perf_counter() - began
        spans = parallel.executor.trace.spans
        actions = parallel.program.ranks[0]
        assert sorted(map(str, actions)) == sorted(str(span.action) for span in spans)
        assert all(0 <= span.start_seconds <= span.end_seconds <= seconds for span in spans)
        by_action = {span.action: span for span in spans}
        lane = [by_action[a] for a in actions if a.kind not in COMMUNICATION]
        for span, following in pairwise(lane):
            assert span.end_seconds <= following.start_seconds
        for action in actions:
            for need in parallel.program.needs(0, action):
                # A collective is seen to end after the action during which it did, which is never too late.
                assert by_action[need].end_seconds <= by_action[action].start_seconds


def test_the_trace_has_every_action_once() -> None:
    traced("dp1")


class OneWeight(nn.Module):
    """A model of one weight: the loss of a token is the weight times the token's label."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def loss_sum(self, _: Tensor | None, batch: Microbatch) -> Tensor:
        return self.weight * batch.labels_BS[batch.labels_BS != IGNORE].sum()


def tokens_with_loss(*counts_and_losses: tuple[int, int], length: int = 20) -> Microbatch:
    """A row for each pair: so many tokens with that loss, the rest without a label."""
    rows = len(counts_and_losses)
    labels = torch.full((rows, length), IGNORE)
    for row, (count, loss) in enumerate(counts_and_losses):
        labels[row, :count] = loss
    ids, positions = torch.zeros_like(labels), torch.arange(length).expand(rows, length)
    return Microbatch(ids, labels, positions, ((length,),) * rows)


def executor_of(
    model: nn.Module,
    loss_sum: Callable[[Tensor | None, Microbatch], Tensor],
    *,
    mesh: Mesh,
    dtype: torch.dtype,
) -> tuple[Executor, Unit]:
    """A model of one segment that is its own loss; its programs have one unit."""
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    unit = Unit(
        "all",
        parameters,
        parameter_sites(model),
        pieces=cut([shapes], ranks=mesh.fsdp.size, how="flat")[0],
        placement=mesh.layout.placement,
        shards=mesh.fsdp,
        replicas=mesh.joint("dp", "cp"),
        dtype=dtype,
        master_dtype=torch.float32,
        device=mesh.device,
    )
    weight_gradients = WeightGradients()
    weight_gradients.attach_(model)
    segment = Segment(Piece("all", (model,), loss_sum), weight_gradients)
    executor = Executor(
        one_stage(1, 1),
        {0: segment},
        {0: unit},
        weight_gradients=weight_gradients,
        mesh=mesh,
        activation=lambda _: pytest.fail("one segment receives nothing"),
    )
    return executor, unit


def mean_loss_and_gradient(
    mesh: Mesh, steps: list[list[Microbatch]], valid_tokens: list[int]
) -> list[tuple[float, float]]:
    """Steps of a model whose weight is 1: the gradient of the mean loss is the mean of the labels, too."""
    model = OneWeight()
    executor, unit = executor_of(model, model.loss_sum, mesh=mesh, dtype=torch.float32)
    unit.master.fill_(1.0)
    sharding = Sharding(mesh.layout.placement)
    results = []
    for batches, count in zip(steps, valid_tokens, strict=True):
        program = one_stage(1, len(batches), sharding=sharding, replicated=mesh.layout.dp > 1)
        loss_sum = executor.step(program.ranks[0], batches, valid_tokens=count, update=nothing)
        results.append((float(loss_sum) / count, float(unit.whole(unit.summed)[0])))
    return results


def test_microbatches_of_unequal_length_count_by_token() -> None:
    """5 tokens of loss 2 and 17 of loss 1: 27/22 = 1.2272727; a mean of means would be 1.5."""
    # DP-01
    [(loss, gradient)] = mean_loss_and_gradient(
        Mesh(Layout()), [[tokens_with_loss((5, 2)), tokens_with_loss((17, 1))]], [22]
    )
    assert loss == pytest.approx(1.2272727, rel=1e-7)
    assert gradient == pytest.approx(1.2272727, rel=1e-7)
    [(_, at_once)] = mean_loss_and_gradient(Mesh(Layout()), [[tokens_with_loss((5, 2), (17, 1))]], [22])
    assert gradient == pytest.approx(at_once, rel=1e-7)


def ranks_of_unequal_length(layout: str) -> list[tuple[float, float]]:
    mesh = Mesh(Layout.parse(layout))
    mine = tokens_with_loss((5, 2), (0, 2)) if mesh.rank == 0 else tokens_with_loss((17, 1))
    return mean_loss_and_gradient(mesh, [[mine]], [22])


def an_empty_microbatch_on_one_rank(layout: str) -> list[tuple[float, float]]:
    mesh = Mesh(Layout.parse(layout))
    mine = (
        [tokens_with_loss((5, 2)), tokens_with_loss((9, 1))]
        if mesh.rank == 0
        else [tokens_with_loss((8, 1)), tokens_with_loss((0, 1))]
    )
    return mean_loss_and_gradient(mesh, [mine], [22])


ON_TWO_RANKS = ["dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2"]


@pytest.mark.parametrize("layout", ON_TWO_RANKS)
def test_ranks_of_unequal_length_count_by_token(ranks: RankPool, layout: str) -> None:
    """Rank 0 has rows of 5 and of 0 tokens of loss 2, rank 1 one of 17 of loss 1: 1.2272727 on both."""
    # DP-02
    for [(loss, gradient)] in ranks(2, ranks_of_unequal_length, layout):
        assert loss == pytest.approx(1.2272727, rel=1e-7)
        assert gradient == pytest.approx(1.2272727, rel=1e-7)


@pytest.mark.parametrize("layout", ON_TWO_RANKS)
def test_a_rank_without_labels_in_its_last_microbatch_takes_part(ranks: RankPool, layout: str) -> None:
    """The last microbatch of rank 1 has no label: the step ends, and counts by token."""
    # DP-04
    for [(loss, gradient)] in ranks(2, an_empty_microbatch_on_one_rank, layout):
        assert loss == pytest.approx(1.2272727, rel=1e-7)
        assert gradient == pytest.approx(1.2272727, rel=1e-7)


def test_a_shorter_last_step_is_a_mean_over_what_it_has() -> None:
    """Steps of 4 and 3 equal microbatches of loss 2, then 6: means 2 and 6, not 3/4 of 6; nothing is left."""
    # DP-08
    steps = [[tokens_with_loss((10, 2))] * 4, [tokens_with_loss((10, 6))] * 3]
    assert mean_loss_and_gradient(Mesh(Layout()), steps, [40, 30]) == [(2.0, 2.0), (6.0, 6.0)]


class OneOfEach(nn.Module):
    """An embedding, a norm and a linear layer, each with an output gradient of 1 for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = RMSNorm(4, eps=0.0)
        self.linear = nn.Linear(4, 3)

    def loss_sum(self, _: Tensor | None, batch: Microbatch) -> Tensor:
        x_BSC = torch.ones(*batch.input_ids_BS.shape, 4, dtype=torch.bfloat16)
        outputs = (self.embedding(batch.input_ids_BS), self.norm(x_BSC), self.linear(x_BSC))
        return torch.stack([output.sum() for output in outputs]).sum()


@pytest.mark.parametrize("count", [1, 512])
def test_many_small_contributions_are_summed_in_float32(count: int) -> None:
    """512 tokens that each add 1 to a gradient give 512, computed in bfloat16, where a sum stops at 256: all
    in one microbatch, and one in each of 512.
    """
    # MP-04
    model = OneOfEach()
    executor, unit = executor_of(model, model.loss_sum, mesh=Mesh(Layout()), dtype=torch.bfloat16)
    length = 512 // count
    ids, positions = torch.full((1, length), 3), torch.arange(length).expand(1, length)
    batch = Microbatch(ids, ids, positions, ((length,),))
    executor.step(one_stage(1, count).ranks[0], [batch] * count, valid_tokens=1, update=nothing)
    gradients = dict(unit.named(unit.gradient))
    assert all(gradient.dtype is torch.float32 for gradient in gradients.values())
    assert gradients["embedding.weight"].tolist() == [[0.0] * 4] * 3 + [[512.0] * 4] + [[0.0] * 4]
    for name in ("norm.weight", "linear.weight", "linear.bias"):
        assert torch.equal(gradients[name], torch.full_like(gradients[name], 512.0)), name


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2", "dp2,fsdp2"])
def test_the_trace_has_the_collectives_too(ranks: RankPool, layout: str) -> None:
    ranks(Layout.parse(layout).world_size, traced, layout)


def collectives_of_a_step(microbatches_: int) -> tuple[list[str], float, int]:
    """The collectives of one step on the same 8 rows, the gradient norm, the number of units."""
    mesh = Mesh(Layout(dp=2))
    parallel = initialized(
        ModelSpec.preset("tiny"), mesh, microbatches=microbatches_, dtype="float64", seed=0
    )
    rows = microbatches(2 * microbatches_, rows=4 // microbatches_)
    mine = rows[mesh.rank :: 2]
    with record() as events:
        parallel.step(mine, valid_tokens=valid_tokens_of(rows), update=nothing)
    names = [f"{event.op} {event.axis}" for event in events]
    return names, gradient_norm(parallel.units, mesh.fsdp), len(parallel.units)


def test_one_reduction_a_unit_and_step(ranks: RankPool) -> None:
    """4 microbatches: one sum of the loss and one of each unit, not 4 of each; the gradients stay."""
    # DP-17
    for (events, norm, units), (events_of_one, norm_of_one, _) in zip(
        ranks(2, collectives_of_a_step, 4), ranks(2, collectives_of_a_step, 1), strict=True
    ):
        assert units > 1
        assert events == events_of_one == ["all_reduce dp"] * (1 + units)
        assert norm == pytest.approx(norm_of_one, rel=1e-13)


def step_after_one_that_failed_in_its_reductions() -> str:
    mesh = Mesh(Layout(dp=2))
    parallel = initialized(ModelSpec.preset("tiny"), mesh, microbatches=1, dtype="float64", seed=0)
    batches = microbatches(1)

    def broken(_: Tensor) -> None:
        raise ZeroDivisionError

    *before_update, _ = parallel.program.ranks[0]
    wrong = [*before_update, Action(Kind.BACKWARD, 0, 0)]  # a backward without its forward
    with pytest.raises(KeyError):
        parallel.executor.step(wrong, batches, valid_tokens=1, update=broken)
    try:
        parallel.step(batches, valid_tokens=1, update=nothing)
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_no_step_follows_one_that_failed_while_gradients_were_summed(ranks: RankPool) -> None:
    """Collectives may still be writing into the buffers, so going on could be silently wrong."""
    for message in ranks(2, step_after_one_that_failed_in_its_reductions):
        assert "a step failed while ranks were communicating" in message
