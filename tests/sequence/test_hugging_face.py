"""Hugging Face's models on the Sequence axis train as on one process."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fourfold.collectives import all_reduce_
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.models.loss import cross_entropy_sum
from fourfold.sequence.hugging_face import context_parallel_
from fourfold.sharded_module import shard
from fourfold.specs import Layout
from tests.ranks import RankPool

KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
}
LENGTH = 13
PACKED = ((LENGTH,), (4, 9))
IMPORT_SECONDS = 200.0
"""What ranks get for their first test here: importing transformers takes a minute on a busy machine."""


def model_of(kind: str, **changes: Any) -> Any:
    """A model of two layers in float64."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
        off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | off | changes))).double()
    config_class, model_class = KINDS[kind]
    sizes = {
        "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    }  # fmt: skip
    if kind == "mistral":
        sizes["sliding_window"] = 5
    return model_class(config_class(**(sizes | changes))).double()


def batch_of(documents: tuple[tuple[int, ...], ...]) -> Microbatch:
    """Whole rows: random tokens, every fourth label left out, positions from 0 in each document."""
    tokens = torch.randint(61, (len(documents), LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = torch.where(tokens % 4 == 0, -100, tokens)[:, 1:]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    return Microbatch(tokens[:, :-1], labels, positions, documents)


def on_one_process(model: Any, batch: Microbatch) -> tuple[float, dict[str, Tensor]]:
    """The sum of the losses and all gradients, with the model's own attention, one document at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(batch.documents):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            logits_BSV = model(input_ids=batch.input_ids_BS[row : row + 1, part], use_cache=False).logits
            total = total + torch.nn.functional.cross_entropy(
                logits_BSV[0], batch.labels_BS[row, part], reduction="sum"
            )
            start += length
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters()}


def on_a_rank(kind: str, layout: str, batch: Microbatch) -> tuple[float, dict[str, Tensor]]:
    """The same over the ranks of cp, gradients summed as in data parallelism."""
    mesh = Mesh(Layout.parse(layout))
    model = model_of(kind)
    context = context_parallel_(model, mesh)
    logits_BSV = model(**context.inputs(batch)).logits
    loss = cross_entropy_sum(logits_BSV, context.own(batch).labels_BS)
    loss.backward()
    for parameter in model.parameters():
        all_reduce_(parameter.grad, mesh.cp)
    total = all_reduce_(loss.detach().clone(), mesh.cp)
    return float(total), {name: p.grad for name, p in model.named_parameters()}


def check_equal(kind: str, found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]):
    # Their RMSNorm rounds to float32 on the way, where two sums that differ in the last bit may part.
    tolerance = 1e-12 if kind == "gpt2" else 1e-6
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).abs().max() / gradient.abs().max()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("layout", ["cp2:ring", "cp2:ulysses"])
def test_loss_and_all_gradients_as_on_one_process(ranks: RankPool, kind: str, layout: str) -> None:
    """One document and packed ones, a length that the ranks do not divide; Mistral's with its window."""
    batch = batch_of(PACKED)
    expected = on_one_process(model_of(kind), batch)
    for found in ranks(2, on_a_rank, kind, layout, batch, limit_seconds=IMPORT_SECONDS):
        check_equal(kind, found, expected)


def sharded_on_a_rank(layout: str, batch: Microbatch) -> tuple[float, float, dict[str, Tensor]]:
    """The gradient's norm, the loss after a step of SGD on the pieces, and the weights after it."""
    mesh = Mesh(Layout.parse(layout))
    model = model_of("llama")
    context = context_parallel_(model, mesh)
    sharded = shard(model, blocks=list(model.model.layers), mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = cross_entropy_sum(model(**context.inputs(batch)).logits, context.own(batch).labels_BS)
        losses.append(float(all_reduce_(loss.detach().clone(), mesh.cp)))
        loss.backward()
        sharded.reduce_gradients()
        norm = sharded.gradient_norm()
        if len(losses) == 1:
            first = norm
            optimizer.step()
    return first, losses[1], sharded.state_dict()


@pytest.mark.parametrize("layout", ["cp2:ring", "fsdp2,cp2:ring"])
def test_shard_sums_over_the_ranks_of_cp(ranks: RankPool, layout: str) -> None:
    """With fsdp the pieces are over both axes. Its ranks see the same rows here: each token counts twice."""
    batch = batch_of(PACKED)
    times = 2 if "fsdp2" in layout else 1
    model = model_of("llama")
    on_one_process(model, batch)
    norm = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()) * times
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1 * times)
            parameter.grad = None
    loss, _ = on_one_process(model, batch)
    for found_norm, found_loss, weights in ranks(
        2 * times, sharded_on_a_rank, layout, batch, limit_seconds=IMPORT_SECONDS
    ):
        assert found_norm == pytest.approx(norm, rel=1e-6)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-6)


def refusal(model: Any) -> str:
    with pytest.raises(UserError) as caught:
        context_parallel_(model, Mesh(Layout()))
    return str(caught.value)


def test_what_cannot_be_cut_is_refused() -> None:
    # CP-17
    assert "Linear is no model of Hugging Face" in refusal(torch.nn.Linear(2, 2))
    config = transformers.MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=2)
    assert "model_type='mamba'" in refusal(transformers.MambaForCausalLM(config))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    message = refusal(model_of("llama", attention_dropout=0.1, rope_parameters=rope))
    assert "attention_dropout=0.1: which attention weights are dropped would depend on the layout" in message
    assert "rope_type='dynamic' follows the longest position of a call" in message


def test_other_heads_and_other_orders_are_refused() -> None:
    # CP-17
    message = refusal(model_of("llama", is_causal=False))
    assert "is_causal=False: attention over the ranks of cp is causal here" in message
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    message = refusal(transformers.LlamaForSequenceClassification(config))
    assert "LlamaForSequenceClassification looks for certain tokens of a row" in message
    assert "use LlamaModel or LlamaForCausalLM" in message
    assert "use GPT2Model or GPT2LMHeadModel" in refusal(
        transformers.GPT2DoubleHeadsModel(model_of("gpt2").config)
    )


def test_labels_are_refused() -> None:
    """The model would shift them once more, among tokens that are no neighbours."""
    model = model_of("llama")
    context = context_parallel_(model, Mesh(Layout()))
    batch = batch_of(PACKED)
    with pytest.raises(UserError, match="shifted inside of the model"):
        model(**context.inputs(batch), labels=batch.labels_BS)


def test_a_call_without_the_batch_is_refused() -> None:
    # CP-11
    model = model_of("llama")
    context = context_parallel_(model, Mesh(Layout()))
    batch = batch_of(PACKED)
    with pytest.raises(UserError, match=r"call it as model\(\*\*context\.inputs\(batch\)\)"):
        model(batch.input_ids_BS)
    with pytest.raises(UserError, match="takes no attention_mask"):
        model(**context.inputs(batch), attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))


def heads_refused() -> str:
    with pytest.raises(UserError) as caught:
        context_parallel_(
            model_of("llama", hidden_size=18, num_attention_heads=3, num_key_value_heads=3),
            Mesh(Layout.parse("cp2:ulysses")),
        )
    return str(caught.value)


def unprepared() -> str:
    model = model_of("llama")
    with pytest.raises(UserError) as caught:
        shard(model, blocks=list(model.model.layers), mesh=Mesh(Layout(cp=2)))
    return str(caught.value)


def test_heads_that_ulysses_cannot_deal_and_modules_that_attend_alone_are_refused(ranks: RankPool) -> None:
    for message in ranks(2, heads_refused, limit_seconds=IMPORT_SECONDS):
        assert (
            "ulysses=2 does not divide the 3 query heads of a rank, and neither divides the 3 key/value "
            "heads of a rank nor is a multiple (Sequence axis): use cp2:ring"
        ) in message
    for message in ranks(2, unprepared):
        assert "cp=2 (Sequence axis): the module attends to this rank's tokens alone" in message
