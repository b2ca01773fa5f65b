"""ModelSpec: derived values, every rule, shapes and published parameter counts."""

import math

import pytest

from fourfold.errors import UserError
from fourfold.specs import PRESETS, ModelSpec, RopeScaling

SIZES = {
    "vocab_size": 13,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}

# Of the published weights: a tied head is counted once.
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


def messages(**changes: object) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        ModelSpec(**{**SIZES, **changes})
    return caught.value.messages


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    assert ModelSpec.preset(name).num_parameters == PUBLISHED[name]


def test_small_presets_have_the_size_in_their_name():
    for name, millions in (("small-2m", 2), ("small-10m", 10), ("small-100m", 100)):
        assert math.isclose(PRESETS[name].num_parameters, millions * 1e6, rel_tol=0.06)


def test_tiny_presets_hide_no_mixed_up_dimension():
    for name in ("tiny", "tiny-qwen2", "tiny-qwen3"):
        spec = PRESETS[name]
        assert spec.head_dim != spec.hidden_size // spec.num_attention_heads
        assert spec.num_parameters < 90_000


def test_key_value_heads_and_head_size_are_derived():
    for absent in ({}, {"head_dim": None, "num_key_value_heads": None}):
        spec = ModelSpec(**SIZES, **absent)
        assert (spec.num_key_value_heads, spec.head_dim) == (4, 6)


def test_explicit_head_size_sets_the_projections():
    shapes = ModelSpec(
        **{**SIZES, "hidden_size": 2560, "num_attention_heads": 32}, head_dim=128
    ).parameter_shapes()
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4096, 2560)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (2560, 4096)


def test_shapes_of_every_feature_in_model_order():
    spec = ModelSpec(**SIZES, num_key_value_heads=2, head_dim=16, attention_bias=True, qk_norm=True)
    shapes = spec.parameter_shapes()
    assert next(iter(shapes)) == "model.embed_tokens.weight"
    assert list(shapes)[-2:] == ["model.norm.weight", "lm_head.weight"]
    layer = {name.removeprefix("model.layers.1."): shape for name, shape in shapes.items() if ".1." in name}
    assert layer == {
        "self_attn.q_proj.weight": (64, 24),
        "self_attn.q_proj.bias": (64,),
        "self_attn.k_proj.weight": (32, 24),
        "self_attn.k_proj.bias": (32,),
        "self_attn.v_proj.weight": (32, 24),
        "self_attn.v_proj.bias": (32,),
        "self_attn.o_proj.weight": (24, 64),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (40, 24),
        "mlp.up_proj.weight": (40, 24),
        "mlp.down_proj.weight": (24, 40),
        "input_layernorm.weight": (24,),
        "post_attention_layernorm.weight": (24,),
    }
    assert len(shapes) == 3 * len(layer) + 3
    assert shapes["lm_head.weight"] == (13, 24)


def test_tied_head_has_no_entry():
    tied = ModelSpec(**SIZES, tie_word_embeddings=True)
    assert "lm_head.weight" not in tied.parameter_shapes()
    assert ModelSpec(**SIZES).num_parameters - tied.num_parameters == 13 * 24


def test_all_wrong_values_in_one_error():
    found = messages(vocab_size=0, hidden_size="x", num_hidden_layers=2.5, hiden_size=1)
    assert found[:3] == (
        "vocab_size=0 is too small: use 1 or more",
        "hidden_size='x' must be a whole number",
        "num_hidden_layers=2.5 must be a whole number",
    )
    assert found[3].startswith("hiden_size is not a key here. Did you mean 'hidden_size'? Valid: ")


def test_rules_between_sizes_say_what_would_work():
    assert messages(num_attention_heads=5) == (
        "num_attention_heads=5 does not divide hidden_size=24: "
        "use num_attention_heads=1, 2, 3, 4, 6 or 8, or give head_dim",
    )
    assert messages(num_attention_heads=8, head_dim=15, num_key_value_heads=3) == (
        "num_key_value_heads=3 does not divide num_attention_heads=8: use num_key_value_heads=1, 2, 4 or 8",
        "head_dim=15 is odd, and rotary angles turn pairs of channels: use head_dim=14 or 16",
    )
    assert messages(hidden_size=12) == (
        "head_dim=3 is odd, and rotary angles turn pairs of channels: use head_dim=2 or 4",
    )


def test_rope_problems_join_the_others():
    found = messages(vocab_size=-1, rope_scaling={"rope_type": "lama3", "factor": 0.5})
    assert found == (
        "rope_scaling.rope_type='lama3' is not a choice: "
        "use 'linear', 'dynamic', 'llama3', 'yarn' or 'longrope'",
        "rope_scaling.factor=0.5 is too small: use 1.0 or more",
        "vocab_size=-1 is too small: use 1 or more",
    )


def test_rope_scaling_takes_only_the_fields_of_its_kind():
    with pytest.raises(UserError) as caught:
        RopeScaling(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=1, beta_fast=32)
    assert caught.value.messages == (
        "original_max_position_embeddings is missing: rope_type='llama3' needs it",
        "beta_fast is not used by rope_type='llama3': leave it out",
        "high_freq_factor=1.0 is not above low_freq_factor=4.0: use more than 4.0",
    )


def test_longrope_needs_a_factor_for_each_pair():
    scaling = {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.0, 1.5],
        "long_factor": [1.0, 2.0],
    }
    assert messages(rope_scaling=scaling) == ("rope_scaling.long_factor has 2 values, head_dim=6 needs 3",)


def test_replace_lets_derived_sizes_follow():
    spec = ModelSpec(**SIZES)
    wider = spec.replace({"hidden_size": 48, "num_attention_heads": 8})
    assert (wider.head_dim, wider.num_key_value_heads) == (6, 8)
    grouped = ModelSpec(**SIZES, num_key_value_heads=2, head_dim=16).replace({"hidden_size": 48})
    assert (grouped.head_dim, grouped.num_key_value_heads) == (16, 2)


def test_specs_are_frozen_values():
    assert ModelSpec(**SIZES) == ModelSpec(**SIZES, head_dim=6)
    assert len({ModelSpec(**SIZES), ModelSpec(**SIZES)}) == 1
    with pytest.raises(ValueError, match="frozen"):
        ModelSpec(**SIZES).vocab_size = 3


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"preset 'lama3-8b' does not exist. Did you mean 'llama3-8b'\?"):
        ModelSpec.preset("lama3-8b")
