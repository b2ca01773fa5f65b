"""What it is worth that threads of ranks do not push each other aside: the same step with that and without.

python benchmarks/thread_scheduling.py [--json] [--workload chatty] [--ranks 4] [--rounds 16]
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Ours
from benchmarks.report import arguments
from benchmarks.teams import Build, interleaved
from benchmarks.workloads import WORKLOADS, Workload

LAYOUTS = (
    "dp{}", "fsdp{}", "tp{}", "tp{}:allreduce", "cp{}", "pp{}", "pp{}:interleaved2", "pp{}:zbv",
)  # fmt: skip
"""On any number of ranks."""

COLUMNS = ("workload", "layout", "ms", "without, ms", "ratio", "low", "high")


def ours(layout: str, workload: Workload, rank: int, ranks: int) -> Ours:
    return Ours(workload, layout, microbatches=8 if layout.startswith("pp") else 1)


def without(layout: str, workload: Workload, rank: int, ranks: int) -> Ours:
    """The same with its threads scheduled as the system does by default."""
    contestant = ours(layout, workload, rank, ranks)
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    return contestant


def measure(workload: Workload, ranks: int, rounds: int | None) -> list[dict[str, object]]:
    """A row for each layout: medians of steps, and of their ratios round by round, with quartiles."""
    rows = []
    for form in LAYOUTS:
        layout = form.format(ranks)
        builds: dict[str, Build] = {
            "with": partial(ours, layout, workload),
            "without": partial(without, layout, workload),
        }
        scores = interleaved(builds, ranks, rounds=rounds, workload=workload)
        low, ratio, high = scores["with"].ratio(scores["without"])
        milliseconds = (scores[name].seconds * 1e3 for name in builds)
        rows.append(dict(zip(COLUMNS, (workload.name, layout, *milliseconds, ratio, low, high), strict=True)))
    return rows


def main() -> None:
    options = arguments(__doc__, ranks=(2, 4))
    rows = [
        row
        for name in options.workloads
        for ranks in options.ranks
        for row in measure(WORKLOADS[name], ranks, options.rounds)
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title="threads that do not push each other aside, over the system's way")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("workload", "layout") else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
