from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.models.swiglu import product_again, swiglu, swiglu_node


def found(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The output and the gradients of gate and up."""
    torch.manual_seed(0)
    gate, up, incoming = ((3 * torch.randn(64, 24)).to(dtype) for _ in range(3))
    given = (gate.requires_grad_(), up.requires_grad_())
    out = function(*given)
    return out, *torch.autograd.grad(out, given, incoming)


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_bits_as_without_a_function_of_its_own(dtype: torch.dtype) -> None:
    for ours, right in zip(found(swiglu, dtype), found(plain, dtype), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, right)


def test_the_product_is_made_again_from_the_tape() -> None:
    gate, up = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    product = swiglu(gate, up)
    assert torch.equal(product_again(swiglu_node(product)), product)
    expected = torch.autograd.grad(plain(gate, up), (gate, up), torch.ones(3, 8))
    gradients = torch.autograd.grad(product, (gate, up), torch.ones(3, 8))
    for found, right in zip(gradients, expected, strict=True):
        assert torch.equal(found, right)
    assert swiglu_node(gate * up) is None
    assert swiglu_node(gate) is None


def test_the_tape_holds_the_two_inputs_alone() -> None:
    """Autograd would keep silu(gate) as well."""
    gate, up = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        swiglu(gate, up)
    assert kept == [gate.data_ptr(), up.data_ptr()]
