"""What is predicted for a step, against arithmetic by hand and published sizes; and what is refused."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest

from fourfold.cli.tables import title
from fourfold.explain import Explanation, explain, memory_of_rank
from fourfold.memory import Category
from fourfold.outline import Step
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName


def published(layout: str = "pp16,fsdp128,tp8", recompute: str = "none") -> Step:
    """Llama 3 405B on 16,384 ranks: 16M tokens a batch (arXiv:2407.21783, table 4)."""
    return Step(
        ModelSpec.preset("llama3-405b"),
        Layout.parse(layout),
        batch=2048,
        sequence_length=8192,
        microbatches=16,
        dtype="bfloat16",
        recompute=RecomputeName.parse(recompute),
    )


@pytest.fixture(scope="module")
def largest() -> Explanation:
    return explain(published())


def test_16384_ranks_hold_the_whole_model_once(largest: Explanation) -> None:
    """Master weights in float32 and two moments, in equal parts over 16,384 ranks."""
    mean = 4 * largest.step.spec.num_parameters / 16384
    weights = [held.rest[Category.WEIGHTS] for held in largest.memory]
    assert sum(weights) / 16 == pytest.approx(mean, rel=0.02)
    assert [held.rest[Category.OPTIMIZER] for held in largest.memory] == [2 * held for held in weights]
    assert [held.rest[Category.GRADIENTS] for held in largest.memory] == weights


@pytest.mark.parametrize(
    ("layout", "bytes_of_a_parameter"),
    [("dp8", 18), ("fsdp8:zero1", 7.5), ("fsdp8:zero2", 4), ("fsdp8", 2)],
)
def test_bytes_of_a_parameter_between_steps(layout: str, bytes_of_a_parameter: float) -> None:
    """2 of weights in bfloat16, 4 of masters, 4 of gradients, 8 of moments: of 8 ranks each has an eighth."""
    # PLAN-02
    spec = ModelSpec.preset("llama3-8b")
    step = Step(spec, Layout.parse(layout), batch=8, sequence_length=128, microbatches=1, dtype="bfloat16")
    held = memory_of_rank(step, 0, device_type="cuda").rest
    assert sum(held.values()) == pytest.approx(bytes_of_a_parameter * spec.num_parameters, rel=0.02)


def test_the_flops_of_the_largest_model(largest: Explanation) -> None:
    """2523.96 GFLOP a token at sequence 8192, causal: the published runs' own arithmetic."""
    tokens = 2048 * 8192
    assert largest.model_flops / tokens / 1e9 == pytest.approx(2523.96, rel=1e-4)
    assert largest.executed_flops > largest.model_flops
    pairs = 126 * 3 * 4 * 128 * 128  # FLOPs of one, in all layers, there and back
    assert largest.model_flops_square - largest.model_flops == 2048 * pairs * (8192 * 8191 // 2)


def test_what_is_in_flight_and_what_it_costs(largest: Explanation) -> None:
    """1F1B: rank r of 16 holds 16 - r microbatches, and so much less of activations."""
    assert largest.in_flight == [float(16 - rank) for rank in range(16)]
    held = [memory.most[Category.ACTIVATIONS] for memory in largest.memory[1:15]]
    layers, tokens, C, D, H, K, F = 8, 8192, 16384, 128, 16, 1, 53248 // 8
    of_a_layer = tokens * (
        2 * 2 * C // 8 + 2 * 2 * C + 2 * (2 * H + 2 * K) * D + 2 * 2 * F + 2 * 4 // 8 + 4 * H
    )
    steps = [more - less for more, less in pairwise(held)]
    assert steps == [pytest.approx(layers * of_a_layer, rel=0.03)] * len(steps)


def test_recomputation_takes_memory_down_and_flops_up(largest: Explanation) -> None:
    again = explain(published(recompute="full"))
    for kept, dropped in zip(largest.memory, again.memory, strict=True):
        assert dropped.most[Category.ACTIVATIONS] < 0.22 * kept.most[Category.ACTIVATIONS]
    assert again.model_flops == largest.model_flops
    assert 1.3 < again.executed_flops / largest.executed_flops < 1.34


def test_bytes_of_the_batch_axis_by_arithmetic(largest: Explanation) -> None:
    """In a pipeline weights are gathered once and gradients reduced once: 2 and 4 bytes a parameter."""
    stage = 8 * sum(a * b for a, b in [(16384, 16384), (16384, 1024)] * 2 + [(16384, 53248)] * 3) / 8
    for rank in range(1, 15):
        rows = {(row.op, row.axis): row for row in largest.traffic[rank]}
        assert rows["all_gather", "fsdp"].message_bytes == pytest.approx(2 * stage, rel=0.02)
        assert rows["reduce_scatter", "fsdp"].message_bytes == pytest.approx(4 * stage, rel=0.02)
        stream = 8192 * 16384 * 2
        assert rows["all_gather", "tp"].calls == rows["reduce_scatter", "tp"].calls == 16 * 8 * 4
        assert rows["all_gather", "tp"].message_bytes == 16 * 8 * 4 * stream
        assert rows["send", "pp"].message_bytes == 2 * 16 * stream // 8


def test_the_default_of_cp_is_named() -> None:
    """In the heading that all commands print, and in the JSON."""
    step = Step(ModelSpec.preset("tiny"), Layout(cp=4), batch=4, sequence_length=64, microbatches=1)
    assert " on 4 ranks, cp4:ulysses4\n" in title(step, "tiny")
    assert explain(step).to_json()["layout"] == "cp4:ulysses4"


def test_ulysses_sends_to_its_own_ranks_alone() -> None:
    """In pairs on 4 ranks each sends half of what it hands in, not three quarters."""
    step = Step(
        ModelSpec.preset("tiny"),
        Layout.parse("cp4:ulysses2"),
        batch=2,
        sequence_length=64,
        microbatches=1,
        dtype="float32",
    )
    rows = {(row.op, row.axis): row for row in explain(step).traffic[0]}
    exchange, keys = rows["all_to_all", "cp"], rows["send", "cp"]
    # A layer has 4 exchanges of 16 tokens of 2 rows: 8 query heads with 4 of keys and 4 of values, and the
    # output's 8; backward the same.
    assert exchange.calls == 4 * step.spec.num_hidden_layers
    assert exchange.message_bytes == 2 * 16 * 2 * (16 + 8) * step.spec.head_dim * 4 * 4
    assert exchange.sent_bytes == exchange.message_bytes / 2
    assert keys.sent_bytes == keys.message_bytes


def test_the_bubble_of_1f1b() -> None:
    """(P - 1)(F + I) / (M (F + I + W) + (P - 1)(F + I)): a gradient is sent before weight gradients."""
    step = Step(
        ModelSpec.preset("llama3-8b").replace({"vocab_size": 64}),
        Layout.parse("pp4"),
        batch=8,
        sequence_length=1024,
        microbatches=8,
        dtype="bfloat16",
    )
    assert explain(step).timeline.bubble == pytest.approx(6 / 30, rel=0.01)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    code = (
        "import sys\n"
        "from fourfold.cli import app\n"
        "try:\n    app(sys.argv[1:], prog_name='fourfold')\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "explain", *arguments], capture_output=True, text=True, check=False
    )


MODEL = ("--model", "llama3-8b", "--sequence", "8192", "--batch", "64")


def test_the_command_prints_json_without_torch() -> None:
    done = run(*MODEL, "--layout", "fsdp64", "--recompute", "full", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (rank,) = found["pipeline_ranks"]
    assert found["ranks"] == 64
    assert rank["peak_bytes"] == sum(rank["memory_at_peak_bytes"].values())
    assert set(rank["memory_at_peak_bytes"]) == {category.value for category in Category}
    assert {row["op"] for row in rank["traffic"]} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_a_run_file_is_read_without_torch() -> None:
    done = run("examples/pipeline.toml")
    assert done.returncode == 0, done.stderr
    assert "pp2" in done.stdout
    assert "rank 1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ((), ["give a run file or --model, one of them"]),
        (("--model", "tiny"), ["--model needs --sequence, --batch, --layout"]),
        (
            (
                "--model",
                "lama3-8b",
                "--sequence",
                "0",
                "--batch",
                "8",
                "--layout",
                "dq2",
                "--recompute",
                "ful",
            ),
            ["--sequence 0", "preset 'lama3-8b'", "'dq'", "recompute='ful'"],
        ),
        ((*MODEL, "--layout", "pp33,tp3"), ["pp=33", "tp=3"]),
    ],
)
def test_all_mistakes_at_once(arguments: tuple[str, ...], messages: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    for message in messages:
        assert message in done.stderr
