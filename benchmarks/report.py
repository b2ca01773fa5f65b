"""What every benchmark prints: one row a workload and layout, as a table or as JSON."""

import argparse
import json as json_module
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.teams import Score
from benchmarks.workloads import WORKLOADS

LOSS_TOLERANCE = 1e-3
"""Relative; contestants start from the same weights and see the same tokens, in float32."""

COLUMNS = (
    "workload",
    "layout",
    "ours ms",
    "peer",
    "peer ms",
    "ratio",
    "limit ms",
    "MiB/step",
    "ours",
    "peer",
    "peak MiB ours",
    "peer",
)


@dataclass(frozen=True)
class Row:
    """One comparison: medians of steps, each of its slowest rank; the median of their ratios round by round,
    with the quartiles; bytes sent per rank and step, by the formula and as counted on the loopback device."""

    workload: str
    layout: str
    ours_seconds: float
    peer: str
    peer_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    limit_seconds: float
    formula_bytes: float
    ours_bytes: float
    peer_bytes: float
    ours_peak_bytes: int
    peer_peak_bytes: int

    @classmethod
    def of(
        cls,
        workload: str,
        layout: str,
        *,
        ours: Score,
        peer: str,
        peer_score: Score,
        limit: Score,
        formula_bytes: float,
    ) -> "Row":
        """Compare two scores, after a check that both trained the same."""
        for k, (a, b) in enumerate(zip(ours.losses, peer_score.losses, strict=True)):
            if not abs(a - b) <= LOSS_TOLERANCE * abs(b):
                raise SystemExit(f"{workload} {layout}: at step {k} our loss is {a:.6f}, {peer}'s {b:.6f}")
        low, ratio, high = ours.ratio(peer_score)
        return cls(
            workload=workload,
            layout=layout,
            ours_seconds=ours.seconds,
            peer=peer,
            peer_seconds=peer_score.seconds,
            ratio=ratio,
            ratio_low=low,
            ratio_high=high,
            limit_seconds=limit.seconds,
            formula_bytes=formula_bytes,
            ours_bytes=ours.bytes,
            peer_bytes=peer_score.bytes,
            ours_peak_bytes=ours.peak_bytes,
            peer_peak_bytes=peer_score.peak_bytes,
        )

    def cells(self) -> tuple[str, ...]:
        """What stands in each of the `COLUMNS`."""
        return (
            self.workload,
            self.layout,
            f"{self.ours_seconds * 1e3:.1f}",
            self.peer,
            f"{self.peer_seconds * 1e3:.1f}",
            f"{self.ratio:.3f} ({self.ratio_low:.2f}-{self.ratio_high:.2f})",
            f"{self.limit_seconds * 1e3:.1f}",
            f"{self.formula_bytes / 2**20:.1f}",
            f"{self.ours_bytes / 2**20:.1f}",
            f"{self.peer_bytes / 2**20:.1f}",
            f"{self.ours_peak_bytes / 2**20:.0f}",
            f"{self.peer_peak_bytes / 2**20:.0f}",
        )


@dataclass(frozen=True)
class Options:
    """What a benchmark is asked for."""

    workloads: list[str]
    ranks: list[int]
    rounds: int | None
    json: bool


def arguments(description: str | None, *, ranks: Sequence[int]) -> Options:
    """Read a benchmark's command line."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--ranks", action="append", type=int, choices=list(ranks), help="default: all")
    parser.add_argument("--rounds", type=int, help="steps of each contestant; default: by workload")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    return Options(given.workload or list(WORKLOADS), given.ranks or list(ranks), given.rounds, given.json)


def run(
    description: str | None,
    measure: Callable[..., list[Row]],
    *,
    ranks: Sequence[int],
) -> None:
    """Read the command line, measure what it asks for, and print the rows.

    Args:
        description: the benchmark's own.
        measure: called as ``measure(workload, ranks, rounds=...)``.
        ranks: numbers of ranks to choose from.
    """
    options = arguments(description, ranks=ranks)
    rows = [
        row
        for name in options.workloads
        for count in options.ranks
        for row in measure(WORKLOADS[name], count, rounds=options.rounds)
    ]
    show(rows, json=options.json)


def show(rows: Sequence[Row], *, json: bool) -> None:
    """Print the rows."""
    if json:
        print(json_module.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(title="medians of interleaved steps; ratio = ours / peer, round by round (quartiles)")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("workload", "layout", "peer") else "right")
    for row in rows:
        table.add_row(*row.cells())
    Console(width=150).print(table)
