"""Attention alone over the ranks of cp: how much of one process's speed is left, and how even the work is.

python benchmarks/context_attention.py [--json] [--tokens 8192] [--dtype float32] [--rounds 5]

One process and all layouts compute the same attention of the same row, forward and backward, in turns.
Efficiency is one process's time / (ranks x ours): 1 where nothing is lost. ``heads apart`` is what the
machine itself loses: each rank has half of the heads and all tokens, and nothing is sent. Balance is the
busiest rank's work over the mean, in pairs of query and key, for rows packed with documents of random length.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.teams import Build, interleaved
from benchmarks.workloads import MODEL, Workload
from fourfold.mesh import Mesh
from fourfold.models.attention import attention
from fourfold.sequence.attention import ContextAttention
from fourfold.sequence.partition import contiguous, partition_of
from fourfold.specs import Layout

RANKS = 2
ALONE, APART = "one process", "heads apart"
ROWS = 20
LAYOUTS = ("cp2:ring", "cp2:ulysses")
HEADS, KV_HEADS, HEAD_DIM = MODEL.num_attention_heads, MODEL.num_key_value_heads, MODEL.head_dim


@dataclass(frozen=True)
class Efficiency:
    """A layout's attention of one row: medians of seconds and, round by round, of ratios, with quartiles."""

    layout: str
    tokens: int
    dtype: str
    seconds: float
    one_process_seconds: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    bytes: float


@dataclass(frozen=True)
class Balance:
    """Rows of documents of random lengths over ranks: max / mean work, of `ROWS` rows the mean and the worst.

    ``contiguous`` is the mean where each rank has one run of tokens.
    """

    documents: str
    ranks: int
    tokens: int
    mean: float
    worst: float
    contiguous: float


class OneRow:
    """Attention of one row, forward and backward, by one rank of several: its tokens in ``layout``."""

    def __init__(self, layout: str, tokens: int, dtype: str, rank: int, ranks: int):
        generator = torch.Generator().manual_seed(0)
        sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        whole = [torch.randn(1, tokens, n, HEAD_DIM, generator=generator) for n in sizes]
        self.documents = ((tokens,),)
        self.is_idle = layout == ALONE and rank > 0
        self.attend = attention
        if layout == APART:
            mine = [tensor.chunk(ranks, 2)[rank] for tensor in whole]
        elif layout == ALONE:
            mine = whole
        else:
            mesh = Mesh(Layout.parse(layout))
            ring, ulysses = mesh.split("cp", mesh.layout.ulysses(MODEL))
            self.attend = ContextAttention(ring=ring, ulysses=ulysses)
            (runs,) = self.attend.columns(self.documents)
            mine = [torch.cat([tensor[:, run.start : run.stop] for run in runs], 1) for tensor in whole]
        *inputs, self.grad = (tensor.to(getattr(torch, dtype)).contiguous() for tensor in mine)
        self.inputs = [tensor.requires_grad_() for tensor in inputs]

    def step(self, k: int) -> float:
        """Return the sum of squares of the output and all gradients: the same however the row is cut."""
        if self.is_idle:
            return 0.0
        out = self.attend(*self.inputs, documents=self.documents, window=None, scale=HEAD_DIM**-0.5)
        gradients = torch.autograd.grad(out, self.inputs, self.grad)
        return sum(_square(tensor) for tensor in (out.detach(), *gradients))


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.flatten(0, -2).float(), dim=-1).double().square().sum())


def efficiencies(tokens: int, dtype: str, rounds: int) -> list[Efficiency]:
    """A row for each layout, and for heads apart."""
    names = (ALONE, APART, *LAYOUTS)
    builds: dict[str, Build] = {name: partial(OneRow, name, tokens, dtype) for name in names}
    scores = interleaved(builds, RANKS, rounds=rounds, workload=Workload("row", tokens, 1, rounds))
    alone = scores[ALONE]
    found = []
    for name in names[1:]:
        score = scores[name]
        for ours, right in zip(score.losses, alone.losses, strict=True):
            if not abs(ours - right) <= (1e-4 if dtype == "float32" else 2e-2) * right:
                raise SystemExit(f"{name} computes {ours * tokens:.6e}, one process {right * tokens:.6e}")
        ratios = [a / (RANKS * b) for a, b in zip(alone.step_seconds, score.step_seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        found.append(
            Efficiency(name, tokens, dtype, score.seconds, alone.seconds, middle, low, high, score.bytes)
        )
    return found


def balances(tokens: int = 16384) -> list[Balance]:
    """Rows of log-normal lengths, as texts have them, and of a few long documents."""
    generator = np.random.default_rng(0)
    found = []
    for name, mean in {"short, 1K": 1024, "long, 8K": 8192}.items():
        rows = [_lengths(generator, mean, tokens) for _ in range(ROWS)]
        for ranks in (2, 4, 8):
            ratios = [_over_mean(partition_of(row, ranks).work(row)) for row in rows]
            one_run = statistics.mean(_over_mean(contiguous(tokens, ranks).work(row)) for row in rows)
            found.append(Balance(name, ranks, tokens, statistics.mean(ratios), max(ratios), one_run))
    return found


def _over_mean(work: Sequence[int]) -> float:
    return max(work) / statistics.mean(work)


def _lengths(generator: np.random.Generator, mean: int, tokens: int) -> tuple[int, ...]:
    """Documents of log-normal lengths (sigma 1) that fill a row; the last one is cut."""
    found: list[int] = []
    while sum(found) < tokens:
        length = max(1, int(generator.lognormal(np.log(mean) - 0.5, 1.0)))
        found.append(min(length, tokens - sum(found)))
    return tuple(found)


def show(rows: list[Efficiency], balance: list[Balance]) -> None:
    """Print both tables."""
    table = Table(title="attention forward and backward; efficiency = one process / (ranks x ours)")
    for column in ("layout", "tokens", "dtype", "ms", "one process ms", "efficiency", "MiB/step"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.layout, str(row.tokens), row.dtype, f"{row.seconds * 1e3:.0f}",
            f"{row.one_process_seconds * 1e3:.0f}",
            f"{row.efficiency:.3f} ({row.efficiency_low:.2f}-{row.efficiency_high:.2f})",
            f"{row.bytes / 2**20:.1f}",
        )  # fmt: skip
    Console(width=120).print(table)
    table = Table(title="work of the busiest rank / mean, packed rows")
    for column in ("documents", "ranks", "tokens", "mean", "worst", "mean, one run each"):
        table.add_column(column)
    for line in balance:
        table.add_row(
            line.documents, str(line.ranks), str(line.tokens), f"{line.mean:.3f}", f"{line.worst:.3f}",
            f"{line.contiguous:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", action="append", type=int, help="of the row; default: 8192")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    rows = [
        row
        for tokens in given.tokens or [8192]
        for dtype in given.dtype or ["float32", "bfloat16"]
        for row in efficiencies(tokens, dtype, given.rounds)
    ]
    balance = balances()
    if given.json:
        both = {"efficiency": [asdict(row) for row in rows], "balance": [asdict(line) for line in balance]}
        print(json.dumps(both, indent=2))
    else:
        show(rows, balance)


if __name__ == "__main__":
    main()
