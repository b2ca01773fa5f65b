import math

import pytest
import torch
from torch import nn

from fourfold.batch.units import Unit, parameter_sites
from fourfold.optimizer import Update, adamw, clip_, gradient_norm
from fourfold.specs import OptimizerSection


def unit_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> Unit:
    return Unit(
        "all",
        dict(model.named_parameters()),
        parameter_sites(model),
        dtype=dtype,
        master_dtype=torch.float32,
        device=torch.device("cpu"),
    )


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
    adamw([unit], OptimizerSection(learning_rate=0.1, weight_decay=0.1)).step()
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
    ours = adamw([unit], spec)
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
    model = nn.LayerNorm(1, bias=False)
    unit = unit_of(model, torch.bfloat16)
    unit.master.fill_(1.0)
    optimizer = adamw([unit], OptimizerSection(learning_rate=rate))
    for _ in range(100):
        unit.gradient.fill_(0.5)
        optimizer.step()
    unit.publish_()
    assert unit.master.item() == pytest.approx(1 - 100 * rate, rel=1e-4)
    assert model.weight.item() == unit.master.to(torch.bfloat16).item()


def test_weight_decay_acts_on_master_weights() -> None:
    """0.9999 ** 1000 = 0.904833; in bfloat16 alone it would stay 1."""
    model = nn.Linear(1, 1, bias=False)
    unit = unit_of(model, torch.bfloat16)
    unit.master.fill_(1.0)
    optimizer = adamw([unit], OptimizerSection(learning_rate=1e-3, weight_decay=0.1))
    for _ in range(1000):
        optimizer.step()
    assert unit.master.item() == pytest.approx(0.904833, rel=1e-4)


def test_the_norm_is_over_all_units_and_clipping_scales_all() -> None:
    """Units with norms 3 and 4: norm 5, every gradient scaled by 1/5, not by 1/3 and 1/4."""
    units = [unit_of(nn.Linear(2, 1, bias=False)), unit_of(nn.Linear(2, 1, bias=False))]
    units[0].gradient.copy_(torch.tensor([3.0, 0.0]))
    units[1].gradient.copy_(torch.tensor([0.0, 4.0]))
    assert gradient_norm(units) == 5.0
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
    assert gradient_norm([unit, unit]) == pytest.approx(expected * 2**0.5, rel=1e-7)


def test_large_gradients_have_a_finite_norm() -> None:
    """The square of 1e20 overflows float32; its norm does not."""
    unit = unit_of(nn.Linear(2, 2, bias=False))
    unit.gradient.fill_(1e20)
    assert gradient_norm([unit]) == pytest.approx(2e20, rel=1e-6)
    unit.gradient[0] = float("inf")
    assert gradient_norm([unit]) == float("inf")


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    unit = unit_of(nn.Linear(2, 2, bias=False))
    unit.master.fill_(1.0)
    update = Update([unit], adamw([unit], OptimizerSection(learning_rate=0.1)), clip_norm=1.0)
    update.learning_rate = 0.1
    for gradient, loss in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)):
        unit.gradient.fill_(gradient)
        update(torch.tensor(loss))
        assert torch.equal(unit.master, torch.ones_like(unit.master))
    unit.gradient.fill_(1.0)
    update(torch.tensor(1.0))
    assert update.norm == 2.0
    assert not torch.equal(unit.master, torch.ones_like(unit.master))
