import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fourfold.batch.pieces import cut
from fourfold.batch.units import Unit
from fourfold.errors import UserError
from fourfold.mesh import Axis, Mesh
from fourfold.models.parameters import parameter_sites
from fourfold.optimizer import Update, clip_, gradient_norm, optimizers, owned_parameters
from fourfold.specs import PLACEMENTS, REPLICATED, Layout, OptimizerSection, Placement
from tests.ranks import RankPool

ALONE = Mesh(Layout())


def unit_of(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    *,
    how: str = "rows",
    placement: Placement = REPLICATED,
    shards: Axis = ALONE.fsdp,
    replicas: Axis = ALONE.dp,
) -> Unit:
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    return Unit(
        "all",
        parameters,
        parameter_sites(model),
        pieces=cut([shapes], ranks=shards.size, how=how)[0],
        placement=placement,
        shards=shards,
        replicas=replicas,
        dtype=dtype,
        master_dtype=torch.float32,
        device=torch.device("cpu"),
    )


@dataclass(frozen=True)
class Some:
    """What an optimizer sees of a `ParallelModel`."""

    units: Sequence[Unit]
    mesh: Mesh = ALONE
    block_matrices: frozenset[str] = frozenset()

    @property
    def counted_units(self) -> Sequence[Unit]:
        return self.units

    @property
    def norm_axis(self) -> Axis:
        return self.mesh.fsdp

    def publish_(self) -> None:
        for unit in self.units:
            unit.publish_()


def adamw(unit: Unit, spec: OptimizerSection) -> torch.optim.Optimizer:
    [optimizer] = optimizers(Some([unit]), spec)
    return optimizer


class Small(nn.Module):
    """A norm before a matrix with a bias, so that shapes and order mix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 2)


def test_only_matrices_decay() -> None:
    """AdamW lr 0.1, decay 0.1, zero gradients, one step: matrices x 0.99, the rest x 1."""
    model = Small()
    unit = unit_of(model)
    unit.master.fill_(1.0)
    adamw(unit, OptimizerSection(learning_rate=0.1, weight_decay=0.1)).step()
    torch.testing.assert_close(model.linear.weight.data, torch.full((2, 3), 0.99))
    for parameter in (model.linear.bias, model.norm.weight, model.norm.bias):
        assert torch.equal(parameter.data, torch.ones_like(parameter))


def test_the_step_is_that_of_separate_parameters() -> None:
    torch.manual_seed(1)
    model, other = Small(), Small()
    unit = unit_of(model)
    for name, view in unit.named(unit.master):
        view.copy_(dict(other.named_parameters())[name])
    spec = OptimizerSection(learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.3)
    ours = adamw(unit, spec)
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in other.parameters() if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in other.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-5,
    )
    for step in range(5):
        unit.gradient.copy_(torch.randn(unit.gradient.shape, generator=torch.Generator().manual_seed(step)))
        for name, view in unit.named(unit.gradient):
            dict(other.named_parameters())[name].grad = view.clone()
        ours.step()
        theirs.step()
    for name, view in unit.named(unit.master):
        torch.testing.assert_close(view, dict(other.named_parameters())[name].data)


@pytest.mark.parametrize("rate", [1e-3, 1.9e-3, 2e-3])
def test_master_weights_move_where_bfloat16_would_not(rate: float) -> None:
    """One weight 1.0, constant gradient, 100 steps: about 1 - 100 x rate; pure bfloat16 stays at 1."""
    # MP-01
    model = nn.LayerNorm(1, bias=False)
    unit = unit_of(model, torch.bfloat16)
    unit.master.fill_(1.0)
    optimizer = adamw(unit, OptimizerSection(learning_rate=rate))
    for _ in range(100):
        unit.gradient.fill_(0.5)
        optimizer.step()
    unit.publish_()
    assert unit.master.item() == pytest.approx(1 - 100 * rate, rel=1e-4)
    assert model.weight.item() == unit.master.to(torch.bfloat16).item()


def test_weight_decay_acts_on_master_weights() -> None:
    """0.9999 ** 1000 = 0.904833; in bfloat16 alone it would stay 1."""
    # MP-02
    model = nn.Linear(1, 1, bias=False)
    unit = unit_of(model, torch.bfloat16)
    unit.master.fill_(1.0)
    optimizer = adamw(unit, OptimizerSection(learning_rate=1e-3, weight_decay=0.1))
    for _ in range(1000):
        optimizer.step()
    assert unit.master.item() == pytest.approx(0.904833, rel=1e-4)


def test_the_norm_is_over_all_units_and_clipping_scales_all() -> None:
    """Units with norms 3 and 4: norm 5, every gradient scaled by 1/5, not by 1/3 and 1/4."""
    units = [unit_of(nn.Linear(2, 1, bias=False)), unit_of(nn.Linear(2, 1, bias=False))]
    units[0].gradient.copy_(torch.tensor([3.0, 0.0]))
    units[1].gradient.copy_(torch.tensor([0.0, 4.0]))
    assert gradient_norm(units, ALONE.fsdp) == 5.0
    clip_(units, norm=5.0, max_norm=1.0)
    torch.testing.assert_close(units[0].gradient, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(units[1].gradient, torch.tensor([0.0, 0.8]))
    clip_(units, norm=1.0, max_norm=1.0)
    torch.testing.assert_close(units[1].gradient, torch.tensor([0.0, 0.8]))


def test_the_norm_of_a_large_unit_is_exact() -> None:
    """One float32 sum over these 4 million squares would be off by 1e-4."""
    unit = unit_of(nn.Linear(2000, 2001, bias=False))
    unit.gradient.copy_(torch.randn(unit.gradient.shape, generator=torch.Generator().manual_seed(0)))
    expected = float(unit.gradient.double().square().sum().sqrt())
    assert gradient_norm([unit, unit], ALONE.fsdp) == pytest.approx(expected * 2**0.5, rel=1e-7)


def test_large_gradients_have_a_finite_norm() -> None:
    """The square of 1e20 overflows float32; its norm does not."""
    unit = unit_of(nn.Linear(2, 2, bias=False))
    unit.gradient.fill_(1e20)
    assert gradient_norm([unit], ALONE.fsdp) == pytest.approx(2e20, rel=1e-6)
    unit.gradient[0] = float("inf")
    assert gradient_norm([unit], ALONE.fsdp) == float("inf")


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    unit = unit_of(nn.Linear(2, 2, bias=False))
    unit.master.fill_(1.0)
    optimizer = adamw(unit, OptimizerSection(learning_rate=0.1))
    update = Update(Some([unit]), [optimizer], clip_norm=1.0)
    update.learning_rate = 0.1
    for gradient, loss in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)):
        unit.gradient.fill_(gradient)
        update(torch.tensor(loss))
        assert torch.equal(unit.master, torch.ones_like(unit.master))
    unit.gradient.fill_(1.0)
    update(torch.tensor(1.0))
    assert update.norm == 2.0
    assert not torch.equal(unit.master, torch.ones_like(unit.master))


def seen_from(rank: int, size: int) -> Axis:
    """A place on the fsdp axis that nobody talks to."""
    return Axis("fsdp", size, rank, tuple(range(size)), None)


@pytest.mark.parametrize("option", [None, "zero1", "zero2"])
def test_an_optimizer_holds_the_rank_s_pieces_alone(option: str | None) -> None:
    """14 elements in flat pieces of 5: the matrix's 6 decay, on two ranks; norms and bias do not."""
    # FS-11
    sizes = []
    for rank in range(3):
        unit = unit_of(Small(), how="flat", placement=PLACEMENTS[option], shards=seen_from(rank, 3))
        owned = owned_parameters([unit])
        assert owned.matrices == []
        sizes.append(([len(p) for p in owned.decayed], [len(p) for p in owned.plain]))
        optimizer = adamw(unit, OptimizerSection(learning_rate=0.1, weight_decay=0.1))
        unit.master.fill_(1.0)
        unit.summed.zero_()
        optimizer.step()
        assert unit.master.tolist() == pytest.approx(
            [0.99] * unit.num_decayed + [1.0] * (unit.counts[rank] - unit.num_decayed)
        )
        moments = [
            state[key].numel() for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
        ]
        assert sum(moments) == 2 * unit.counts[rank]
    assert sizes == [([5], []), ([1], [4]), ([], [5])]


@pytest.mark.parametrize("how", ["matrices", "rows", "flat"])
def test_what_owners_do_is_what_one_process_does(how: str) -> None:
    """AdamW on pieces, put together, moves every weight as AdamW on whole parameters does."""
    spec = OptimizerSection(learning_rate=1e-2, weight_decay=0.3)
    whole = unit_of(Small(), how="flat")
    initial = {name: torch.randn(view.shape) for name, view in whole.named(whole.master)}
    for name, view in whole.named(whole.master):
        view.copy_(initial[name])
    alone = adamw(whole, spec)
    owners = [
        unit_of(Small(), how=how, placement=PLACEMENTS[None], shards=seen_from(rank, 4)) for rank in range(4)
    ]
    for unit in owners:
        for owned in unit.owned:
            length = owned.part.stop - owned.part.start
            unit.master[owned.part] = initial[owned.name].flatten()[owned.first : owned.first + length]
    theirs = [optimizers(Some([unit]), spec) for unit in owners]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        gradients = {
            name: torch.randn(view.shape, generator=generator) for name, view in whole.named(whole.gradient)
        }
        for name, view in whole.named(whole.gradient):
            view.copy_(gradients[name])
        alone.step()
        for unit, several in zip(owners, theirs, strict=True):
            for owned in unit.owned:
                length = owned.part.stop - owned.part.start
                unit.summed[owned.part] = gradients[owned.name].flatten()[owned.first : owned.first + length]
            for optimizer in several:
                optimizer.step()
    moved = dict(whole.named(whole.master))
    for unit in owners:
        for owned in unit.owned:
            length = owned.part.stop - owned.part.start
            expected = moved[owned.name].flatten()[owned.first : owned.first + length]
            torch.testing.assert_close(unit.master[owned.part], expected)


def test_a_rank_without_elements_has_no_optimizer() -> None:
    """More ranks than rows."""
    # FS-02
    unit = unit_of(nn.Linear(2, 1, bias=False), placement=PLACEMENTS[None], shards=seen_from(0, 3))
    assert unit.counts[0] == 0
    assert optimizers(Some([unit]), OptimizerSection(learning_rate=0.1)) == []
    assert gradient_norm([unit], ALONE.fsdp) == 0.0
    clip_([unit], norm=2.0, max_norm=1.0)


def test_frozen_units_are_left_alone() -> None:
    frozen, trained = unit_of(Small().requires_grad_(False)), unit_of(nn.Linear(2, 1, bias=False))
    frozen.master.fill_(1.0)
    trained.gradient.copy_(torch.tensor([3.0, 4.0]))
    units = [frozen, trained]
    assert gradient_norm(units, ALONE.fsdp) == 5.0
    clip_(units, norm=5.0, max_norm=1.0)
    torch.testing.assert_close(trained.gradient, torch.tensor([0.6, 0.8]))
    [optimizer] = optimizers(Some(units), OptimizerSection(learning_rate=0.1, weight_decay=0.1))
    optimizer.step()
    assert torch.equal(frozen.master, torch.ones_like(frozen.master))


def test_matrices_are_found_by_name_and_must_be_whole() -> None:
    """Norm, matrix and bias: the matrix in its shape, the rest as flat runs, each element once."""
    unit = unit_of(Small())
    owned = owned_parameters([unit], matrices=frozenset({"linear.weight"}))
    assert [tuple(p.shape) for p in owned.matrices] == [(2, 3)]
    assert owned.decayed == []
    assert [len(p) for p in owned.plain] == [8]
    addresses = [p.data_ptr() for p in (*owned.matrices, *owned.plain)]
    assert addresses[0] == unit.master.data_ptr()
    assert all(p.grad is not None for p in (*owned.matrices, *owned.plain))
    part = unit_of(Small(), how="flat", placement=PLACEMENTS[None], shards=seen_from(0, 3))
    with pytest.raises(
        UserError, match=r"a part of linear\.weight .*: use sharding\.pieces = 'blocks' or 'mat"
    ):
        owned_parameters([part], matrices=frozenset({"linear.weight"}))


def norm_and_clipped_by_a_rank(layout: str, how: str) -> tuple[float, list[float]]:
    """The gradient 1, 2, ..., 14 as a sum over ranks, cut over the fsdp axis."""
    mesh = Mesh(Layout.parse(layout))
    unit = unit_of(Small(), how=how, placement=mesh.layout.placement, shards=mesh.fsdp, replicas=mesh.dp)
    unit.begin_step_()
    unit.take_gradient_()
    unit.gradient[:14] = torch.arange(1.0, 15.0) / mesh.batch.size
    unit.finish_reduce_(unit.reduce().wait())
    if mesh.dp.size > 1 and mesh.fsdp.size > 1:
        unit.all_reduce().wait()
    norm = gradient_norm([unit], mesh.fsdp)
    clip_([unit], norm=norm, max_norm=1.0)
    return norm, unit.whole(unit.summed)[:14].tolist()


@pytest.mark.parametrize("how", ["matrices", "rows", "flat"])
@pytest.mark.parametrize("layout", ["dp2", "fsdp3", "fsdp3:zero1", "fsdp3:zero2", "dp2,fsdp2"])
def test_each_element_counts_once_in_the_norm(ranks: RankPool, layout: str, how: str) -> None:
    """Not once a rank or a replica, and all ranks clip by the same factor."""
    expected = math.sqrt(sum(index**2 for index in range(1, 15)))
    results = ranks(Layout.parse(layout).world_size, norm_and_clipped_by_a_rank, layout, how)
    assert len({norm for norm, _ in results}) == 1
    for norm, clipped in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx([(index + 1) / expected for index in range(14)], rel=1e-6)


def decisions_of_a_rank() -> list[bool]:
    """Rank 1 alone has a gradient that is not finite: no rank moves."""
    mesh = Mesh(Layout(fsdp=2))
    unit = unit_of(Small(), placement=PLACEMENTS["zero1"], shards=mesh.fsdp)
    unit.master.fill_(1.0)
    update = Update(
        Some([unit], mesh), optimizers(Some([unit]), OptimizerSection(learning_rate=0.1)), clip_norm=1.0
    )
    update.learning_rate = 0.1
    moved = []
    for gradient in (math.nan, math.inf, 1.0):
        unit.summed.fill_(gradient if mesh.rank == 1 else 1.0)
        update(torch.tensor(1.0))
        moved.append(not torch.equal(unit.master, torch.ones_like(unit.master)))
    return moved


def test_ranks_decide_together_whether_a_step_is_finite(ranks: RankPool) -> None:
    assert ranks(2, decisions_of_a_rank) == [[False, False, True]] * 2
