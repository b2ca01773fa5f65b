"""config.json in and out, held against transformers itself."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fourfold.errors import UserError
from fourfold.specs import PRESETS, ModelSpec

TINY = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "truncate": False},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 64, **LONGROPE},
}


def config(model_type: str = "llama", **changes: object) -> dict[str, object]:
    return {"model_type": model_type, **TINY, **changes}


def messages(content: object) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        ModelSpec.from_config(content)
    return caught.value.messages


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_absent_keys_mean_what_they_mean_to_transformers(model_type):
    sizes = {key: TINY[key] for key in TINY if key != "num_key_value_heads"}
    sizes["num_attention_heads"] = 32
    sizes["hidden_size"] = 192
    theirs = AutoConfig.for_model(model_type, **sizes)
    ours = ModelSpec.from_config({"model_type": model_type, **sizes})
    for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 192 // 32)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.initializer_range == theirs.initializer_range


@pytest.mark.parametrize(
    "spec",
    [
        *(
            PRESETS[name]
            for name in ("tiny", "tiny-qwen2", "tiny-qwen3", "mistral-7b", "llama3.1-8b", "qwen3-8b")
        ),
        PRESETS["tiny-qwen2"].replace({"sliding_window": 8}),
        PRESETS["tiny"].replace({"hidden_size": 30}),  # 4 heads do not divide it
    ],
)
def test_export_is_read_back_equal_and_has_transformers_parameters(spec):
    content = json.loads(json.dumps(spec.to_config()))
    assert ModelSpec.from_config(content) == spec
    theirs = AutoConfig.for_model(**content)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            theirs.__class__.from_dict({**content, "num_hidden_layers": 2})
        )
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    ours = spec.replace({"num_hidden_layers": 2}).parameter_shapes()
    assert list(ours.items()) == list(shapes.items())
    windows = {getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers}
    if content["model_type"] == "mistral":
        windows = {theirs.sliding_window}
    assert windows == {spec.sliding_window}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("scheme", ["type", "rope_type", "rope_parameters"])
def test_rope_scaling_in_every_scheme(kind, scheme):
    # HF-05
    numbers = SCALINGS[kind]
    if scheme == "rope_parameters":
        rope = {"rope_parameters": {"rope_type": kind, "rope_theta": 500000.0, **numbers}}
    else:
        rope = {"rope_theta": 500000.0, "rope_scaling": {scheme: kind, **numbers}}
    spec = ModelSpec.from_config(config(max_position_embeddings=256, **rope))
    assert spec.rope_theta == 500000.0
    assert spec.rope_scaling.to_config() == {"rope_type": kind, **numbers}
    assert ModelSpec.from_config(spec.to_config()) == spec
    theirs = AutoConfig.for_model(**spec.to_config()).rope_parameters
    assert theirs == {"rope_type": kind, "rope_theta": 500000.0, **numbers}


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_default_rope_is_no_scaling(rope):
    spec = ModelSpec.from_config(config(rope_theta=1234.0, **rope))
    assert (spec.rope_theta, spec.rope_scaling) == (1234.0, None)


def test_original_context_defaults_as_in_transformers():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    spec = ModelSpec.from_config(config(rope_scaling=llama3, max_position_embeddings=256))
    assert spec.rope_scaling.original_max_position_embeddings == 256
    phi = {"rope_type": "longrope", **LONGROPE}
    spec = ModelSpec.from_config(
        config(rope_scaling=phi, max_position_embeddings=256, original_max_position_embeddings=64)
    )
    assert (spec.rope_scaling.original_max_position_embeddings, spec.rope_scaling.factor) == (64, 4.0)


def test_biases_and_norms_follow_from_the_model_type():
    features = {
        model_type: (spec.attention_bias, spec.qk_norm)
        for model_type in ("llama", "mistral", "qwen2", "qwen3")
        for spec in [ModelSpec.from_config(config(model_type))]
    }
    assert features == {
        "llama": (False, False),
        "mistral": (False, False),
        "qwen2": (True, False),
        "qwen3": (False, True),
    }


def test_head_size_null_and_explicit():
    # HF-08
    assert ModelSpec.from_config(config(head_dim=None)).head_dim == 6
    assert ModelSpec.from_config(config(head_dim=16)).head_dim == 16


def test_sliding_window_of_qwen_is_off_unless_used():
    assert ModelSpec.from_config(config("qwen2", sliding_window=8)).sliding_window is None
    used = {"use_sliding_window": True, "sliding_window": 8}
    assert ModelSpec.from_config(config("qwen2", **used)).sliding_window is None  # max_window_layers=28
    assert ModelSpec.from_config(config("qwen2", **used, max_window_layers=0)).sliding_window == 8
    assert "max_window_layers" in messages(config("qwen2", **used, max_window_layers=1))[0]
    mixed = ["full_attention", "sliding_attention"]
    assert "layer_types" in messages(config("qwen3", **used, layer_types=mixed))[0]
    assert ModelSpec.from_config(config("mistral", sliding_window=None)).sliding_window is None


def test_what_cannot_be_kept_is_refused_all_at_once():
    found = messages(
        config(hidden_act="gelu", mlp_bias=True, attention_bias=True, attention_dropout=0.1, vocab_size=0)
    )
    assert found == (
        "config: hidden_act='gelu' is not supported: use 'silu'",
        "config: mlp_bias=true is not supported: use a model whose MLP has no biases",
        "config: attention_bias=true of a llama model puts a bias on o_proj too, which is not supported: "
        "use a model without it, or model_type='qwen2' where only q, k and v have one",
        "config: attention_dropout=0.1 is not supported: use 0",
        "config: vocab_size=0 is too small: use 1 or more",
    )
    assert messages(config("lama")) == (
        "config: model_type='lama' is not supported. Did you mean 'llama'? "
        "Use one of llama, mistral, qwen2 or qwen3",
    )
    assert "rope_type='su' is not supported" in messages(config(rope_scaling={"type": "su", "factor": 2}))[0]
    assert "unknown keys foo" in messages(config(rope_scaling={"type": "yarn", "factor": 2, "foo": 1}))[0]
    assert "partial_rotary_factor=0.5" in messages(config(partial_rotary_factor=0.5))[0]
    assert messages({"model_type": "llama", "vocab_size": 3})[0].startswith("config: hidden_size is missing")


def test_no_model_type_has_both_biases_and_norms():
    with pytest.raises(UserError, match="attention_bias=true with qk_norm=true"):
        PRESETS["tiny-qwen2"].replace({"qk_norm": True}).to_config()


def test_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config()))
    expected = ModelSpec.from_config(config())
    assert ModelSpec.from_config(tmp_path) == expected
    assert ModelSpec.from_config(str(tmp_path / "config.json")) == expected
    assert messages(tmp_path / "no") == (
        f"{tmp_path}/no does not exist: give a config.json or a folder that holds one",
    )
    (tmp_path / "bad.json").write_text('{"a": \n oops}')
    assert messages(tmp_path / "bad.json")[0].startswith(f"{tmp_path}/bad.json is not valid JSON: ")
    assert "line 2" in messages(tmp_path / "bad.json")[0]
    (tmp_path / "list.json").write_text("[1]")
    assert "holds no JSON object" in messages(tmp_path / "list.json")[0]
