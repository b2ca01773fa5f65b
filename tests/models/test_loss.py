import math

import pytest
import torch
import torch.nn.functional as F

from fourfold.errors import UserError
from fourfold.models.batch import IGNORE
from fourfold.models.loss import CHUNK_ELEMENTS, cross_entropy_sum


def test_a_uniform_guess_costs_the_logarithm_of_the_vocabulary():
    logits = torch.zeros(1, 3, 10, dtype=torch.float64)
    assert cross_entropy_sum(logits, torch.tensor([[9, IGNORE, IGNORE]])).item() == pytest.approx(
        2.302585093, abs=1e-9
    )
    assert cross_entropy_sum(logits, torch.tensor([[9, 0, IGNORE]])).item() == pytest.approx(2 * math.log(10))


@pytest.mark.parametrize("vocab_size", [11, CHUNK_ELEMENTS // 3])
def test_sum_and_gradient_over_many_chunks(vocab_size):
    # PLAN-03
    torch.manual_seed(0)
    tokens = 2 * (CHUNK_ELEMENTS // vocab_size) + 1
    logits = torch.randn(1, tokens, vocab_size, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(vocab_size, (1, tokens))
    labels[0, ::3] = IGNORE
    expected = F.cross_entropy(logits[0], labels[0], ignore_index=IGNORE, reduction="sum")
    (right,) = torch.autograd.grad(0.3 * expected, logits)
    loss = cross_entropy_sum(logits * 1, labels)
    (found,) = torch.autograd.grad(0.3 * loss, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-15)
    assert torch.count_nonzero(found[0, ::3]) == 0


def test_no_valid_label_is_a_loss_of_zero_with_a_gradient_of_zero():
    logits = torch.randn(1, 4, 7, requires_grad=True)
    loss = cross_entropy_sum(logits * 1, torch.full((1, 4), IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(1, 4, 7))


def test_bfloat16_logits_are_summed_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(1, 500, 32).bfloat16().requires_grad_()
    labels = torch.randint(32, (1, 500))
    loss = cross_entropy_sum(logits * 1, labels)
    loss.backward()
    high = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(high[0], labels[0], reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.double(), high.grad, rtol=2**-8, atol=1e-7)


def test_logits_stay_as_they_are_when_no_gradient_is_needed():
    logits = torch.randn(1, 4, 7)
    before = logits.clone()
    cross_entropy_sum(logits, torch.zeros(1, 4, dtype=torch.int64))
    assert torch.equal(logits, before)


def test_a_second_backward_is_an_error_and_not_a_wrong_number():
    logits = torch.randn(1, 4, 7, requires_grad=True)
    loss = cross_entropy_sum(logits * 1, torch.zeros(1, 4, dtype=torch.int64))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("label", [10, 11, 1 << 40, -1, -99, -101])
def test_a_label_outside_the_vocabulary_is_named(label):
    with pytest.raises(UserError, match=f"label {label} is outside the vocabulary: use 0 to 9, or -100"):
        cross_entropy_sum(torch.zeros(1, 2, 10), torch.tensor([[3, label]]))
