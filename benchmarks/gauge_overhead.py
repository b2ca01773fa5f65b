"""What a run's gauges cost: steps with and without them in turns, in the same processes.

python benchmarks/gauge_overhead.py [--json] [--rounds 40] [--workload tiny] [--layout dp1]

With gauges: collectives and waits are recorded, actions timed, the step's time dealt to its parts, its FLOPs
counted, and all of it written to metrics.jsonl, as `fourfold train` does. Without: none of that.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import MODEL, WORKLOADS
from fourfold import execute, training
from fourfold.collectives import pending, perform
from fourfold.data import SyntheticDataset
from fourfold.doctor import Peak
from fourfold.gauges import Gauges, RunFlops
from fourfold.launch import Rank, run_on_local_ranks
from fourfold.measured import Trace
from fourfold.mesh import Mesh
from fourfold.place import HERE
from fourfold.reporting import Reporter
from fourfold.specs import ModelSpec, RunSpec
from fourfold.training import Trainer

MODELS = {"chatty": MODEL, "tiny": ModelSpec.preset("tiny")}
BATCH, LENGTH = WORKLOADS["chatty"].batch, WORKLOADS["chatty"].sequence_length
LAYOUTS = ("dp1", "dp2", "tp2")
ROUNDS = {"chatty": 50, "tiny": 200}


@dataclass(frozen=True)
class Row:
    """Medians over rounds, of rank 0.

    Attributes:
        workload: ``chatty``, or the ``tiny`` preset with the same batch.
        layout: of the ranks.
        rounds: pairs of a step with and one without gauges.
        milliseconds: of a step without gauges, by the clock.
        ratio: of the time with gauges to that without, with its quartiles.
        cpu_percent: what gauges add to the processor time of the thread that trains, median of the rounds,
            of a step's time.
    """

    workload: str
    layout: str
    rounds: int
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_percent: float


class _NoTrace(Trace):
    """Notes nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_host = False


@contextmanager
def _nothing() -> Iterator[list[Any]]:
    yield []


@contextmanager
def _only_where(op: str, axis: Any, *, since: float | None = None) -> Iterator[None]:
    """What the watchdog needs of `waiting`, which is no gauge."""
    if axis.size > 1:
        HERE.wait_in(op, axis.name)
    try:
        yield
    finally:
        if axis.size > 1:
            HERE.go_on()


@contextmanager
def without_gauges() -> Iterator[None]:
    """Have a step measure nothing of itself."""
    with ExitStack() as stack:
        for module, name, instead in (
            (training, "record", _nothing),
            (training, "log_waits", _nothing),
            (training, "time_spent", lambda *_, **__: None),
            (training, "peak_memory_bytes", lambda _: 0),
            (execute, "Trace", _NoTrace),
            (pending, "waiting", _only_where),
            (perform, "waiting", _only_where),
            (perform, "note", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        yield


def times_on_rank(rank: Rank, workload: str, layout: str, rounds: int) -> list[tuple[float, ...]]:
    """The seconds of steps without and with gauges, by the clock and of this thread; each round both."""
    rank.connect(device_type="cpu", agree_on={})
    return times(workload, layout, rounds)


def times(workload: str, layout: str, rounds: int) -> list[tuple[float, ...]]:
    """See `times_on_rank`."""
    spec = MODELS[workload]
    run = RunSpec.model_validate(
        {
            "layout": layout,
            "model": spec.model_dump(exclude_none=True),
            "data": {"sequence_length": LENGTH},
            "training": {"steps": 2 * rounds + 3, "batch": BATCH},
            "optimizer": {"learning_rate": 3e-4},
        }
    )
    mesh = Mesh(run.layout)
    data = SyntheticDataset(spec.vocab_size, LENGTH, seed=0)
    trainer, gauges = Trainer(run, spec, mesh, data=data), Gauges()
    found: list[tuple[float, ...]] = []
    with TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, ExitStack() as stack:
        reporter = None
        if mesh.rank == 0:
            console, peak = Console(file=nowhere), Peak(1e11, "any")
            reporter = Reporter(Path(folder), run, peak=peak, ranks=mesh.world_size, console=console)
            stack.enter_context(reporter)
            rows = {
                number: data.documents(number, BATCH) for number in range(2 * rounds + 3)
            }  # a file has them
            reporter.flops = RunFlops(trainer.parallel, rows.__getitem__, keeps=frozenset())

        def step(number: int, *, gauged: bool) -> tuple[float, float]:
            began, cpu_began = time.perf_counter(), time.thread_time()
            if gauged:
                report = trainer.step(number)
                gauges.add(report)
                if reporter is not None:
                    reporter(report)
            else:
                with without_gauges():
                    began, cpu_began = time.perf_counter(), time.thread_time()
                    trainer.step(number)
                    return time.perf_counter() - began, time.thread_time() - cpu_began
            return time.perf_counter() - began, time.thread_time() - cpu_began

        for number in range(3):
            step(number, gauged=True)
        for number in range(3, 2 * rounds + 3, 2):
            first = number % 4 == 1  # in turns
            pair = {gauged: step(number + i, gauged=gauged) for i, gauged in enumerate((first, not first))}
            found.append((*pair[False], *pair[True]))
    return found


def measured(workload: str, layout: str, rounds: int) -> Row:
    """What the gauges cost in one workload on one layout."""
    if layout == "dp1":
        found = times(workload, layout, rounds)
    else:
        from benchmarks import gauge_overhead  # ranks import their target from a module

        found = run_on_local_ranks(2, gauge_overhead.times_on_rank, (workload, layout, rounds))
    plain, cpu, gauged, gauged_cpu = (list(column) for column in zip(*found, strict=True))
    low, middle, high = statistics.quantiles([g / p for g, p in zip(gauged, plain, strict=True)], n=4)
    step = statistics.median(plain)
    extra = statistics.median(g - p for g, p in zip(gauged_cpu, cpu, strict=True))
    return Row(workload, layout, rounds, step * 1e3, middle, low, high, extra / step * 100)


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, help="pairs of steps; default: 50 of chatty, 200 of tiny")
    parser.add_argument("--workload", action="append", choices=list(MODELS), help="default: both")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="default: all")
    given = parser.parse_args()
    rows = [
        measured(workload, layout, given.rounds or ROUNDS[workload])
        for workload in given.workload or MODELS
        for layout in given.layout or LAYOUTS
    ]
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table("workload", "layout", "rounds", "step ms", "with gauges", "quartiles", "cpu, of a step")
    for row in rows:
        table.add_row(
            row.workload,
            row.layout,
            str(row.rounds),
            f"{row.milliseconds:.1f}",
            f"{row.ratio:.3f}",
            f"{row.ratio_low:.3f} to {row.ratio_high:.3f}",
            f"{row.cpu_percent:+.2f} %",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
