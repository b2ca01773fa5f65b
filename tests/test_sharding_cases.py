"""Known faults of other systems that concern sharding, each as an input and the right value, on real ranks.

Some are held by tests elsewhere: a rank without labels (DP-04) and weights kept over microbatches (FS-10) in
`test_every_layout`, one sum a unit and step (DP-17) in `test_costs_match_execution`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.assembly import parallelize
from fourfold.batch.costs import held_bytes
from fourfold.batch.gathers import with_gathers
from fourfold.batch.reduction import with_reductions
from fourfold.collectives import record
from fourfold.data import SyntheticDataset
from fourfold.initialize import initialize_, whole
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch, Piece
from fourfold.optimizer import Update, gradient_norm, optimizers, owned_parameters
from fourfold.parallel_model import ParallelModel
from fourfold.program import COMPUTE, Action, Kind, Program, check
from fourfold.specs import Layout, ModelSpec, OptimizerSection, RunSpec, ShardingSection
from fourfold.training import Trainer, evaluate, initialized, rank_batches
from tests.ranks import RankPool

TINY = ModelSpec.preset("tiny")
PLACEMENTS = ["dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2", "dp2,fsdp2"]
PIECES = ["auto", "matrices", "rows", "flat"]
LENGTH = 12
EMBEDDING = "model.embed_tokens.weight"


def nothing(_: Tensor) -> None:
    pass


def run_spec(layout: str, **sections: dict[str, Any]) -> RunSpec:
    values: dict[str, Any] = {
        "layout": layout,
        "model": {"preset": "tiny"},
        "data": {"sequence_length": LENGTH},
        "training": {"steps": 4, "batch": 12, "microbatches": 3, "dtype": "float64"},
        "sharding": {},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"batches": 1},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return RunSpec.model_validate(values)


def synthetic(spec: ModelSpec = TINY) -> SyntheticDataset:
    return SyntheticDataset(spec.vocab_size, LENGTH, seed=6)


def sgd(parallel: ParallelModel, rate: float) -> Callable[[Tensor], None]:
    """An update that is plain SGD."""
    owned = owned_parameters(parallel.units)
    optimizer = torch.optim.SGD([{"params": owned.decayed}, {"params": owned.plain}], lr=rate)

    def update(_: Tensor) -> None:
        optimizer.step()
        parallel.publish_()

    return update


def masters_of(parallel: ParallelModel) -> dict[str, Tensor]:
    return {name: master.clone() for name, master in parallel.named_masters()}


def after_sgd(
    spec: ModelSpec, layout: str, pieces: str, *, steps: int = 2, rate: float = 1.0
) -> tuple[dict[str, Tensor], int]:
    """The whole weights after some steps on 12 rows, and how much of the embedding this rank owns."""
    mesh, data = Mesh(Layout.parse(layout)), synthetic(spec)
    parallel = initialized(
        spec, mesh, microbatches=1, dtype="float64", seed=0, sharding=ShardingSection(pieces=pieces)
    )
    update = sgd(parallel, rate)
    for step in range(steps):
        batches = rank_batches(data, mesh, step=step, batch=12, microbatches=1)
        parallel.step(batches, valid_tokens=data.valid_tokens(step, 12), update=update)
    owned = [o.part for unit in parallel.units for o in unit.owned if o.name == EMBEDDING]
    return masters_of(parallel), sum(part.stop - part.start for part in owned)


def same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10) -> None:
    """Each tensor by name, to ``rtol`` of its largest element."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=rtol * largest, msg=name)


# Sizes that do not divide


@pytest.mark.parametrize("pieces", PIECES)
def test_every_row_of_a_tied_embedding_moves(ranks: RankPool, pieces: str) -> None:
    """Vocabulary 10 on 4 ranks, tied, SGD at rate 1, 2 steps: all 10 rows as in one process."""
    # FS-01
    spec = ModelSpec.preset("tiny-qwen3").replace({"vocab_size": 10})
    initial, _ = after_sgd(spec, "dp1", "auto", steps=0)
    expected, _ = after_sgd(spec, "dp1", "auto")
    results = ranks(4, after_sgd, spec, "fsdp4", pieces)
    for found, _ in results:
        same(found, expected)
        moved = (found[EMBEDDING] - initial[EMBEDDING]).abs().amax(1)
        assert moved.shape == (10,)
        assert float(moved.min()) > 1e-6
    owned = [count for _, count in results]
    assert sum(owned) == 10 * spec.hidden_size
    assert pieces == "flat" or len(set(owned)) > 1  # 10 rows do not divide


@pytest.mark.parametrize("pieces", ["matrices", "rows", "flat"])
@pytest.mark.parametrize("vocabulary", [9, 5, 3])
def test_ranks_that_own_nothing_of_a_unit_take_part(ranks: RankPool, vocabulary: int, pieces: str) -> None:
    """Fewer rows than ranks, or a matrix that one rank owns whole: trained as in one process."""
    # FS-02
    spec = TINY.replace({"vocab_size": vocabulary})
    expected, _ = after_sgd(spec, "dp1", "auto")
    results = ranks(4, after_sgd, spec, "fsdp4", pieces)
    for found, _ in results:
        same(found, expected)
    empty = sum(count == 0 for _, count in results)
    assert empty == {"matrices": 3, "rows": max(4 - vocabulary, 0), "flat": 0}[pieces]


def adamw_on_uneven_pieces(layout: str, pieces: str) -> tuple[dict[str, Tensor], set[float]]:
    """Weights after 3 steps of AdamW with a norm and a matrix frozen, and how many steps it has counted."""
    spec, mesh = TINY.replace({"vocab_size": 9}), Mesh(Layout.parse(layout))
    parallel = frozen(spec, mesh, ["model.norm", "model.layers.0.mlp.up_proj"], pieces=pieces)
    section = OptimizerSection(learning_rate=1e-2)
    made = optimizers(parallel, section)
    update = Update(parallel, made, clip_norm=0.1)
    update.learning_rate = 1e-2
    data = synthetic(spec)
    for step in range(3):
        batches = rank_batches(data, mesh, step=step, batch=12, microbatches=3)
        parallel.step(batches, valid_tokens=data.valid_tokens(step, 12), update=update)
    counts = {float(state["step"]) for optimizer in made for state in optimizer.state.values()}
    return masters_of(parallel), counts


@pytest.mark.parametrize("pieces", ["matrices", "rows"])
def test_the_steps_of_adamw_are_counted_alike_on_all_ranks(ranks: RankPool, pieces: str) -> None:
    """9 rows on 4 ranks, frozen layers: nobody waits for who has nothing; bias correction is the same."""
    # OPT-07
    expected, counts = adamw_on_uneven_pieces("dp1", pieces)
    assert counts == {3.0}
    for found, counts in ranks(4, adamw_on_uneven_pieces, "fsdp4", pieces):
        assert counts == {3.0}
        same(found, expected, rtol=1e-8)


# Frozen parameters


def frozen(
    spec: ModelSpec,
    mesh: Mesh,
    names: Sequence[str],
    *,
    microbatches: int = 3,
    pieces: str = "auto",
) -> ParallelModel:
    """The model with the parameters under ``names`` frozen before it is laid out; initial weights as ever."""
    with torch.device("meta"):
        model = Decoder(spec)
    for name in names:
        for parameter in model.get_submodule(name).parameters():
            parameter.requires_grad_(False)
    parallel = parallelize(
        model,
        mesh=mesh,
        microbatches=microbatches,
        dtype=torch.float64,
        sharding=ShardingSection(pieces=pieces),
    )
    plain = Decoder(spec)
    values = {name: torch.empty(p.shape, dtype=torch.float64) for name, p in plain.named_parameters()}
    initialize_(whole(values), plain, seed=0, std=spec.initializer_range)
    parallel.load_(values)
    return parallel


FROZEN = {
    "embedding": ["model.embed_tokens"],
    "matrix": ["model.layers.1.mlp.up_proj"],
    "block": ["model.layers.0"],
    "head": ["lm_head", "model.norm"],
    "first": ["model.embed_tokens", "model.layers.0"],
}


@dataclass(frozen=True)
class Frozen:
    """What a rank says of a model with frozen parameters."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    rest_bytes: int
    predicted_rest_bytes: int
    owned: int
    owned_trained: int
    optimizer_elements: int


def step_with_frozen(model: str, layout: str, what: str) -> Frozen:
    spec, mesh = ModelSpec.preset(model), Mesh(Layout.parse(layout))
    parallel, data = frozen(spec, mesh, FROZEN[what]), synthetic(spec)
    gradients: dict[str, Tensor] = {}
    made = optimizers(parallel, OptimizerSection(learning_rate=1e-2, weight_decay=0.5))
    update = Update(parallel, made, clip_norm=0.0)
    update.learning_rate = 1e-2

    def noted(loss_sum: Tensor) -> None:
        gradients.update({name: gradient.clone() for name, gradient in parallel.named_gradients()})
        update(loss_sum)

    batches = rank_batches(data, mesh, step=0, batch=12, microbatches=3)
    parallel.step(batches, valid_tokens=data.valid_tokens(0, 12), update=noted)
    parallel.evaluate(batches)
    held = held_bytes(
        parallel.program,
        rank=0,
        units={n: u.size for n, u in parallel.units_by_number.items()},
        temporary=False,
    )
    return Frozen(
        gradients,
        masters_of(parallel),
        sum(unit.held_bytes for unit in parallel.units),
        held.rest,
        sum(len(unit.master) for unit in parallel.units),
        sum(len(unit.master) for unit in parallel.units if unit.is_trained),
        sum(state["exp_avg"].numel() for optimizer in made for state in optimizer.state.values()),
    )


def gradients_of_one_process(model: str) -> dict[str, Tensor]:
    """Plain autograd, everything trained; the same initial weights as `frozen`."""
    spec, data = ModelSpec.preset(model), synthetic(ModelSpec.preset(model))
    plain = Decoder(spec).double()
    initialize_(whole(dict(plain.named_parameters())), plain, seed=0, std=spec.initializer_range)
    (plain.loss_sum(data.rows(0, 12, range(12))) / data.valid_tokens(0, 12)).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2:zero1"])
def test_frozen_parameters_stay_and_cost_nothing(ranks: RankPool, layout: str, what: str) -> None:
    """The others' gradients are those of one process; the frozen have no gradient or optimizer state."""
    # DP-16
    model = "tiny-qwen3" if what in ("matrix", "block") else "tiny"
    expected = gradients_of_one_process(model)
    plain = Decoder(ModelSpec.preset(model))
    still = {name for name in expected if any(name.startswith(f"{prefix}.") for prefix in FROZEN[what])}
    initial = {name: torch.empty_like(gradient) for name, gradient in expected.items()}
    initialize_(whole(initial), plain, seed=0, std=0.02)
    results = ranks(2, step_with_frozen, model, layout, what)
    for found in results:
        same(found.gradients, {name: g for name, g in expected.items() if name not in still})
        for name, weight in found.weights.items():
            assert torch.equal(weight, initial[name]) == (name in still), name
        assert found.rest_bytes == found.predicted_rest_bytes
        assert found.optimizer_elements == found.owned_trained < found.owned
    frozen_numel = sum(initial[name].numel() for name in still)
    copies = 2 if layout == "dp2" else 1
    assert sum(f.owned - f.owned_trained for f in results) == copies * frozen_numel


# Gradients that some rank or microbatch does not have


class Branches(nn.Module):
    """Two linear layers and a norm, of which a microbatch uses what its first token names, bit by bit."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4, bias=False)
        self.sometimes = nn.Linear(4, 3)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.rare = nn.LayerNorm(4)

    def first(self, _: Tensor | None, batch: Microbatch) -> Tensor:
        """Return (1, 4)."""
        return self.frozen(self.always(batch.labels_BS.to(self.always.weight.dtype)))

    def second(self, x: Tensor | None, batch: Microbatch) -> Tensor:
        """Return the loss."""
        assert x is not None
        choice = int(batch.input_ids_BS[0, 0])
        loss = x.square().sum()
        if choice & 1:
            loss = loss + self.sometimes(x).square().sum()
        if choice & 2:
            loss = loss + self.rare(x)[:, 0].sum()
        return loss

    def pieces(self) -> list[Piece]:
        """Return the two segments."""
        return [
            Piece("first", (self.always, self.frozen), self.first),
            Piece("second", (self.sometimes, self.rare), self.second),
        ]


def choosing(choice: int, scale: int) -> Microbatch:
    """One row of four tokens."""
    ids, labels = torch.full((1, 4), choice), scale * torch.arange(1, 5).view(1, 4)
    return Microbatch(ids, labels, torch.arange(4).view(1, 4), ((4,),))


# For each rank, what each of two microbatches uses.
CHOICES = {
    "only on rank 0": [(1, 3), (0, 0)],
    "first in the last": [(0, 3), (0, 1)],
    "nowhere": [(0, 0), (0, 0)],
}


def branch_gradients(layout: str | None, which: str) -> dict[str, Tensor]:
    """The gradients on a layout of two ranks, or in one process by autograd."""
    torch.manual_seed(3)
    plain = Branches().double()
    weights = {name: p.detach().clone() for name, p in plain.named_parameters()}
    batches = [
        [choosing(choice, 1 + rank + 2 * m) for m, choice in enumerate(choices)]
        for rank, choices in enumerate(CHOICES[which])
    ]
    if layout is None:
        losses = [plain.second(plain.first(None, b), b) for of_rank in batches for b in of_rank]
        (torch.stack(losses).sum() / 16).backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in plain.named_parameters()
            if p.requires_grad
        }
    mesh = Mesh(Layout.parse(layout))
    parallel = parallelize(plain, mesh=mesh, microbatches=2, dtype=torch.float64)  # type: ignore[arg-type]
    parallel.load_(weights)
    for _ in range(2):  # what the first step left behind does not count in the second
        parallel.step(batches[mesh.batch.rank], valid_tokens=16, update=nothing)
    return {name: gradient.clone() for name, gradient in parallel.named_gradients()}


@pytest.mark.parametrize("which", CHOICES)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2"])
def test_a_gradient_that_is_missing_counts_as_zero(ranks: RankPool, layout: str, which: str) -> None:
    """A branch used on rank 0 alone, first used in the last microbatch, or never: the right sum, no hang."""
    # DP-16
    expected = branch_gradients(None, which)
    for found in ranks(2, branch_gradients, layout, which, limit_seconds=20):
        same(found, expected)
    assert (float(expected["sometimes.weight"].abs().max()) > 0) == (which != "nowhere")


# Sums over microbatches and replicas


class TwoWeights(nn.Module):
    """The loss is the sum of two weights, times the batch's only label."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def loss_sum(self, _: Tensor | None, batch: Microbatch) -> Tensor:
        """Return the loss."""
        return (self.weight * batch.labels_BS.sum()).sum()

    def pieces(self) -> list[Piece]:
        """Return the only segment."""
        return [Piece("all", (self,), self.loss_sum)]


def mean_of_numbers(layout: str, accumulate: str) -> tuple[list[float], list[str]]:
    """The summed gradients and what is sent; rank r has the numbers r + 1 and r + 5, and 4 labels count."""
    mesh = Mesh(Layout.parse(layout))
    sharding = ShardingSection(accumulate=accumulate, pieces="rows")
    parallel = parallelize(TwoWeights(), mesh=mesh, microbatches=2, sharding=sharding)  # type: ignore[arg-type]
    parallel.load_({"weight": torch.ones(2)})
    batches = [
        Microbatch(torch.zeros(1, 1), torch.tensor([[number]]), torch.zeros(1, 1), ((1,),))
        for number in (mesh.rank + 1, mesh.rank + 5)
    ]
    with record() as events:
        parallel.step(batches, valid_tokens=4, update=nothing)
    [gradient] = [gradient.tolist() for _, gradient in parallel.named_gradients()]
    return gradient, [event.axis for event in events if event.op == "all_reduce" and event.dtype == "float32"]


@pytest.mark.parametrize("accumulate", ["pieces", "whole"])
@pytest.mark.parametrize("layout", ["dp2,fsdp2", "dp2,fsdp2:zero1", "dp2,fsdp2:zero2", "fsdp4", "dp4"])
def test_replicas_sum_after_all_microbatches(ranks: RankPool, layout: str, accumulate: str) -> None:
    """1 to 4, then 5 to 8 on 4 ranks: 36/4 = 9 on all. With the replicas summed too early, 8 and 10."""
    # FS-08, DP-17, DP-11
    for gradient, all_reduces in ranks(4, mean_of_numbers, layout, accumulate):
        assert gradient == [9.0, 9.0]
        assert all_reduces == (["dp"] if "dp" in layout.split(",")[0] and layout != "fsdp4" else [])


def norms_of_accumulation(layout: str) -> list[float]:
    """The gradient norm of the same 32 rows as 1, 2 and 8 microbatches a rank."""
    spec, mesh, data = TINY, Mesh(Layout.parse(layout)), synthetic()
    norms = []
    for microbatches in (1, 2, 8):
        parallel = initialized(spec, mesh, microbatches=microbatches, dtype="float64", seed=0)
        batches = rank_batches(data, mesh, step=0, batch=32, microbatches=microbatches)
        parallel.step(batches, valid_tokens=data.valid_tokens(0, 32), update=nothing)
        norms.append(gradient_norm(parallel.units, mesh.fsdp))
    return norms


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:zero1", "fsdp2:zero2", "dp2,fsdp2"])
def test_accumulation_keeps_the_norm_of_a_sharded_gradient(ranks: RankPool, layout: str) -> None:
    """The same rows as 1, 2 and 8 microbatches: ratios 1.000, not 1, 1/2, 1/8, of one process' norm."""
    # DP-05
    [expected, *_] = norms_of_accumulation("dp1")
    assert expected > 0.1
    for norms in ranks(Layout.parse(layout).world_size, norms_of_accumulation, layout):
        assert [norm / expected for norm in norms] == pytest.approx([1.0, 1.0, 1.0], rel=1e-12)


def gradients_of_step_2(layout: str, dtype: str) -> tuple[float, float, list[Tensor], list[Tensor]]:
    """Norms of step 1 and 2 at the same weights; gradients of step 2, and of a fresh model on its batch."""
    mesh, data = Mesh(Layout.parse(layout)), synthetic()
    used, fresh = (initialized(TINY, mesh, microbatches=3, dtype=dtype, seed=0) for _ in range(2))
    norms = []
    for step, models in ((0, [used]), (1, [used, fresh])):
        batches = rank_batches(data, mesh, step=step, batch=12, microbatches=3)
        for parallel in models:
            parallel.step(batches, valid_tokens=data.valid_tokens(step, 12), update=nothing)
        norms.append(gradient_norm(used.units, mesh.fsdp))
    both = [[g.clone() for _, g in parallel.named_gradients()] for parallel in (used, fresh)]
    return norms[0], norms[1], both[0], both[1]


def test_gradients_have_the_scale_of_float32_and_no_memory(ranks: RankPool) -> None:
    """In bfloat16, norms within 1 % of float32's, and nothing is left of the step before."""
    # FS-07
    first, second, _, _ = gradients_of_step_2("dp1", "float32")
    assert abs(first - second) > 0.01 * first
    for layout in PLACEMENTS:
        for norm_1, norm_2, used, fresh in ranks(
            Layout.parse(layout).world_size, gradients_of_step_2, layout, "bfloat16"
        ):
            assert norm_1 == pytest.approx(first, rel=0.01)
            assert norm_2 == pytest.approx(second, rel=0.01)
            assert all(torch.equal(a, b) for a, b in zip(used, fresh, strict=True))


# The optimizer


def decayed_once(layout: str, pieces: str, name: str) -> dict[str, Tensor]:
    """Weights of 1 after a step without gradients at rate 0.1 and decay 0.1."""
    spec, mesh = ModelSpec.preset("tiny-qwen2"), Mesh(Layout.parse(layout))
    sharding = ShardingSection(pieces=pieces)
    parallel = initialized(spec, mesh, microbatches=1, dtype="float32", seed=0, sharding=sharding)
    parallel.load_({key: torch.ones(shape) for key, shape in spec.parameter_shapes().items()})
    section = OptimizerSection(name=name, learning_rate=0.1, weight_decay=0.1)
    update = Update(parallel, optimizers(parallel, section), clip_norm=1.0)
    update.learning_rate = 0.1
    empty = synthetic(spec).rows(0, 3, range(1, 2))  # the row without labels
    parallel.step([empty], valid_tokens=0, update=update)
    assert update.norm == 0.0
    return masters_of(parallel)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("layout", ["dp2", "fsdp3", "fsdp3:zero1", "dp2,fsdp2"])
def test_matrices_decay_and_nothing_else_does(ranks: RankPool, layout: str, pieces: str) -> None:
    """Matrices, embedding and head among them, become 0.99; norms and biases stay, however a piece is cut."""
    # OPT-05
    for name in ("adamw", "muon") if pieces == "matrices" else ("adamw",):
        for weights in ranks(Layout.parse(layout).world_size, decayed_once, layout, pieces, name):
            for key, weight in weights.items():
                left = 0.99 if key.endswith("proj.weight") or "embed" in key or "lm_head" in key else 1.0
                torch.testing.assert_close(weight, torch.full_like(weight, left), rtol=1e-6, atol=0, msg=key)


# Weights over the borders of steps


def trained(layout: str, sections: dict[str, dict[str, Any]], evaluations: int) -> tuple[list[float], Any]:
    """Losses and weights of 4 steps, so many evaluations before and after each step."""
    run = run_spec(layout, **sections)
    trainer = Trainer(run, TINY, Mesh(run.layout), data=synthetic())
    held_out = SyntheticDataset(TINY.vocab_size, LENGTH, seed=7)
    losses = []
    rest = sum(unit.held_bytes for unit in trainer.parallel.units)
    for step in range(4):
        evaluated = [evaluate(trainer.parallel, run, held_out, step=step).loss for _ in range(evaluations)]
        assert len(set(evaluated)) <= 1
        losses.append(trainer.step(step).loss)
        for _ in range(evaluations):
            after = evaluate(trainer.parallel, run, held_out, step=step).loss
            assert after != evaluated[0], "the evaluation after a step reads weights from before it"
    if trainer.parallel.sharding.placement.weights:
        assert sum(unit.held_bytes for unit in trainer.parallel.units) == rest
    return losses, masters_of(trainer.parallel)


@pytest.mark.parametrize(
    ("layout", "accumulate"), [("fsdp2", "whole"), ("fsdp2:zero1", "pieces"), ("dp2,fsdp2", "pieces")]
)
def test_evaluation_reads_the_new_weights_and_disturbs_nothing(
    ranks: RankPool, layout: str, accumulate: str
) -> None:
    """Clipped steps, weights gathered once a step or for each use: none is stale, in a step or between."""
    # FS-10
    sections = {"sharding": {"accumulate": accumulate}, "optimizer": {"clip_norm": 0.1}}
    [(losses, weights)] = ranks(1, trained, "dp1", sections, 0)
    world_size = Layout.parse(layout).world_size
    without = ranks(world_size, trained, layout, sections, 0)
    for found, alone in zip(ranks(world_size, trained, layout, sections, 2), without, strict=True):
        assert found[0] == alone[0] == pytest.approx(losses, rel=1e-10)
        assert all(torch.equal(found[1][name], alone[1][name]) for name in weights)
        same(found[1], weights, rtol=1e-8)


# Backwards in halves


def in_turn(actions: list[Action]) -> list[Action]:
    """Each weight gradient right after its input gradient."""
    return [half for a in actions for half in (halves(a) if a.kind is Kind.BACKWARD else [a])]


def at_the_end(actions: list[Action]) -> list[Action]:
    """All weight gradients after everything else, when the weights have long been freed."""
    late = [halves(a)[1] for a in actions if a.kind is Kind.BACKWARD]
    return [halves(a)[0] if a.kind is Kind.BACKWARD else a for a in actions] + late


def halves(action: Action) -> list[Action]:
    return [action._replace(kind=Kind.INPUT_GRADIENT), action._replace(kind=Kind.WEIGHT_GRADIENT)]


def gradients_by_halves(
    model: str, layout: str, order: Callable[[list[Action]], list[Action]] | None
) -> dict[str, Tensor]:
    spec, mesh = ModelSpec.preset(model), Mesh(Layout.parse(layout))
    parallel, data = initialized(spec, mesh, microbatches=3, dtype="float64", seed=0), synthetic(spec)
    program = parallel.program if order is None else rewritten(parallel, order)
    for step in range(2):
        parallel.executor.step(
            program.ranks[0],
            rank_batches(data, mesh, step=step, batch=12, microbatches=3),
            valid_tokens=data.valid_tokens(step, 12),
            update=nothing,
        )
    return {name: gradient.clone() for name, gradient in parallel.named_gradients()}


def rewritten(parallel: ParallelModel, order: Callable[[list[Action]], list[Action]]) -> Program:
    """The program of a step with its compute actions in another order."""
    program, sharding = parallel.program, parallel.sharding
    compute = [action for action in program.ranks[0] if action.kind in COMPUTE]
    program = replace(program, ranks=(tuple(order(compute)),))
    program = with_gathers(program, prefetch=sharding.prefetch, keep=sharding.keep)
    program = with_reductions(program, every_microbatch=program.placement.gradients)
    check(program)
    return program


@pytest.mark.parametrize("order", [in_turn, at_the_end])
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:zero1", "dp2,fsdp2"])
def test_weight_gradients_may_come_after_the_weights_are_gone(
    ranks: RankPool, layout: str, order: Callable[[list[Action]], list[Action]]
) -> None:
    """I then W, biases and a tied head among them, give what B gives."""
    model = "tiny-qwen2" if order is in_turn else "tiny-qwen3"
    expected = gradients_by_halves(model, "dp1", None)
    for found in ranks(Layout.parse(layout).world_size, gradients_by_halves, model, layout, order):
        same(found, expected, rtol=1e-12)


# Steps that go wrong


class SpoiledOnRank1(SyntheticDataset):
    """Synthetic data whose positions are not a number at step 1, from row 2 on: on the last ranks alone.

    A row is one document there: some CPUs' fused attention over less than eight keys passes over a nan.
    """

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return the rows, spoiled or not."""
        found = super().rows(step, batch, rows)
        if step != 1 or rows.start < 2:
            return found
        whole = ((self.sequence_length,),) * len(rows)
        return replace(found, position_ids_BS=found.position_ids_BS * math.nan, documents=whole)


def around_a_step_that_is_not_finite(layout: str) -> tuple[bool, str, dict[str, Tensor], dict[str, Tensor]]:
    """Whether step 1 left the weights alone, what it is put down to, the weights after step 2, and those of
    a run that never saw step 1.
    """
    run = run_spec(layout, training={"microbatches": 1, "batch": 4})
    results = []
    for steps in ((0, 1, 2), (0, 2)):
        data = SpoiledOnRank1(TINY.vocab_size, LENGTH, seed=6)
        trainer = Trainer(run, TINY, Mesh(run.layout), data=data)
        for step in steps:
            before = masters_of(trainer.parallel)
            report = trainer.step(step)
            assert math.isfinite(report.loss) == math.isfinite(report.grad_norm) == (step != 1)
            if step == 1:
                after = masters_of(trainer.parallel)
                untouched = all(torch.equal(before[name], after[name]) for name in before)
                diagnosis = trainer.diagnosis(step)
        results.append(masters_of(trainer.parallel))
    return untouched, diagnosis, *results


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:zero1", "dp2,fsdp2"])
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(ranks: RankPool, layout: str) -> None:
    """No rank changes a weight; the message names rank and parameter; later steps know nothing of it."""
    # RUN-06
    world_size = Layout.parse(layout).world_size
    for untouched, diagnosis, found, expected in ranks(world_size, around_a_step_that_is_not_finite, layout):
        assert untouched
        assert diagnosis == (
            "step 2 is not finite; no weight was changed by it: the loss is not finite on rank "
            f"{world_size // 2}; the backward meets it first in lm_head.weight"
        )
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def after_failed_steps(layout: str) -> list[str]:
    """For each action of a step: fail before it, on all ranks, and step again."""
    mesh, data = Mesh(Layout.parse(layout)), synthetic()
    batches, count = rank_batches(data, mesh, step=0, batch=4, microbatches=1), data.valid_tokens(0, 4)

    def fresh() -> ParallelModel:
        return initialized(TINY, mesh, microbatches=1, dtype="float64", seed=0)

    def gradients(parallel: ParallelModel) -> list[Tensor]:
        parallel.step(batches, valid_tokens=count, update=nothing)
        return [gradient.clone() for _, gradient in parallel.named_gradients()]

    expected, answers = gradients(fresh()), []
    no_such_microbatch = Action(Kind.BACKWARD, 0, 7)
    for position in range(len(fresh().program.ranks[0])):
        parallel = fresh()
        wrong = [*parallel.program.ranks[0][:position], no_such_microbatch]
        with pytest.raises(KeyError):
            parallel.executor.step(wrong, batches, valid_tokens=count, update=nothing)
        try:
            found = gradients(parallel)
        except RuntimeError as error:
            answers.append(str(error))
        else:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), position
            answers.append("right")
    return answers


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2:zero1"])
def test_a_step_after_one_that_failed_is_refused_or_right(ranks: RankPool, layout: str) -> None:
    """Wherever a step fails, the next one does not hang and is not silently wrong."""
    first, second = ranks(2, after_failed_steps, layout, limit_seconds=30)
    assert first == second
    assert set(first) == {"right", "a step failed while ranks were communicating: build the model anew"}
