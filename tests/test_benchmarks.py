"""The benchmarks run and print what they promise; how fast things are is not tested."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.contestants import Plain
from benchmarks.context_attention import ALONE, APART, LAYOUTS, OneRow, balances
from benchmarks.context_contestants import CutTokens, columns, left_out
from benchmarks.gauge_overhead import times, without_gauges
from benchmarks.workloads import MODEL, Workload

from fourfold import training
from fourfold.collectives.recorder import note
from fourfold.mesh import Axis
from fourfold.sequence.partition import MOST_IMBALANCE
from tests.ranks import RankPool

ROOT = Path(__file__).parent.parent


@pytest.mark.alone
def test_data_parallel_prints_its_rows() -> None:
    command = "benchmarks/data_parallel.py --workload chatty --ranks 2 --rounds 2 --json"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["peer"] for row in rows] == ["torch DDP", "torch DDP around our Decoder"]
    row = rows[0]
    assert set(row) == {
        "workload", "layout", "ours_seconds", "peer", "peer_seconds", "ratio", "ratio_low", "ratio_high",
        "limit_seconds",
        "formula_bytes", "ours_bytes", "peer_bytes", "ours_peak_bytes", "peer_peak_bytes",
    }  # fmt: skip
    assert (row["workload"], row["layout"]) == ("chatty", "dp2")
    # What crossed the loopback device is what the formula says, headers and the barrier aside.
    assert row["formula_bytes"] == 4 * MODEL.num_parameters + 16
    assert row["formula_bytes"] <= row["ours_bytes"] < 1.01 * row["formula_bytes"]


def test_steps_with_and_without_gauges() -> None:
    """Each round one of both; without them nothing is recorded, and afterwards it is again."""
    assert [len(pair) for pair in times("tiny", "dp1", 2)] == [4, 4]
    before = training.record
    with without_gauges(), training.record() as events:
        assert training.record is not before
        note("all_reduce", Axis("dp", 2, 0, (0, 1), None), 4, torch.float32)
    assert events == []
    assert training.record is before


SMALL = Workload("small", sequence_length=16, batch=2, rounds=1)


def losses_of_a_rank(peer: str | None) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    contestant = Plain(SMALL, rank, ranks) if peer is None else CutTokens(SMALL, rank, ranks, peer=peer)
    return [contestant.step(k) for k in range(2)]


def test_the_peers_ring_trains_what_one_process_trains(ranks: RankPool) -> None:
    """The second step's loss has the first one's gradients in it."""
    (right,) = ranks(1, losses_of_a_rank, None)
    found = ranks(2, losses_of_a_rank, "torch ring, CPU kernel put in")
    assert [sum(step) for step in zip(*found, strict=True)] == pytest.approx(right, rel=1e-5)


def test_peers_have_their_own_order_of_tokens() -> None:
    assert columns(16, 1, 4, is_zigzag=False) == (range(4, 8),)
    assert columns(16, 1, 4, is_zigzag=True) == (range(2, 4), range(12, 14))


def test_a_peer_that_cannot_run_is_named_with_its_reason() -> None:
    missing = left_out()
    for name, package in (("DeepSpeed Ulysses", "deepspeed"), ("yunchang Ulysses", "yunchang")):
        assert (name in missing) == (importlib.util.find_spec(package) is None)
    assert missing["yunchang ring, ring-flash-attn"] == "flash-attn needs CUDA"


def squares_of_a_rank(layout: str) -> float:
    return OneRow(layout, 24, "float32", dist.get_rank(), dist.get_world_size()).step(0)


@pytest.mark.parametrize("layout", [APART, *LAYOUTS])
def test_attention_alone_is_the_same_attention(ranks: RankPool, layout: str) -> None:
    """The sum of squares of output and gradients, whoever has which part of the row."""
    right = sum(ranks(2, squares_of_a_rank, ALONE))
    assert sum(ranks(2, squares_of_a_rank, layout)) == pytest.approx(right, rel=1e-5)


def test_packed_rows_are_balanced_where_one_run_a_rank_is_not() -> None:
    """Ranks of at least 512 tokens, within what partitions aim at."""
    found = [line for line in balances(2048) if line.tokens // line.ranks >= 512]
    assert {line.ranks for line in found} == {2, 4}
    for line in found:
        assert line.worst <= MOST_IMBALANCE < 1.3 < line.contiguous
