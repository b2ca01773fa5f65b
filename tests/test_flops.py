"""FLOPs by convention: published accounting mistakes, and PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fourfold.block_memory import BlockSizes
from fourfold.build import build
from fourfold.flops import (
    attended_pairs,
    forward_flops,
    model_flops,
    model_flops_of_rows,
    model_flops_per_token,
    row_pairs,
)
from fourfold.layer.schedules import gpipe
from fourfold.program.actions import Action, Kind
from fourfold.recompute.costs import decoder_blocks
from fourfold.specs import PRESETS, Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.step_flops import StepFlops, StepWork
from tests.programs import REPLICAS, own_units

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
    # MFU-01
    for tied in (False, True):
        forward = forward_flops(MODEL.replace({"tie_word_embeddings": tied}), S)
        weights = forward.embed + 8 * forward.layer_weights + forward.head
        assert weights == 2 * S * 122_945_536
        assert 3 * weights // S == 737_673_216


def test_grouped_heads_shrink_only_the_projections():
    # MFU-03
    assert model_flops_per_token(MODEL, S) == 838_385_664
    assert model_flops_per_token(MODEL.replace({"num_key_value_heads": 16}), S) == 913_883_136


def test_attention_alone_computed_again():
    # MFU-07: HFU FLOPs a token with selective recomputation of attention's core.
    linear = {name.split(".")[-2] for name, shape in MODEL.layer_shapes().items() if len(shape) == 2}
    work = StepWork(MODEL, Layout(), [["layer.0"]], [((S,),)], 2, keeps=frozenset(linear))
    again = work.of_action(Action(Kind.RECOMPUTE, 0, 0)).recomputed
    assert model_flops_per_token(MODEL, S) + 8 * again / S == 871_956_480


def test_sliding_window_is_exact():
    # MFU-03
    window = MODEL.replace({"sliding_window": 512})
    # 448.125 keys a query on average: 512 x 513 / 2 of the first 512 queries, 512 for each other.
    assert model_flops_per_token(window, S) == 737_673_216 + 3 * 8 * 4 * 1024 * 448.125 == 781_725_696
    assert model_flops_per_token(MODEL.replace({"sliding_window": S}), S) == 838_385_664


@pytest.mark.parametrize("window", [None, 1, 2, 5, 7, 100])
def test_pairs_by_counting(window):
    for length in (1, 2, 5, 12):
        seen = sum(1 for q in range(length) for k in range(q + 1) if window is None or k > q - window)
        assert attended_pairs(length, window) == seen


def step_flops(policy: str) -> StepFlops:
    """Of one sequence on one rank."""
    program = build(
        gpipe(ranks=1, microbatches=1),
        segments_of_stage=[10],
        units=own_units(10),
        sharding=REPLICAS,
        lookups=frozenset({0}),
        recompute=RecomputeName.parse(policy),
        blocks=decoder_blocks(BlockSizes(MODEL, 1, S, itemsize=2)),
    )
    blocks = [["embed"], *[[f"layer.{index}"] for index in range(8)], ["head"]]
    return StepWork(MODEL, Layout.parse("dp1"), blocks, [((S,),)], itemsize=2).of_program(program)


def test_recomputation_counts_in_executed_flops_only():
    """The literature leaves out what attention's backward computes again; the head is not recomputed."""
    nothing, full = step_flops("none"), step_flops("full")
    assert nothing.model == full.model == S * 838_385_664
    assert nothing.recomputed == nothing.padding == full.padding == 0
    assert full.model + full.recomputed == S * 1_052_311_552
    again = 8 * 2 * 1024 * S * (S + 1) // 2
    assert nothing.attention_again == full.attention_again == again
    assert nothing.executed == nothing.model + again


def test_published_counts_of_llama_3():
    """torchtitan: 57.9 GFLOPs a token of the 8B at 8192, with all pairs. Megatron-Bridge counts the causal.

    From its tokens/s and TFLOP/s per GPU (performance summary 26.02.01): 1639 and 736 of the 70B at 8192,
    328 and 827 of the 405B (26.04.01).
    """
    small, large, largest = (ModelSpec.preset(f"llama3-{size}") for size in ("8b", "70b", "405b"))
    titan = 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 4096 * 8192
    norms = 6 * 65 * 4096
    assert model_flops_per_token(small, 8192, convention="square") == titan - norms == 57_912_852_480
    assert model_flops_per_token(large, 8192) == pytest.approx(736e12 / 1639, rel=1e-3)
    assert model_flops_per_token(largest, 8192) == pytest.approx(827e12 / 328, rel=2e-3)


def test_documents_of_a_row_do_not_see_each_other():
    assert row_pairs([3, 1, 4]) == 6 + 1 + 10
    assert row_pairs([3, 1, 4], 2) == 5 + 1 + 7
    assert row_pairs([3, 1, 4], 2, convention="square") == 64
    rows = [[S], [S // 2, S // 2], [1] * S]
    weights = 3 * 2 * S * 122_945_536
    pairs = S * (S + 1) // 2 + S // 2 * (S // 2 + 1) + S
    assert model_flops_of_rows(MODEL, rows) == 3 * (weights + 8 * 4096 * pairs)
    assert model_flops_of_rows(MODEL, [[S]] * 3) == model_flops(MODEL, batch=3, sequence_length=S)
    assert model_flops_of_rows(MODEL, rows, convention="square") == model_flops(
        MODEL, batch=3, sequence_length=S, convention="square"
    )


def test_a_step_is_the_whole_batch():
    assert model_flops(MODEL, batch=6, sequence_length=S) == 6 * S * 838_385_664
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
