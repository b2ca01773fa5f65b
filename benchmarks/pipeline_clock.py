"""Does the clock tell how long a pipeline's step takes? Predicted from measured actions, and measured.

python benchmarks/pipeline_clock.py [--json] [--workload dense] [--ranks 2] [--rounds 10]

Each action's duration is its median over the steps of a schedule (over microbatches, too), and from them the
clock predicts that schedule's step. What an action takes may depend on what the other rank does at that time,
and varies from step to step: this is a test of the clock and of leaving that out. A message takes half of a
round trip, measured alone.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Ours
from benchmarks.report import arguments
from benchmarks.workloads import MODEL, WORKLOADS, Workload
from fourfold.collectives import recv_, send
from fourfold.launch import Rank, launch
from fourfold.measured import measured_timeline
from fourfold.program.actions import COMPUTE, SENDS, Action, Kind
from fourfold.program.clock import clock

MICROBATCHES = 8
SCHEDULES = ("1f1b", "gpipe", "interleaved2", "zb-h1", "zb-h2", "zbv")
WARM_UP = 2
MESSAGES = 20


@dataclass(frozen=True)
class Row:
    """A schedule's step, predicted and measured."""

    workload: str
    layout: str
    predicted_seconds: float
    measured_seconds: float
    ratio: float


def measure(rank: Rank, workload: Workload, ranks: int, rounds: int) -> list[Row]:
    """The rows of one workload, on each rank."""
    torch.set_num_threads(1)
    rank.connect(device_type="cpu", agree_on={})
    contestants = {name: Ours(workload, f"pp{ranks}:{name}", microbatches=MICROBATCHES) for name in SCHEDULES}
    durations: dict[tuple[str, Kind, int | None], list[float]] = {}
    updates: dict[tuple[str, int], list[float]] = {}
    steps: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for k in range(WARM_UP + rounds):
        for name, contestant in contestants.items():
            contestant.step(k)
            parallel = contestant.trainer.parallel
            timeline = measured_timeline(parallel.executor.trace, parallel.mesh.pp)
            if k < WARM_UP:
                continue
            steps[name].append(timeline.seconds)
            for span in timeline.spans:
                seconds = span.end_seconds - span.start_seconds
                if span.action.kind in COMPUTE:
                    durations.setdefault((name, span.action.kind, span.action.place), []).append(seconds)
                elif span.action.kind is Kind.UPDATE:
                    updates.setdefault((name, k), []).append(seconds)
    message = message_seconds(contestants["1f1b"], workload)
    # The update holds a sum over ranks, so the rank that comes last to it waits for none.
    update = statistics.median(min(seconds) for seconds in updates.values())

    def seconds_of(name: str, action: Action) -> float:
        if action.kind in COMPUTE:
            return statistics.median(durations[name, action.kind, action.place])
        if action.kind is Kind.UPDATE:
            return update
        return message if action.kind in SENDS else 0.0

    rows = []
    for name, contestant in contestants.items():
        predicted = clock(contestant.trainer.parallel.program, partial(seconds_of, name)).seconds
        measured = statistics.median(steps[name])
        rows.append(Row(workload.name, f"pp{ranks}:{name}", predicted, measured, predicted / measured))
    return rows


def message_seconds(contestant: Ours, workload: Workload) -> float:
    """Half of the round trip of one microbatch's activations between the first two ranks."""
    axis = contestant.trainer.parallel.mesh.pp
    rows = workload.batch // MICROBATCHES
    x = torch.zeros(rows, workload.sequence_length, MODEL.hidden_size)
    seconds = []
    for _ in range(MESSAGES if axis.rank < 2 else 0):
        start = time.perf_counter()
        if axis.rank == 0:
            send(x, axis, destination=1)
            recv_(x, axis, source=1)
        else:
            recv_(x, axis, source=0)
            send(x, axis, destination=0)
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds) if seconds else 0.0


def main() -> None:
    from benchmarks import pipeline_clock  # ranks import what they run

    options = arguments(__doc__, ranks=(2, 4))
    rows: list[pipeline_clock.Row] = []
    for name in options.workloads:
        for ranks in options.ranks:
            rows += launch(ranks, pipeline_clock.measure, (WORKLOADS[name], ranks, options.rounds or 10))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(title="a step by the clock, from measured actions, and as measured: medians")
    columns: dict[str, Any] = {"workload": "left", "layout": "left"}
    columns |= dict.fromkeys(("predicted ms", "measured ms", "predicted / measured"), "right")
    for column, justify in columns.items():
        table.add_column(column, justify=justify)
    for row in rows:
        predicted, measured = f"{row.predicted_seconds * 1e3:.1f}", f"{row.measured_seconds * 1e3:.1f}"
        table.add_row(row.workload, row.layout, predicted, measured, f"{row.ratio:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
