"""Hugging Face transformers as the oracle: same weights, same names, same numbers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fourfold.initialize import initialize_, whole
from fourfold.models import Decoder
from fourfold.models.rope import attention_factor, inverse_frequencies
from fourfold.specs import ModelSpec, RopeScaling
from tests.models.packing import pack

# 8 query heads on 2 key/value heads: a mix-up of the two group sizes shows. head_dim is not hidden / heads.
SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
LENGTH = 48
PAIRS = 8
SCALINGS = {
    "linear": RopeScaling(rope_type="linear", factor=4.0),
    "dynamic": RopeScaling(rope_type="dynamic", factor=4.0),
    "llama3": RopeScaling(
        rope_type="llama3",
        factor=8.0,
        original_max_position_embeddings=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "yarn": RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
    "yarn-mscale": RopeScaling(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=4096,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=1.3,
        truncate=False,
    ),
    "yarn-steep": RopeScaling(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=4, attention_factor=1.1
    ),
    "longrope": RopeScaling(
        rope_type="longrope",
        factor=2.0,
        original_max_position_embeddings=32,
        short_factor=tuple(1.0 + i / 10 for i in range(PAIRS)),
        long_factor=tuple(2.0 + i for i in range(PAIRS)),
    ),
}


def spec_of(**fields):
    return ModelSpec(**{**SIZES, **fields})


def oracle(spec):
    """The model of transformers for this spec, every parameter random, its biases and norms too."""
    config = spec.to_config()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        spread = 0.3 if parameter.dim() > 1 else 0.5
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, spread, generator=generator)
    return model.eval()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-3}),
        ("Llama", {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}),
        ("Qwen2", {"attention_bias": True, "rope_theta": 1e6}),
        ("Qwen3", {"qk_norm": True, "head_dim": 16, "tie_word_embeddings": True}),
        ("Qwen3", {"qk_norm": True, "sliding_window": 7}),
        ("Mistral", {"sliding_window": 7}),
        ("Mistral", {"hidden_size": 20, "head_dim": 6, "sliding_window": None}),
    ],
)
def test_logits_and_gradients(family, fields):
    # HF-07
    spec = spec_of(**fields)
    model, theirs = Decoder(spec), oracle(spec)
    assert type(theirs).__name__ == f"{family}ForCausalLM"
    model.load_state_dict(theirs.state_dict(), strict=True)
    batch = pack(((LENGTH,),) * 2, spec.vocab_size)
    expected = theirs(input_ids=batch.input_ids_BS, use_cache=False).logits
    logits = model(batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    incoming = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) / LENGTH
    logits.backward(incoming)
    expected.backward(incoming)
    right = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        error = (parameter.grad - right[name].grad).norm() / right[name].grad.norm()
        assert error < 2e-5, name


@pytest.mark.parametrize(
    "fields", [{}, {"attention_bias": True}, {"qk_norm": True, "tie_word_embeddings": True}]
)
def test_weights_go_both_ways_bitwise(fields):
    spec = spec_of(**fields)
    model, theirs = Decoder(spec), oracle(spec)
    initialize_(whole(dict(model.named_parameters())), model, seed=1, std=0.3)
    sent = {name: value.clone() for name, value in model.state_dict().items()}
    theirs.load_state_dict(sent, strict=True)
    back = Decoder(spec)
    back.load_state_dict(theirs.state_dict(), strict=True)
    assert set(sent) == set(back.state_dict())
    for name, value in back.state_dict().items():
        assert torch.equal(value, sent[name]), name


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies(kind, dim):
    scaling = SCALINGS[kind]
    if kind == "longrope":
        repeats = dim // 2 // PAIRS
        scaling = scaling.model_copy(
            update={
                "short_factor": scaling.short_factor * repeats,
                "long_factor": scaling.long_factor * repeats,
            }
        )
    spec = spec_of(head_dim=dim, rope_theta=500000.0, rope_scaling=scaling)
    config = AutoConfig.for_model(**spec.to_config())
    for length in (1, 32, 33, 64, 65, 1000):
        theirs, factor = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, seq_len=length)
        found = inverse_frequencies(spec, lengths=torch.tensor(length))
        torch.testing.assert_close(found, theirs, rtol=3e-7, atol=0)
        assert attention_factor(spec) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("kind", SCALINGS)
def test_logits_with_each_kind_of_scaling(kind):
    # Beyond every original length, and beyond max_position_embeddings where the kind depends on that.
    length = 100 if kind == "dynamic" else LENGTH
    spec = spec_of(head_dim=16, rope_theta=500.0, rope_scaling=SCALINGS[kind])
    model, theirs = Decoder(spec), oracle(spec)
    model.load_state_dict(theirs.state_dict(), strict=True)
    batch = pack(((length,),), spec.vocab_size)
    with torch.no_grad():
        expected = theirs(input_ids=batch.input_ids_BS, use_cache=False).logits
        logits = model(batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_logits_at_position_3000_with_llama3_scaling():
    # HF-04
    spec = spec_of(
        head_dim=16,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        num_hidden_layers=1,
        rope_scaling=SCALINGS["llama3"],
    )
    model, theirs = Decoder(spec), oracle(spec)
    model.load_state_dict(theirs.state_dict(), strict=True)
    batch = pack(((32,),), spec.vocab_size)
    far = batch.position_ids_BS * 97  # the last one is 3007; only distances show in the logits
    batch.position_ids_BS.copy_(far)
    with torch.no_grad():
        # Without a mask transformers takes a jump in the positions for the start of another document.
        mask = torch.ones_like(far)
        expected = theirs(
            input_ids=batch.input_ids_BS, attention_mask=mask, position_ids=far, use_cache=False
        ).logits
        logits = model(batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
