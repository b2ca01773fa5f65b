"""The vocabulary-parallel loss and embedding."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.channel.cuts import vocabulary
from fourfold.channel.vocabulary import look_up_own_rows_, vocabulary_parallel_cross_entropy_sum
from fourfold.collectives import all_reduce_
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.models.loss import sum_over_chunks
from fourfold.specs import Layout
from tests.ranks import RankPool


def loss_on_a_rank(logits: Tensor, labels: Tensor, scale: float) -> tuple[float, Tensor]:
    """The loss, and the gradient of this rank's columns."""
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    ((first, stop),) = vocabulary((logits.shape[-1], 1), mesh.tp.size).runs[mesh.tp.rank]
    mine = logits[..., first:stop].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy_sum(
        mine * 1, labels, axis=mesh.tp, first=first, vocab_size=logits.shape[-1]
    )
    (loss * scale).backward()
    assert mine.grad is not None
    return float(loss.detach()), mine.grad


@pytest.mark.parametrize("ranks_of_tp", [2, 3, 4])
def test_the_loss_is_that_of_whole_logits(ranks: RankPool, ranks_of_tp: int) -> None:
    """Labels in each shard, none, uneven shards, logits far from zero: loss and every gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 13, generator=generator, dtype=torch.float64) * 30 - 200
    labels = torch.randint(13, (2, 9), generator=generator)
    labels[0, :3] = torch.tensor([0, 12, -100])
    labels[1] = torch.where(torch.arange(9) % 2 == 0, labels[1], -100)
    expected = logits.clone().requires_grad_()
    reference = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    (reference / 7).backward()
    found = ranks(ranks_of_tp, loss_on_a_rank, logits, labels, 1 / 7)
    assert len({loss for loss, _ in found}) == 1
    assert found[0][0] == pytest.approx(float(reference.detach()), rel=1e-14)
    # A log-sum-exp near 260 is rounded to 3e-14.
    torch.testing.assert_close(torch.cat([g for _, g in found], -1), expected.grad, rtol=0, atol=1e-14)


def test_no_column_is_padding(ranks: RankPool) -> None:
    """Ten equal logits on 4 ranks are ln 10, not ln 12 as with columns added for divisibility."""
    # TP-08
    for label in range(10):
        found = ranks(4, loss_on_a_rank, torch.zeros(1, 1, 10), torch.tensor([[label]]), 1.0)
        assert found[0][0] == pytest.approx(math.log(10), rel=1e-6)
        gradient = torch.cat([g for _, g in found], -1).flatten()
        torch.testing.assert_close(gradient, torch.full((10,), 0.1) - F.one_hot(torch.tensor(label), 10))


def test_a_rank_whose_tokens_are_all_ruled_out(ranks: RankPool) -> None:
    """Logits of -inf for all of a rank's tokens, in one row; in another for all but one token."""
    logits = torch.randn(1, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 3:] = -torch.inf
    logits[0, 1, 1:] = -torch.inf
    labels = torch.tensor([[2, 0, 5]])
    expected = logits.clone().requires_grad_()
    reference = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    reference.backward()
    found = ranks(2, loss_on_a_rank, logits, labels, 1.0)
    assert [loss for loss, _ in found] == pytest.approx([float(reference.detach())] * 2, rel=1e-14)
    torch.testing.assert_close(torch.cat([g for _, g in found], -1), expected.grad, rtol=0, atol=1e-15)


def test_nothing_to_predict(ranks: RankPool) -> None:
    found = ranks(2, loss_on_a_rank, torch.randn(1, 3, 6), torch.full((1, 3), -100), 1.0)
    assert [loss for loss, _ in found] == [0.0, 0.0]
    assert not any(gradient.any() for _, gradient in found)


def refused(label: int) -> str:
    with pytest.raises(UserError) as caught:
        loss_on_a_rank(torch.zeros(1, 1, 10), torch.tensor([[label]]), 1.0)
    return str(caught.value)


def test_a_label_outside_the_vocabulary_is_refused(ranks: RankPool) -> None:
    """It is in no rank's shard, so it would silently add the log-sum-exp alone."""
    for message in (*ranks(2, refused, 10), *ranks(2, refused, -1)):
        assert "is outside the vocabulary: use 0 to 9" in message


def looked_up(ids: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    ((first, stop),) = vocabulary(weight.shape, mesh.tp.size).runs[mesh.tp.rank]
    embedding = nn.Embedding.from_pretrained(weight.clone(), freeze=False, **options)
    embedding.weight = nn.Parameter(weight[first:stop].clone())
    look_up_own_rows_(embedding, first, vocab_size=len(weight))
    out = embedding(ids)
    out.backward(torch.ones_like(out))
    assert embedding.weight.grad is not None
    return all_reduce_(out.detach().clone(), mesh.tp), embedding.weight.grad.to_dense()


def test_the_rows_of_all_ranks_are_the_embedding(ranks: RankPool) -> None:
    ids = torch.tensor([[0, 4, 4, 6], [3, 2, 0, 6]])
    weight = torch.randn(7, 3)
    found = ranks(3, looked_up, ids, weight)
    for out, _ in found:
        assert torch.equal(out, weight[ids])
    counts = torch.cat([gradient for _, gradient in found])[:, 0]
    assert counts.tolist() == [2, 0, 1, 1, 2, 0, 2]


@pytest.mark.parametrize("padding", [0, 5, -3])
def test_padding_gets_no_gradient_and_what_lies_alike_on_other_ranks_does(
    ranks: RankPool, padding: int
) -> None:
    """Token 5 is row 1 of the third rank; -3 is token 4, its row 0. As one process, sparse gradients too."""
    ids = torch.arange(7).repeat(2, 1)
    found = ranks(3, looked_up, ids, torch.randn(7, 3), padding_idx=padding, sparse=padding == 5)
    counts = torch.cat([gradient for _, gradient in found])[:, 0]
    assert counts.tolist() == [0 if token == padding % 7 else 2 for token in range(7)]


def refused_token(token: int) -> str:
    with pytest.raises(UserError) as caught:
        looked_up(torch.tensor([[token]]), torch.randn(7, 3))
    return str(caught.value)


def test_a_token_outside_the_vocabulary_is_refused(ranks: RankPool) -> None:
    for message in (*ranks(2, refused_token, 7), *ranks(2, refused_token, -1)):
        assert "is outside the vocabulary: use 0 to 6" in message


def test_chunks_of_tokens_compute_what_one_does() -> None:
    """Loss and gradients in any number of chunks, with no more than one chunk's logits at a time."""
    torch.manual_seed(0)
    x, labels = torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(7, (2, 5))
    weight = torch.randn(7, 4, dtype=torch.float64)
    seen: list[int] = []

    def gradients(tokens: int) -> tuple[Tensor, ...]:
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()

        def loss_of(x_NC: Tensor, labels_N: Tensor) -> Tensor:
            seen.append(len(x_NC))
            return F.cross_entropy(x_NC @ inputs[1].t(), labels_N, reduction="sum")

        loss = sum_over_chunks(loss_of, inputs[0], labels, parameters=[inputs[1]], tokens=tokens)
        return (loss.detach(), *torch.autograd.grad(loss, inputs))

    whole = gradients(10)
    assert seen == [10]  # one chunk is not computed again
    for tokens, calls in ((4, [4, 4, 2, 4, 4]), (1, [1] * 19), (9, [9, 1, 9])):
        seen.clear()
        for found, expected in zip(gradients(tokens), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        assert seen == calls
