"""A segment's explicit forward and backward, on a piece small enough to work out by hand."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from fourfold.models import Microbatch, Piece
from fourfold.segment import Segment
from fourfold.weight_gradients import WeightGradients

BATCH = Microbatch(*(torch.zeros(1, 2, dtype=torch.int64) for _ in range(3)), documents=((2,),))
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
GRADIENT = torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, 1.0]])


def linear_segment() -> tuple[nn.Linear, WeightGradients, Segment]:
    """y = x W^T + b with W = [[1, 0], [0, 2], [3, 1]] and b = 10."""
    layer = nn.Linear(2, 3)
    layer.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]]))
    layer.bias.data.fill_(10.0)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight_gradients = WeightGradients()
    weight_gradients.attach_(layer)
    weight_gradients.begin_(list(layer.parameters()))

    def forward(x: Tensor | None, _: Microbatch) -> Tensor:
        assert x is not None
        return layer(x)

    return layer, weight_gradients, Segment(Piece("linear", (layer,), forward), weight_gradients)


def test_forward_and_backward() -> None:
    layer, _, segment = linear_segment()
    y = segment.forward(0, X, BATCH)
    assert torch.equal(y, torch.tensor([[11.0, 14.0, 15.0], [13.0, 18.0, 23.0]]))
    assert not y.requires_grad
    assert torch.equal(segment.backward(0, GRADIENT), GRADIENT @ layer.weight)
    assert torch.equal(layer.weight.grad, GRADIENT.t() @ X)
    assert torch.equal(layer.bias.grad, torch.tensor([1.0, 1.0, 1.5]))


def test_the_input_stays_as_it_is() -> None:
    """The segment works on a leaf of its own: the tensor that was handed in gets no gradient and no flag."""
    _, _, segment = linear_segment()
    x = X.clone()
    segment.forward(0, x, BATCH)
    segment.backward(0, GRADIENT)
    assert not x.requires_grad
    assert x.grad is None
    assert torch.equal(x, X)


def test_input_gradient_now_weight_gradient_later() -> None:
    layer, _, segment = linear_segment()
    segment.forward(0, X, BATCH)
    assert torch.equal(segment.input_gradient(0, GRADIENT), GRADIENT @ layer.weight)
    assert torch.equal(layer.bias.grad, torch.zeros(3))
    assert torch.equal(layer.weight.grad, torch.zeros(3, 2))
    segment.weight_gradient(0)
    assert torch.equal(layer.weight.grad, GRADIENT.t() @ X)
    assert torch.equal(layer.bias.grad, torch.tensor([1.0, 1.0, 1.5]))


def test_microbatches_in_any_order() -> None:
    """Forward 0 1 2, backward 1, halves of 2 and 0 between each other: each with its own input."""
    layer, _, segment = linear_segment()
    for microbatch in range(3):
        segment.forward(microbatch, X * 10**microbatch, BATCH)
    segment.backward(1, GRADIENT)
    assert torch.equal(layer.weight.grad, GRADIENT.t() @ X * 10)
    segment.input_gradient(2, GRADIENT)
    segment.input_gradient(0, GRADIENT)
    segment.weight_gradient(2)
    assert torch.equal(layer.weight.grad, GRADIENT.t() @ X * 110)
    segment.weight_gradient(0)
    assert torch.equal(layer.weight.grad, GRADIENT.t() @ X * 111)
    assert torch.equal(layer.bias.grad, 3 * torch.tensor([1.0, 1.0, 1.5]))


def test_the_first_segment_has_no_input_gradient() -> None:
    embedding = nn.Embedding(4, 2)
    embedding.weight.grad = torch.zeros(4, 2)
    weight_gradients = WeightGradients()
    weight_gradients.attach_(embedding)
    weight_gradients.begin_(list(embedding.parameters()))
    segment = Segment(Piece("embed", (embedding,), lambda _, b: embedding(b.input_ids_BS)), weight_gradients)
    ids = torch.tensor([[3, 1]])
    batch = Microbatch(ids, ids, ids, ((2,),))
    for run in (segment.backward, segment.input_gradient):
        y = segment.forward(0, None, batch)
        assert run(0, torch.ones_like(y)) is None
    segment.weight_gradient(0)
    assert torch.equal(embedding.weight.grad, 2 * torch.tensor([[0.0, 0], [1, 1], [0, 0], [1, 1]]))


@pytest.mark.parametrize("ending", ["backward", "halves", "reset", "reset between the halves"])
def test_nothing_is_kept_afterwards(ending: str) -> None:
    _, _, segment = linear_segment()
    kept: list[weakref.ref[nn.Module]] = []

    class Watched(nn.Module):
        """Stands for the activations: the graph of a microbatch holds it."""

    def remember(x: Tensor | None, batch: Microbatch) -> Tensor:
        watched = Watched()
        kept.append(weakref.ref(watched))
        y = inner(x, batch)
        y.register_hook(lambda gradient, watched=watched: None)
        return y

    inner, segment.piece.forward = segment.piece.forward, remember
    segment.forward(0, X, BATCH)
    gc.collect()
    assert kept[0]() is not None
    if ending == "backward":
        segment.backward(0, GRADIENT)
    elif ending == "halves":
        segment.input_gradient(0, GRADIENT)
        segment.weight_gradient(0)
    else:
        if ending == "reset between the halves":
            segment.input_gradient(0, GRADIENT)
        segment.reset()
    gc.collect()
    assert kept[0]() is None
    with pytest.raises(KeyError):
        segment.weight_gradient(0)
    with pytest.raises(KeyError):
        segment.backward(0, GRADIENT)


def test_a_backward_that_fails_in_the_first_half_ends_the_putting_off() -> None:
    """The next backward adds its weight gradients at once again."""
    layer, weight_gradients, segment = linear_segment()
    with pytest.raises(KeyError):
        segment.input_gradient(7, GRADIENT)
    segment.reset()
    weight_gradients.begin_(list(layer.parameters()))
    segment.forward(0, X, BATCH)
    segment.backward(0, GRADIENT)
    assert torch.equal(layer.weight.grad, GRADIENT.t() @ X)


def test_evaluation_keeps_nothing_and_gives_the_same() -> None:
    layer, _, segment = linear_segment()
    y = segment.evaluate(X, BATCH)
    assert not y.requires_grad
    assert torch.equal(y, segment.forward(0, X, BATCH))
    assert torch.equal(layer.weight.grad, torch.zeros(3, 2))
    segment.reset()
    segment.evaluate(X, BATCH)
    with pytest.raises(KeyError):
        segment.backward(0, GRADIENT)


def test_a_frozen_segment_has_nothing_to_add() -> None:
    """As the first one it has no gradient at all; above a trained one it passes the input gradient on."""
    layer, _, segment = linear_segment()
    layer.requires_grad_(False)
    layer.weight.grad = layer.bias.grad = None
    for halves in (False, True):
        segment.forward(0, X, BATCH)
        run = segment.input_gradient if halves else segment.backward
        input_gradient = run(0, GRADIENT)
        assert input_gradient is not None
        assert torch.equal(input_gradient, GRADIENT @ layer.weight)
        if halves:
            segment.weight_gradient(0)
    assert layer.weight.grad is None
    embedding = nn.Embedding(4, 2).requires_grad_(False)
    weight_gradients = WeightGradients()
    weight_gradients.attach_(embedding)
    first = Segment(Piece("embed", (embedding,), lambda _, b: embedding(b.input_ids_BS)), weight_gradients)
    ids = torch.tensor([[3, 1]])
    y = first.forward(0, None, Microbatch(ids, ids, ids, ((2,),)))
    assert first.backward(0, torch.ones_like(y)) is None
