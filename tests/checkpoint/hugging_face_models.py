"""Small models of transformers in folders, as they save them, every parameter random.

It is imported where a model is made: ranks read folders and need no transformers.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTH = 24
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    # 8 query heads on 2 key/value heads: a mix-up of the two group sizes shows.
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 48,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
}
HEADS_OF_16 = {"hidden_size": 24, "num_attention_heads": 4, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-llama3": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-heads-of-16": (
        "llama",
        {"hidden_size": 24, "num_attention_heads": 4, "head_dim": 16, "rope_parameters": YARN},
    ),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
}
"""Model type and what differs from the sizes above."""


def model_of(family: str, **changes: Any) -> Any:
    """A model whose biases and norms are random too."""
    import transformers

    model_type, own = FAMILIES[family]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | own | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        mean, spread = (0.0, 0.3) if parameter.dim() > 1 else (1.0, 0.5)
        torch.nn.init.normal_(parameter, mean, spread, generator=generator)
    return model.eval()


def logits_of(model: Any, input_ids_BS: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=input_ids_BS, use_cache=False).logits


def loaded(folder: Path) -> Any:
    """The model that transformers makes of a folder; it must have nothing to remark."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


def tokens(rows: int, length: int = LENGTH, vocab_size: int = 67) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
