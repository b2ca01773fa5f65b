"""FLOPs by convention: published accounting mistakes, and PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fourfold.flops import (
    attended_pairs,
    executed_flops,
    executed_flops_per_token,
    forward_flops,
    model_flops,
    model_flops_per_token,
)
from fourfold.specs import PRESETS, ModelSpec

S = 2048
MODEL = ModelSpec(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
)


def test_embedding_is_no_matmul_and_the_head_is_one_tied_or_not():
    for tied in (False, True):
        forward = forward_flops(MODEL.replace({"tie_word_embeddings": tied}), S)
        weights = forward.embed + 8 * forward.layer_weights + forward.head
        assert weights == 2 * S * 122_945_536
        assert 3 * weights // S == 737_673_216


def test_grouped_heads_shrink_only_the_projections():
    assert model_flops_per_token(MODEL, S) == 838_385_664
    assert model_flops_per_token(MODEL.replace({"num_key_value_heads": 16}), S) == 913_883_136


def test_sliding_window_is_exact():
    window = MODEL.replace({"sliding_window": 512})
    # 448.125 keys a query on average: 512 x 513 / 2 of the first 512 queries, 512 for each other.
    assert model_flops_per_token(window, S) == 737_673_216 + 3 * 8 * 4 * 1024 * 448.125 == 781_725_696
    assert model_flops_per_token(MODEL.replace({"sliding_window": S}), S) == 838_385_664


@pytest.mark.parametrize("window", [None, 1, 2, 5, 7, 100])
def test_pairs_by_counting(window):
    for length in (1, 2, 5, 12):
        seen = sum(1 for q in range(length) for k in range(q + 1) if window is None or k > q - window)
        assert attended_pairs(length, window) == seen


def test_recomputation_counts_in_executed_flops_only():
    assert executed_flops_per_token(MODEL, S) == 838_385_664
    assert executed_flops_per_token(MODEL, S, "layers") == 1_052_311_552
    assert executed_flops_per_token(MODEL, S, "attention") == 871_956_480


def test_a_step_is_the_whole_batch():
    assert model_flops(MODEL, batch=6, sequence_length=S) == 6 * S * 838_385_664
    assert executed_flops(MODEL, batch=6, sequence_length=S, recomputation="layers") == 6 * S * 1_052_311_552
    segments = forward_flops(MODEL, S).segments
    assert len(segments) == 10
    assert segments[0] == 0
    assert 3 * 6 * sum(segments) == model_flops(MODEL, batch=6, sequence_length=S)


def test_explicit_head_size_counts():
    spec = PRESETS["tiny"]  # 8 x 16 query channels, 4 x 16 of keys and of values, hidden 32
    layer = 2 * (128 * 32 + 2 * 64 * 32 + 32 * 128 + 3 * 32 * 88)
    assert forward_flops(spec, 1).layer_weights == layer
    assert forward_flops(spec, 3).layer_attention == 4 * 128 * 6


def test_forward_and_backward_equal_pytorchs_counter():
    """A layer and a head written with plain products: PyTorch counts all S x S pairs, we count the causal."""
    spec, length, batch = PRESETS["tiny"], 24, 2
    weights = {
        name: torch.randn(shape, requires_grad=True)
        for name, shape in {**spec.layer_shapes(), "head": (spec.vocab_size, spec.hidden_size)}.items()
        if len(shape) == 2
    }
    heads, kv_heads, dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[name].T

    def split(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(batch, length, count, dim).transpose(1, 2)

    x = torch.randn(batch, length, spec.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q = split(project(x, "self_attn.q_proj.weight"), heads)
        k = split(project(x, "self_attn.k_proj.weight"), kv_heads).repeat_interleave(heads // kv_heads, 1)
        v = split(project(x, "self_attn.v_proj.weight"), kv_heads).repeat_interleave(heads // kv_heads, 1)
        mixed = ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).reshape(batch, length, heads * dim)
        y = project(mixed, "self_attn.o_proj.weight")
        inner = project(y, "mlp.gate_proj.weight") * project(y, "mlp.up_proj.weight")
        z = project(project(inner, "mlp.down_proj.weight"), "head")
        forward_counted = counter.get_total_flops()
        z.sum().backward()
    ours = forward_flops(spec, length)
    all_pairs = ours.layer_attention * length**2 // attended_pairs(length)
    assert forward_counted == batch * (ours.layer_weights + all_pairs + ours.head)
    assert counter.get_total_flops() == 3 * forward_counted
