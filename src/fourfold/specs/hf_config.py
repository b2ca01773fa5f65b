"""Hugging Face's config.json to ModelSpec and back.

Whatever would change the mathematics and has no place in ModelSpec is refused, never ignored. Defaults of
absent keys are those of transformers, by model type.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.errors import UserError, choices, nearest
from fourfold.specs.model import ModelSpec
from fourfold.specs.rope import FIELDS, RopeScaling

# What transformers assumes when the key is absent, where it differs between model types.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Keys with the same name and meaning on both sides.
SHARED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)
ROPE_FIELDS = set(RopeScaling.model_fields)


def read_config(config: str | Path | Mapping[str, Any]) -> ModelSpec:
    """Read a config.json: its path, the folder that holds it, or its content.

    Raises ``UserError`` with every problem at once, each naming the file.
    """
    if isinstance(config, Mapping):
        origin, content = "config", dict(config)
    else:
        origin, content = _load(Path(config))
    model_type = content.get("model_type")
    if model_type not in DEFAULTS:
        near = nearest(str(model_type), DEFAULTS)
        raise UserError(
            f"{origin}: model_type={model_type!r} is not supported.{near} Use one of {choices(DEFAULTS)}"
        )
    problems = _unsupported(content, model_type)
    values = {**DEFAULTS[model_type], **content}
    fields = {key: values[key] for key in SHARED_KEYS if key in values}
    try:
        fields["sliding_window"] = _sliding_window(values, model_type)
        fields |= _rope(content, values["max_position_embeddings"])
    except UserError as error:
        problems += error.messages
    fields["attention_bias"] = model_type == "qwen2"
    fields["qk_norm"] = model_type == "qwen3"
    try:
        spec = ModelSpec.model_validate(fields)
    except UserError as error:
        problems += error.messages
    if problems:
        raise UserError(*(f"{origin}: {problem}" for problem in problems))
    return spec


def _load(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the file's name for messages, and its content."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: give a config.json or a folder that holds one") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object: give a Hugging Face config.json")
    return str(file), content


def _unsupported(content: Mapping[str, Any], model_type: str) -> list[str]:
    """Return one problem for each setting that ModelSpec has no place for."""
    problems = []
    activation = content.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        problems.append(f"hidden_act={activation!r} is not supported: use 'silu'")
    if content.get("mlp_bias"):
        problems.append("mlp_bias=true is not supported: use a model whose MLP has no biases")
    if model_type in ("llama", "qwen3") and content.get("attention_bias"):
        problems.append(
            f"attention_bias=true of a {model_type} model puts a bias on o_proj too, which is not supported: "
            "use a model without it, or model_type='qwen2' where only q, k and v have one"
        )
    if content.get("attention_dropout"):
        problems.append(f"attention_dropout={content['attention_dropout']} is not supported: use 0")
    if content.get("quantization_config"):
        problems.append("quantization_config is not supported: use the unquantized model")
    return problems


def _sliding_window(values: Mapping[str, Any], model_type: str) -> int | None:
    """Return the window of all layers. Raises ``UserError`` when layers differ."""
    window = None if model_type == "llama" else values["sliding_window"]
    if model_type in ("llama", "mistral"):
        return window
    layers = values.get("num_hidden_layers", 0)
    window = window if values.get("use_sliding_window", False) else None
    kinds = values.get("layer_types")
    if kinds is None:
        full = values.get("max_window_layers", 28) if window is not None else layers
        kinds = ["full_attention" if index < full else "sliding_attention" for index in range(layers)]
    if len(set(kinds)) > 1:
        raise UserError(
            "layers with and without a sliding window (layer_types, max_window_layers) are not supported: "
            "use max_window_layers=0 for all, or use_sliding_window=false for none"
        )
    return window if "sliding_attention" in kinds else None


def _rope(content: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling`` from the old scheme or the new one.

    Old: ``rope_scaling`` with 'type' or 'rope_type', and rope_theta at the top. New: ``rope_parameters``
    with rope_theta inside. Where both are present ``rope_scaling`` counts, as in transformers.
    """
    given = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise UserError(f"rope_scaling={given!r} must be an object")
    rope = {key: value for key, value in given.items() if value is not None}
    old_type = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_type)
    theta = rope.pop("rope_theta", content.get("rope_theta"))
    partial = rope.pop("partial_rotary_factor", content.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UserError(f"partial_rotary_factor={partial} is not supported: use 1")
    fields: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    if kind == "default":
        return fields
    if kind not in FIELDS:
        raise UserError(
            f"rope_type={kind!r} is not supported.{nearest(str(kind), FIELDS)} "
            f"Use {choices(['default', *FIELDS])}"
        )
    needed, optional = FIELDS[kind]
    unknown = sorted(rope.keys() - ROPE_FIELDS)
    if unknown:
        raise UserError(
            f"rope_scaling has unknown keys {', '.join(unknown)}: rope_type={kind!r} has "
            f"{', '.join(['factor', *needed, *optional])}"
        )
    # Fields of other kinds are left out: transformers does not read them either.
    scaling = {key: value for key, value in rope.items() if key in {"factor", *needed, *optional}}
    if "original_max_position_embeddings" in needed:
        # A value at the top of the file counts first, the context last: transformers' order.
        original = content.get("original_max_position_embeddings") or scaling.get(
            "original_max_position_embeddings", context
        )
        scaling["original_max_position_embeddings"] = original
        if kind in ("yarn", "longrope") and "factor" not in scaling:
            scaling["factor"] = max(1.0, context / original)
    fields["rope_scaling"] = {"rope_type": kind, **scaling}
    return fields


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json content that transformers and ``read_config`` read as this model.

    Raises ``UserError`` for a model that no Hugging Face model type describes.
    """
    if spec.attention_bias and spec.qk_norm:
        raise UserError(
            "attention_bias=true with qk_norm=true is no Hugging Face model type: use one of them to export"
        )
    if spec.attention_bias or spec.qk_norm:
        model_type = "qwen2" if spec.attention_bias else "qwen3"
        window = {
            "use_sliding_window": spec.sliding_window is not None,
            "sliding_window": spec.sliding_window,
            "max_window_layers": 0 if spec.sliding_window else spec.num_hidden_layers,
        }
    elif spec.sliding_window is not None or spec.hidden_size % spec.num_attention_heads:
        # transformers refuses a llama whose heads do not divide its hidden size; mistral is the same model.
        model_type, window = "mistral", {"sliding_window": spec.sliding_window}
    else:
        model_type, window = "llama", {}
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        **{key: getattr(spec, key) for key in SHARED_KEYS},
        # The old scheme of rope keys is read by every version of transformers.
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling.to_config() if spec.rope_scaling else None,
        **window,
        **({"attention_bias": False, "mlp_bias": False} if model_type == "llama" else {}),
        # Absent keys would mean token ids 1 and 2; the tokenizer knows better.
        "bos_token_id": None,
        "eos_token_id": None,
    }
