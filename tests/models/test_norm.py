import pytest
import torch
import torch.nn.functional as F

from fourfold.models.norm import RMSNorm


@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 24), (2, 3, 4, 24), (24,)])
def test_equals_torch_with_all_gradients(shape):
    torch.manual_seed(0)
    norm = RMSNorm(24, 1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, expected = norm(x), F.rms_norm(x, (24,), norm.weight, 1e-3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    incoming = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, norm.weight), incoming)
    for gradient, right in zip(found, torch.autograd.grad(expected, (x, norm.weight), incoming), strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-13)


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    torch.manual_seed(0)
    x = (torch.randn(64, 512) * 100).bfloat16().requires_grad_()
    norm = RMSNorm(512, 1e-6).bfloat16()
    out = norm(x)
    x_high = x.detach().float().requires_grad_()
    expected = F.rms_norm(x_high, (512,), torch.ones(512), 1e-6)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    incoming = torch.randn_like(out)
    out.backward(incoming)
    expected.backward(incoming.float())
    # One rounding to 8 bits of the gradient, and nothing else.
    torch.testing.assert_close(x.grad.float(), x_high.grad, rtol=2**-8, atol=1e-6)


def test_no_gradient_for_a_frozen_weight_or_input():
    norm = RMSNorm(8, 1e-6)
    norm.weight.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    norm(x).sum().backward()
    assert norm.weight.grad is None
    assert x.grad is not None
