"""Weight gradients in place are autograd's own, bit for bit, at once or deferred."""

import weakref

import pytest
import torch
from torch import nn

from fourfold.weight_gradients import WeightGradients


class Tied(nn.Module):
    """An embedding whose weight is also a linear layer's, two more linears, and a norm."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(torch.tanh(self.up(self.embed(ids))))))


def inputs(k: int) -> torch.Tensor:
    return torch.randint(13, (3, 5), generator=torch.Generator().manual_seed(k))


def output_gradient(k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, 5, 13, generator=torch.Generator().manual_seed(100 + k)).to(dtype)


def expected(dtype: torch.dtype, steps: list[int]) -> dict[str, torch.Tensor]:
    model = Tied(dtype)
    for k in steps:
        model(inputs(k)).backward(output_gradient(k, dtype))
    return {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def with_buffers(model: nn.Module, dtype: torch.dtype, fill: float) -> WeightGradients:
    for parameter in model.parameters():
        parameter.grad_dtype = dtype
        parameter.grad = torch.full_like(parameter, fill, dtype=dtype)
    sink = WeightGradients()
    sink.attach_(model)
    return sink


@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_are_autograds_own_bit_for_bit(deferred: bool) -> None:
    model = Tied(torch.float64)
    sink = with_buffers(model, torch.float64, fill=float("nan"))  # nothing of an earlier step may survive
    sink.begin_(list(model.parameters()))
    for k in (0, 1, 2):
        if deferred:
            with sink.deferred() as queue:
                model(inputs(k)).backward(output_gradient(k, torch.float64))
            assert len(queue) == 3
            sink.add_deferred_(queue)
        else:
            model(inputs(k)).backward(output_gradient(k, torch.float64))
    sink.finish_(list(model.parameters()))
    for name, gradient in expected(torch.float64, [0, 1, 2]).items():
        torch.testing.assert_close(
            dict(model.named_parameters())[name].grad, gradient, rtol=1e-14, atol=1e-14
        )


def test_deferring_and_not_deferring_agree_bit_for_bit() -> None:
    results = []
    for deferred in (False, True):
        model = Tied(torch.float32)
        sink = with_buffers(model, torch.float32, fill=0.0)
        sink.begin_(list(model.parameters()))
        for k in (0, 1):
            if deferred:
                with sink.deferred() as queue:
                    model(inputs(k)).backward(output_gradient(k, torch.float32))
                sink.add_deferred_(queue)
            else:
                model(inputs(k)).backward(output_gradient(k, torch.float32))
        results.append({name: p.grad for name, p in model.named_parameters() if name != "embed.weight"})
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name  # type: ignore[arg-type]


def test_an_unused_layer_has_gradient_zero_and_storage_stays() -> None:
    model = Tied(torch.float32)
    sink = with_buffers(model, torch.float32, fill=7.0)
    pointers = [p.grad.data_ptr() for p in model.parameters()]  # type: ignore[union-attr]
    sink.begin_(list(model.parameters()))
    model.up(torch.ones(2, 6)).sum().backward()
    sink.finish_(list(model.parameters()))
    assert torch.equal(model.down.weight.grad, torch.zeros(6, 10))  # type: ignore[arg-type]
    assert torch.equal(model.embed.weight.grad, torch.zeros(13, 6))  # type: ignore[arg-type]
    assert torch.equal(model.up.weight.grad, torch.full((10, 6), 2.0))  # type: ignore[arg-type]
    assert torch.equal(model.up.bias.grad, torch.full((10,), 2.0))  # type: ignore[arg-type]
    assert pointers == [p.grad.data_ptr() for p in model.parameters()]  # type: ignore[union-attr]


def test_bfloat16_contributions_add_up_in_float32() -> None:
    """512 contributions of 1: a bfloat16 sum would stop at 256."""
    layer = nn.Linear(1, 1, dtype=torch.bfloat16)
    sink = with_buffers(layer, torch.float32, fill=0.0)
    sink.begin_(list(layer.parameters()))
    for _ in range(512):
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).backward(torch.ones(1, 1, dtype=torch.bfloat16))
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert layer.weight.grad.item() == 512.0
    assert layer.bias.grad.item() == 512.0


def test_two_models_do_not_mix() -> None:
    first, second = Tied(torch.float32), Tied(torch.float32)
    sinks = [with_buffers(model, torch.float32, fill=0.0) for model in (first, second)]
    for sink, model in zip(sinks, (first, second), strict=True):
        sink.begin_(list(model.parameters()))
    with sinks[0].deferred() as queue:
        second(inputs(0)).backward(output_gradient(0, torch.float32))
        assert queue == []
    assert second.up.weight.grad is not None
    assert second.up.weight.grad.abs().sum() > 0


def test_units_begin_each_for_itself() -> None:
    """One layer starts anew while another goes on: only the first forgets."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.LayerNorm(1), nn.LayerNorm(1))
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    sink = with_buffers(model, torch.float32, fill=float("nan"))
    for index in (0, 1):
        sink.begin_(list(model[index].parameters()))
        sink.begin_(list(model[index + 2].parameters()))
    x = torch.ones(1, 1)
    for _ in range(2):
        for layer in model:
            layer(x).backward(x)
    sink.begin_([*model[0].parameters(), *model[2].parameters()])
    for layer in model:
        layer(x).backward(x)
    biases = [layer.bias.grad.item() for layer in model]
    assert biases == [1.0, 3.0, 1.0, 3.0]
    assert [model[index].weight.grad.item() for index in (0, 1)] == [1.0, 3.0]


@pytest.mark.parametrize("deferred", [False, True])
def test_frozen_weights_get_no_gradient_and_pass_it_on(deferred: bool) -> None:
    """Frozen layers in the middle and at the ends; the trained ones' gradients are autograd's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3))
    frozen = [model[0].weight, model[2].weight, model[2].bias, model[3].weight]
    for weight in frozen:
        weight.requires_grad_(False)
    ids = torch.tensor([1, 3, 3])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = torch.autograd.grad(model(ids).sum(), trained)
    sink = WeightGradients()
    sink.attach_(model)
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, torch.nan)
    sink.begin_(trained)
    if deferred:
        with sink.deferred() as queue:
            model(ids).sum().backward()
        assert len(queue) == 2  # the frozen linear layer in the middle asks for nothing
        sink.add_deferred_(queue)
    else:
        model(ids).sum().backward()
    assert all(weight.grad is None for weight in frozen)
    for parameter, expected_gradient in zip(trained, plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected_gradient)


def test_deferred_gradients_hold_no_graph() -> None:
    """A saved tensor that is not a leaf would hold the graph behind it, and with it the input's gradient."""
    model, sink = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), WeightGradients()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sink.attach_(model)
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = model(x)
    with sink.deferred() as queue:
        y.sum().backward()
    assert x.grad is not None
    gone = weakref.ref(x.grad.untyped_storage())
    del x, y
    assert len(queue) == 2
    assert gone() is None
