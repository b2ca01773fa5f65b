import copy
import io

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fourfold.flops import attended_pairs, model_flops
from fourfold.initialize import initialize_, whole
from fourfold.models import IGNORE, Decoder, Microbatch
from fourfold.models.norm import RMSNorm
from fourfold.specs import ModelSpec
from tests.models.packing import pack

NAMES = ["tiny", "tiny-qwen2", "tiny-qwen3"]


def decoder(spec, dtype=torch.float64):
    """A model in which every parameter matters: no zero biases, no norm weights of 1."""
    model = Decoder(spec).double()
    initialize_(whole(dict(model.named_parameters())), model, seed=0, std=0.2)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return model.to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_spec_in_its_order(name):
    spec = ModelSpec.preset(name)
    model = Decoder(spec)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(shapes.items()) == list(spec.parameter_shapes().items())
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters
    assert list(model.buffers()) == []
    assert {type(m) for m in model.modules() if m._parameters} == {
        torch.nn.Linear,
        torch.nn.Embedding,
        RMSNorm,
    }


@pytest.mark.parametrize("name", NAMES)
def test_pieces_one_after_the_other_are_the_model(name):
    spec = ModelSpec.preset(name)
    model, batch = decoder(spec), pack(((7, 5), (12,)), spec.vocab_size)
    model.loss_sum(batch).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = model.loss_sum(batch).item()
    model.zero_grad()
    pieces = model.pieces()
    assert [piece.name for piece in pieces] == ["embed", "layer.0", "layer.1", "layer.2", "layer.3", "head"]
    x = None
    for piece in pieces:
        x = piece.forward(x, batch)
    x.backward()
    assert x.item() == whole
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name
    held = [parameter for piece in pieces for module in piece.modules for parameter in module.parameters()]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}


def test_loss_is_the_sum_over_the_valid_tokens():
    spec = ModelSpec.preset("tiny")
    model, batch = decoder(spec), pack(((7, 5), (12,)), spec.vocab_size)
    log_p = model(batch).log_softmax(-1)
    terms = [
        -log_p[row, column, label]
        for row, labels in enumerate(batch.labels_BS.tolist())
        for column, label in enumerate(labels)
        if label != IGNORE
    ]
    assert len(terms) == 24 - 3
    assert model.loss_sum(batch).item() == pytest.approx(sum(terms).item(), rel=1e-13)


@pytest.mark.parametrize("window", [None, 2])
def test_packed_documents_are_as_if_alone(window):
    # DATA-10
    spec = ModelSpec.preset("tiny").replace({"sliding_window": window})
    model = decoder(spec)
    both = pack(((3, 5),), spec.vocab_size)
    a = Microbatch(both.input_ids_BS[:, :3], both.labels_BS[:, :3], both.position_ids_BS[:, :3], ((3,),))
    b = Microbatch(both.input_ids_BS[:, 3:], both.labels_BS[:, 3:], both.position_ids_BS[:, 3:], ((5,),))
    logits = model(both)
    torch.testing.assert_close(logits[:, :3], model(a), rtol=0, atol=1e-13)
    torch.testing.assert_close(logits[:, 3:], model(b), rtol=0, atol=1e-13)
    total = (model.loss_sum(a) + model.loss_sum(b)).item()
    assert model.loss_sum(both).item() == pytest.approx(total, rel=1e-13)
    both.input_ids_BS[:, :3] = (both.input_ids_BS[:, :3] + 1) % spec.vocab_size
    changed = model(both)
    assert torch.equal(changed[:, 3:], logits[:, 3:])
    assert not torch.allclose(changed[:, :3], logits[:, :3])


def test_attention_is_called_through_one_replaceable_place():
    spec = ModelSpec.preset("tiny")
    model, batch = decoder(spec), pack(((4, 8),), spec.vocab_size)
    calls = []
    for layer in model.model.layers:
        original = layer.self_attn.attend

        def attend(q, k, v, *, original=original, **options):
            calls.append((q.shape, k.shape, v.shape, options))
            return original(q, k, v, **options)

        layer.self_attn.attend = attend
    model.loss_sum(batch).backward()
    options = {"documents": ((4, 8),), "window": None, "scale": 0.25}
    assert calls == [((1, 12, 8, 16), (1, 12, 4, 16), (1, 12, 4, 16), options)] * spec.num_hidden_layers


@pytest.mark.parametrize("name", NAMES)
def test_a_model_from_the_meta_device_is_the_same_model(name, monkeypatch):
    spec = ModelSpec.preset(name)
    batch = pack(((7, 5),), spec.vocab_size)
    direct = Decoder(spec)
    initialize_(whole(dict(direct.named_parameters())), direct, seed=3, std=0.2)
    with torch.device("meta"):
        model = Decoder(spec)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    empty_like = torch.empty_like
    # What nobody writes to is NaN, not whatever lay in memory.
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(torch.nan)
    )
    model.to_empty(device="cpu")
    assert all(parameter.isnan().all() for parameter in model.parameters())
    if spec.tie_word_embeddings:
        with pytest.raises(RuntimeError, match="not tied any more"):
            model(batch)
        model.lm_head.weight = model.model.embed_tokens.weight
    initialize_(whole(dict(model.named_parameters())), model, seed=3, std=0.2)
    assert torch.equal(model(batch), direct(batch))


def test_a_tied_head_stays_tied_and_its_gradient_is_the_sum_of_both_uses():
    spec = ModelSpec.preset("tiny-qwen3")
    batch = pack(((7, 5),), spec.vocab_size)
    tied, untied = decoder(spec), decoder(spec.replace({"tie_word_embeddings": False}))
    untied.load_state_dict(tied.state_dict())
    tied.loss_sum(batch).backward()
    untied.loss_sum(batch).backward()
    both = untied.lm_head.weight.grad + untied.model.embed_tokens.weight.grad
    torch.testing.assert_close(tied.lm_head.weight.grad, both, rtol=0, atol=1e-13)
    for moved in (tied.float(), copy.deepcopy(tied), tied.to(torch.bfloat16)):
        assert moved.lm_head.weight is moved.model.embed_tokens.weight


def test_dtypes():
    spec = ModelSpec.preset("tiny-qwen3")
    batch = pack(((7, 5),), spec.vocab_size)
    exact = decoder(spec, torch.float64)
    expected, loss = exact(batch), exact.loss_sum(batch).item()
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 5e-2)):
        model = decoder(spec, dtype)
        assert model(batch).dtype == dtype
        difference = (model(batch).double() - expected).norm() / expected.norm()
        assert difference < error
        assert model.loss_sum(batch).dtype == torch.float32
        assert model.loss_sum(batch).item() == pytest.approx(loss, rel=error)


def test_saved_whole_and_loaded():
    spec = ModelSpec.preset("tiny-qwen3")
    model, batch = decoder(spec), pack(((7, 5),), spec.vocab_size)
    expected, file = model(batch), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(batch), expected)


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_those_that_torch_counts(name):
    spec = ModelSpec.preset(name)
    B, S = 3, 20
    model, batch = Decoder(spec), pack(((S,),) * B, spec.vocab_size)
    # torch counts nothing for the fused CPU kernel, and the whole square for attention by matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.loss_sum(batch).backward()
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    per_pair = 3 * B * spec.num_hidden_layers * 4 * spec.num_attention_heads * spec.head_dim
    assert counted.pop("aten.bmm") == per_pair * S * S
    assert sum(counted.values()) == model_flops(spec, batch=B, sequence_length=S) - per_pair * attended_pairs(
        S
    )
