"""The conjugate pairs: gradients of one stated scalar, by finite differences, on every rank.

The scalar is L = sum over what there is of (weight * tensor)^3 for each kind of tensor that a function
returns, counted as the convention says:

- replicated: one term, which every rank computes; each calls backward with gradient 1.
- shared: one term a rank, each with weights of its own; L is their sum.
- sharded: one term a rank, of its own part; L is their sum.

A finite difference moves one element of the input as the convention says what the input is: a replicated
element moves on all ranks at once, an element of a shard or of a summand on one rank only.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fourfold.collectives import all_reduce_, differentiable, record
from fourfold.mesh import Axis, Mesh
from fourfold.specs import Layout
from tests.collectives.axes import axis_of_all
from tests.ranks import RankPool

Function = Callable[[Tensor, Axis], Tensor]

SHAPE = (4, 12, 2)  # dims 0 and 1 divide among 2 ranks, dim 1 among 2, 3 and 4
STEP = 1e-4

# name -> (function, what its input is, what its result is)
FUNCTIONS: dict[str, tuple[Function, str, str]] = {
    "copy_to": (differentiable.copy_to, "replicated", "shared"),
    "reduce_from": (differentiable.reduce_from, "partial", "replicated"),
    "gather_from 0": (lambda x, axis: differentiable.gather_from(x, axis, dim=0), "sharded", "replicated"),
    "gather_from 1": (lambda x, axis: differentiable.gather_from(x, axis, dim=1), "sharded", "replicated"),
    "split_to 1": (lambda x, axis: differentiable.split_to(x, axis, dim=1), "replicated", "sharded"),
    "split_to -2": (lambda x, axis: differentiable.split_to(x, axis, dim=-2), "replicated", "sharded"),
    "all_gather 0": (lambda x, axis: differentiable.all_gather(x, axis, dim=0), "sharded", "shared"),
    "all_gather -1": (lambda x, axis: differentiable.all_gather(x, axis, dim=-1), "sharded", "shared"),
    "reduce_scatter 1": (
        lambda x, axis: differentiable.reduce_scatter(x, axis, dim=1),
        "partial",
        "sharded",
    ),
    "all_to_all 1 2": (
        lambda x, axis: differentiable.all_to_all(x, axis, split_dim=1, join_dim=2),
        "sharded",
        "sharded",
    ),
    "all_to_all 1 0": (
        lambda x, axis: differentiable.all_to_all(x, axis, split_dim=1, join_dim=0),
        "sharded",
        "sharded",
    ),
    "all_to_all 1 1": (
        lambda x, axis: differentiable.all_to_all(x, axis, split_dim=1, join_dim=1),
        "sharded",
        "sharded",
    ),
}


def random(shape: torch.Size | tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def input_of(kind: str, rank: int) -> Tensor:
    return random(SHAPE, 0 if kind == "replicated" else rank)


def term(y: Tensor, kind: str, axis: Axis) -> Tensor:
    """This rank's term of L, not linear and through a transposed view, so its gradient is strided."""
    weight = random(y.shape, 100 if kind == "replicated" else 100 + axis.rank)
    return (y.mT * weight.mT).pow(3).sum()


def scalar(x: Tensor, function: Function, kind: str, axis: Axis) -> float:
    """L, the same number on every rank."""
    with torch.no_grad():
        own = term(function(x, axis), kind, axis)
        return own.item() if kind == "replicated" else all_reduce_(own, axis).item()


def check_by_differences(name: str) -> float:
    """Return the largest error of the gradient against finite differences of L, over a few elements."""
    function, input_kind, output_kind = FUNCTIONS[name]
    axis = axis_of_all()
    x = input_of(input_kind, axis.rank).requires_grad_()
    term(function(x, axis), output_kind, axis).backward()
    assert x.grad is not None
    movers = [None] if input_kind == "replicated" else list(range(axis.size))
    worst = 0.0
    for mover in movers:
        for element in (0, 5, 38, 95):
            step = torch.zeros(x.numel(), dtype=torch.float64)
            if mover in (None, axis.rank):
                step[element] = STEP
            values = [
                scalar(x.detach() + sign * step.view(SHAPE), function, output_kind, axis) for sign in (1, -1)
            ]
            if mover in (None, axis.rank):
                difference = (values[0] - values[1]) / (2 * STEP)
                worst = max(worst, abs(x.grad.view(-1)[element].item() - difference))
    return worst / x.grad.abs().max().item()


def check_conjugates() -> None:
    """Each pair's backward is the other's forward, and two passes with double backward go through."""
    axis = axis_of_all()
    for dim in range(2):
        x = random((axis.size * 2, axis.size * 3), axis.rank).requires_grad_()
        y = differentiable.reduce_scatter(x, axis, dim=dim)
        gradient = random(y.shape, 50 + axis.rank)
        (result,) = torch.autograd.grad(y, x, gradient)
        assert torch.equal(result, differentiable.all_gather(gradient, axis, dim=dim))
        y = differentiable.all_gather(x, axis, dim=dim)
        gradient = random(y.shape, 50 + axis.rank)
        (result,) = torch.autograd.grad(y, x, gradient)
        assert torch.equal(result, differentiable.reduce_scatter(gradient, axis, dim=dim))
        whole = differentiable.copy_to(differentiable.gather_from(x, axis, dim=dim), axis)
        assert torch.equal(whole, y)


def case_of_strided_gradient() -> list[list[float]]:
    axis = axis_of_all()
    x = torch.full((2, 2), axis.rank + 1.0, requires_grad=True)
    joined = differentiable.all_gather(x, axis, dim=0)
    (joined.T * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def case_of_replicated_loss() -> list[float]:
    axis = axis_of_all()
    gradients = []
    for function in (differentiable.reduce_from, differentiable.copy_to):
        x = torch.tensor(1.0, requires_grad=True)
        function(x, axis).backward()
        assert x.grad is not None
        gradients.append(x.grad.item())
    return gradients


def inputs_and_gradients_stay() -> None:
    """Neither the input nor a gradient that others see may be changed."""
    axis = axis_of_all()
    x = torch.full((4,), axis.rank + 1.0, requires_grad=True)
    y = differentiable.reduce_from(x * 1, axis) + differentiable.copy_to(x, axis)
    gradient = torch.full((4,), 2.0**axis.rank)
    y.backward(gradient)
    assert x.tolist() == [axis.rank + 1.0] * 4
    assert gradient.tolist() == [2.0**axis.rank] * 4
    assert x.grad is not None
    assert x.grad.tolist() == [2.0**axis.rank + 2.0**axis.size - 1] * 4


def half_the_bytes() -> list[int]:
    axis = axis_of_all()
    with record() as events:
        differentiable.reduce_scatter(torch.ones(4, 6, requires_grad=True), axis, dim=1).sum().backward()
    return [event.bytes for event in events]


def refuse_misuse() -> None:
    axis = axis_of_all()
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"split_to on axis dp: 2 ranks do not divide dim 0 of \(3, 4\)"):
        differentiable.split_to(x, axis, dim=0)
    with pytest.raises(
        ValueError, match=r"reduce_scatter on axis dp: 2 ranks do not divide dim -2 of \(3, 4\)"
    ):
        differentiable.reduce_scatter(x, axis, dim=-2)
    with pytest.raises(ValueError, match=r"all_to_all on axis dp: 2 ranks do not divide dim 0 of \(3, 4\)"):
        differentiable.all_to_all(x, axis, split_dim=0, join_dim=1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_by_finite_differences(ranks: RankPool, name: str) -> None:
    assert max(ranks(3, check_by_differences, name)) < 1e-7


@pytest.mark.parametrize("world_size", [2, 4])
def test_backward_is_the_conjugate(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, check_conjugates)


def test_strided_gradient(ranks: RankPool) -> None:
    # COL-03
    # pytorch/pytorch#120386: torch's own all_gather gives [[2, 4], [2, 4]] and [[6, 8], [6, 8]].
    assert ranks(2, case_of_strided_gradient) == [[[2.0, 2.0], [4.0, 4.0]], [[6.0, 6.0], [8.0, 8.0]]]


def test_replicated_loss_counts_once(ranks: RankPool) -> None:
    # COL-04
    # pytorch/xla#2989: x = 1 on 4 ranks, loss = sum of x on every rank. Once: 1. A loss of each rank's own,
    # through copy_to: 4.
    assert ranks(4, case_of_replicated_loss) == [[1.0, 4.0]] * 4


def test_inputs_and_gradients_stay(ranks: RankPool) -> None:
    ranks(3, inputs_and_gradients_stay)


def test_one_collective_each_way(ranks: RankPool) -> None:
    assert ranks(2, half_the_bytes) == [[96, 96]] * 2


def test_misuse_is_refused(ranks: RankPool) -> None:
    ranks(2, refuse_misuse)


def test_axis_of_one_rank() -> None:
    axis = Mesh(Layout()).tp
    x = torch.ones(2, 3)
    for function, _, _ in FUNCTIONS.values():
        assert function(x, axis) is x
