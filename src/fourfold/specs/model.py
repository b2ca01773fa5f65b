"""ModelSpec: a decoder of the Llama, Mistral, Qwen2 or Qwen3 kind, by Hugging Face's names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from fourfold.errors import UserError, nearest
from fourfold.specs.rope import RopeScaling
from fourfold.specs.spec import Spec, divisors, nearby


class ModelSpec(Spec):
    """The sizes and features that fix a decoder's parameters and its mathematics.

    ``num_key_value_heads`` and ``head_dim`` may be left out or None: they are then ``num_attention_heads``
    and ``hidden_size / num_attention_heads``. Raises ``UserError`` with every problem at once.
    """

    vocab_size: int = Field(ge=1, description="rows of the embedding")
    hidden_size: int = Field(ge=1, description="channels of an activation")
    intermediate_size: int = Field(ge=1, description="channels inside the MLP")
    num_hidden_layers: int = Field(ge=1, description="number of layers")
    num_attention_heads: int = Field(ge=1, description="query heads")
    # The defaults of 0 below are never seen: `prepare` fills the derived values in.
    num_key_value_heads: int = Field(default=0, ge=1, description="key/value heads, each shared by a group")
    head_dim: int = Field(default=0, ge=1, description="channels of one head")
    max_position_embeddings: int = Field(default=4096, ge=1, description="longest context")
    rms_norm_eps: float = Field(
        default=1e-6, gt=0, allow_inf_nan=False, description="added to the mean square"
    )
    rope_theta: float = Field(
        default=10000.0, gt=0, allow_inf_nan=False, description="base of the rotary angles"
    )
    rope_scaling: RopeScaling | None = Field(default=None, description="stretching to longer contexts")
    tie_word_embeddings: bool = Field(default=False, description="the head's weight is the embedding's")
    attention_bias: bool = Field(default=False, description="biases on q, k and v (not on o)")
    qk_norm: bool = Field(default=False, description="RMS norms on q and k, over each head")
    sliding_window: int | None = Field(
        default=None, ge=1, description="keys that a query sees, itself included"
    )
    initializer_range: float = Field(
        default=0.02, gt=0, allow_inf_nan=False, description="standard deviation of initial weights"
    )

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Fill in the key/value heads and the head size where they are absent or None."""
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        problems: list[str] = []
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = heads
            if heads is None:  # its own absence is reported
                del values["num_key_value_heads"]
        if values.get("head_dim") is None:
            values.pop("head_dim", None)
            # Sizes that are no positive numbers are reported by their own rules.
            if isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0:
                if hidden % heads == 0:
                    values["head_dim"] = hidden // heads
                else:
                    problems.append(
                        f"num_attention_heads={heads} does not divide hidden_size={hidden}: "
                        f"use num_attention_heads={nearby(divisors(hidden), heads)}, or give head_dim"
                    )
        return values, problems

    def inconsistencies(self) -> list[str]:
        """Return the problems between sizes that are each valid alone."""
        problems = []
        heads, kv_heads, dim = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        if heads % kv_heads:
            problems.append(
                f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}: "
                f"use num_key_value_heads={nearby(divisors(heads), kv_heads)}"
            )
        if dim % 2:
            near = f"{dim - 1} or {dim + 1}" if dim > 1 else "2"
            problems.append(
                f"head_dim={dim} is odd, and rotary angles turn pairs of channels: use head_dim={near}"
            )
        scaling = self.rope_scaling
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name, None)
            if factors is not None and len(factors) != dim // 2:
                problems.append(
                    f"rope_scaling.{name} has {len(factors)} values, head_dim={dim} needs {dim // 2}"
                )
        return problems

    @classmethod
    def preset(cls, name: str) -> "ModelSpec":
        """Return a named model. Raises ``UserError`` with the nearest name and all names."""
        from fourfold.specs.presets import PRESETS

        if name not in PRESETS:
            raise UserError(
                f"preset '{name}' does not exist.{nearest(name, PRESETS)} Presets: {', '.join(PRESETS)}"
            )
        return PRESETS[name]

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any]) -> "ModelSpec":
        """Read a Hugging Face config.json: its path, the folder that holds it, or its content."""
        from fourfold.specs.hf_config import read_config

        return read_config(config)

    @classmethod
    def named(cls, text: str) -> "ModelSpec":
        """Return a preset, or what a config.json or its folder says. Raises ``UserError``."""
        return cls.from_config(text) if is_path(text) else cls.preset(text)

    def to_config(self) -> dict[str, Any]:
        """Return the content of a Hugging Face config.json for this model."""
        from fourfold.specs.hf_config import config_of

        return config_of(self)

    def replace(self, overrides: Mapping[str, Any]) -> "ModelSpec":
        """Return the model with some fields changed, checked again.

        A head size and a number of key/value heads that follow from other fields go on following them.
        """
        values = {name: value for name, value in self if name not in overrides}
        if self.head_dim * self.num_attention_heads == self.hidden_size:
            values.pop("head_dim", None)
        if self.num_key_value_heads == self.num_attention_heads:
            values.pop("num_key_value_heads", None)
        return ModelSpec.model_validate({**values, **overrides})

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters of one layer by their name within it, in model order."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        rows = {
            "q": self.num_attention_heads * dim,
            "k": self.num_key_value_heads * dim,
            "v": self.num_key_value_heads * dim,
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for projection, size in rows.items():
            shapes[f"self_attn.{projection}_proj.weight"] = (size, hidden)
            if self.attention_bias:
                shapes[f"self_attn.{projection}_proj.bias"] = (size,)
        shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (dim,)
            shapes["self_attn.k_norm.weight"] = (dim,)
        shapes["mlp.gate_proj.weight"] = (inner, hidden)
        shapes["mlp.up_proj.weight"] = (inner, hidden)
        shapes["mlp.down_proj.weight"] = (hidden, inner)
        shapes["input_layernorm.weight"] = (hidden,)
        shapes["post_attention_layernorm.weight"] = (hidden,)
        return shapes

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its Hugging Face name, in model order.

        Each parameter is there once: a tied head is the embedding and has no entry of its own.
        """
        embedding = (self.vocab_size, self.hidden_size)
        layer = self.layer_shapes()
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding}
        for index in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = embedding
        return shapes

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the whole model, a tied head not counted again."""
        return sum(
            shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in self.parameter_shapes().values()
        )


def is_path(model: str) -> bool:
    """Whether a model is named by the path of its config.json or folder, not as a preset."""
    return "/" in model or model.endswith(".json")
