"""Models by name: tiny ones for tests, small ones for a CPU, and published sizes."""

from typing import Any

from fourfold.specs.model import ModelSpec
from fourfold.specs.rope import RopeScaling

# head_dim is not hidden_size / heads, and no two sizes are equal: a mixed-up dimension shows.
_TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def _small(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelSpec:
    """A small tied model with q/k norms; the vocabulary is that of bytes and an end-of-document token."""
    return ModelSpec(
        vocab_size=257,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        qk_norm=True,
    )


def _llama3(hidden: int, inner: int, layers: int, heads: int, *, long: bool = False) -> ModelSpec:
    """Llama 3; ``long`` is the 3.1 release with 128K context (Meta, arXiv:2407.21783)."""
    return ModelSpec(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072 if long else 8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            rope_type="llama3",
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
        if long
        else None,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> ModelSpec:
    """Qwen3 dense (Qwen team, arXiv:2505.09388)."""
    return ModelSpec(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        tie_word_embeddings=tied,
        qk_norm=True,
    )


PRESETS: dict[str, ModelSpec] = {
    "tiny": ModelSpec(**_TINY),
    "tiny-qwen2": ModelSpec(**_TINY, attention_bias=True),
    "tiny-qwen3": ModelSpec(**_TINY, qk_norm=True, tie_word_embeddings=True),
    "small-2m": _small(192, 512, 5, 6, 2),
    "small-10m": _small(384, 1024, 6, 6, 2),
    "small-100m": _small(768, 2048, 16, 12, 4),
    "llama3-8b": _llama3(4096, 14336, 32, 32),
    "llama3-70b": _llama3(8192, 28672, 80, 64),
    "llama3-405b": _llama3(16384, 53248, 126, 128, long=True),
    "llama3.1-8b": _llama3(4096, 14336, 32, 32, long=True),
    "qwen2.5-7b": ModelSpec(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        attention_bias=True,
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "mistral-7b": ModelSpec(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        sliding_window=4096,
    ),
}
