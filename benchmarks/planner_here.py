"""Does the simulator tell how long a step takes here? Predicted after `fourfold bench`, and measured.

python benchmarks/planner_here.py [--json] [--ranks 2 4] [--sequence 128 256] [--save FILE] [--read FILES]

For each number of ranks and length of a sequence one job measures, one after the other: what `fourfold bench`
measures, and then the steps of every layout (medians). From the first alone each layout's step is predicted.
``--save`` keeps what was measured, of one number of ranks and one length, and goes on with what it finds in
that file; ``--read`` predicts from such files without measuring anew.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import MODEL, Workload
from fourfold.bench.compute import Shapes
from fourfold.bench.measure import measure
from fourfold.launch import Rank, launch
from fourfold.measured import measured_timeline
from fourfold.mesh import Mesh
from fourfold.outline import Step, outline
from fourfold.planner.machine import Machine
from fourfold.planner.simulated import Simulation
from fourfold.planner.simulation_loads import simulate_step
from fourfold.specs import Layout, RunSpec
from fourfold.training import Trainer

BATCH = 8
LAYOUTS = {
    2: (
        ("dp2", 1), ("dp2", 2), ("fsdp2:zero1", 1), ("fsdp2:zero2", 1), ("fsdp2", 1), ("tp2", 1),
        ("tp2:allreduce", 1), ("cp2:ring", 1), ("cp2:ulysses", 1), ("pp2", 4), ("pp2:gpipe", 4),
        ("pp2:interleaved2", 4), ("pp2:zbv", 4),
    ),
    4: (
        ("dp4", 1), ("fsdp4", 1), ("fsdp4:zero1", 1), ("dp2,fsdp2", 1), ("tp4", 1), ("dp2,tp2", 1),
        ("fsdp2,tp2", 1), ("cp4:ulysses", 1), ("dp2,cp2", 1), ("cp2,tp2", 1), ("pp4", 8), ("pp2,dp2", 4),
        ("pp2,fsdp2", 4), ("pp2,tp2", 4), ("pp2,cp2", 4),
    ),
}  # fmt: skip
"""By number of ranks: layouts, each with its microbatches."""

WARM_UP, STEPS = 2, 5


@dataclass(frozen=True)
class Measured:
    """The median step of a layout, where rank 0's time went, and when the last step's actions ran.

    ``spans`` are (pipeline rank, action, begin, end), in seconds.
    """

    ranks: int
    sequence: int
    layout: str
    microbatches: int
    seconds: float
    parts: dict[str, float]
    spans: list[tuple[int, str, float, float]]


@dataclass(frozen=True)
class Row:
    """A layout's step, predicted and measured; both with where the time goes."""

    ranks: int
    sequence: int
    layout: str
    microbatches: int
    predicted_seconds: float
    measured_seconds: float
    error: float
    predicted_parts: dict[str, float]
    measured_parts: dict[str, float]


def run_on_rank(rank: Rank, sequence: int, known: dict[str, Any], save: Path | None) -> dict[str, Any]:
    """Measure the machine and then the layouts, but for what is known; keep each as soon as it is there."""
    torch.set_num_threads(1)
    ranks = rank.job.world_size

    def keep() -> None:
        if rank.is_first and save is not None:
            save.write_text(json.dumps([known]) + "\n")
            print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)

    began = time.perf_counter()

    if "machine" in known:
        rank.connect(device_type="cpu", agree_on={})
    else:
        shapes = Shapes.of(MODEL, dtype="float32", sequence=sequence, ranks=ranks, rows=(1, 2, 8))
        machine = measure(rank, shapes)
        known["machine"] = None if machine is None else machine.to_json()
        keep()
    known.setdefault("measured", [])
    there = [(found["layout"], found["microbatches"]) for found in known["measured"]]
    for layout, microbatches in LAYOUTS[ranks]:
        if (layout, microbatches) not in there:
            known["measured"].append(asdict(steps_of(ranks, sequence, layout, microbatches)))
            keep()
    return known


def steps_of(ranks: int, sequence: int, layout: str, microbatches: int) -> Measured:
    """Train some steps on a layout."""
    workload = Workload("here", sequence_length=sequence, batch=BATCH, rounds=STEPS)
    run = RunSpec.model_validate(
        {
            "layout": layout,
            "model": MODEL.model_dump(exclude_none=True),
            "data": {"sequence_length": sequence},
            "training": {"steps": 1000, "batch": BATCH, "microbatches": microbatches},
            "optimizer": {"learning_rate": 3e-4},
        }
    )
    trainer = Trainer(run, MODEL, Mesh(run.layout, "cpu"), data=workload)
    reports = [trainer.step(step) for step in range(WARM_UP + STEPS)][WARM_UP:]
    seconds = statistics.median(report.seconds for report in reports)
    parts = [report.spent.parts() for report in reports if report.spent is not None]
    means = {name: statistics.median(part.get(name, 0.0) for part in parts) for name in parts[0]}
    timeline = measured_timeline(trainer.parallel.executor.trace, trainer.parallel.mesh.pp)
    spans = [(s.rank, str(s.action), s.start_seconds, s.end_seconds) for s in timeline.spans]
    return Measured(ranks, sequence, layout, microbatches, seconds, means, spans)


def simulated_as(found: Measured, machine: Machine) -> Simulation:
    """A measured step, simulated."""
    step = Step(
        MODEL,
        Layout.parse(found.layout),
        batch=BATCH,
        sequence_length=found.sequence,
        microbatches=found.microbatches,
    )
    return simulate_step(outline(step), machine)


def predicted(machine: Machine, found: Measured) -> Row:
    """Predict a measured step."""
    simulated = simulated_as(found, machine)
    return Row(
        found.ranks,
        found.sequence,
        found.layout,
        found.microbatches,
        simulated.seconds,
        found.seconds,
        simulated.seconds / found.seconds - 1,
        dict(simulated.parts[0]),
        found.parts,
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: the correlation of the places in the two orders."""

    def places(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=lambda index: values[index])
        return [order.index(index) for index in range(len(values))]

    left, right = (places([pair[side] for pair in pairs]) for side in range(2))
    return statistics.correlation(left, right)


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """What is held against the targets: of all layouts, and of each number of ranks and length."""
    groups: dict[str, list[Row]] = {"all": list(rows)}
    for row in rows:
        groups.setdefault(f"{row.ranks} ranks, {row.sequence} tokens", []).append(row)
    return {
        name: {
            "layouts": len(members),
            "median_error": statistics.median(abs(row.error) for row in members),
            "mean_error": statistics.mean(abs(row.error) for row in members),
            "worst_error": max(abs(row.error) for row in members),
            "bias": statistics.median(row.error for row in members),
            "rank_correlation": rank_correlation(
                [(row.predicted_seconds, row.measured_seconds) for row in members]
            ),
        }
        for name, members in groups.items()
    }


def main() -> None:
    from benchmarks import planner_here  # ranks import what they run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=sorted(LAYOUTS))
    parser.add_argument("--sequence", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    runs = [run for path in options.read for run in json.loads(path.read_text())]
    if not runs:
        for ranks in options.ranks:
            for sequence in options.sequence:
                known = (
                    json.loads(options.save.read_text())[0] if options.save and options.save.exists() else {}
                )
                runs.append(launch(ranks, planner_here.run_on_rank, (sequence, known, options.save)))
    rows = [
        predicted(Machine.from_json(run["machine"]), Measured(**found))
        for run in runs
        for found in run["measured"]
    ]
    if options.json:
        print(json.dumps({"summary": summary(rows), "rows": [asdict(row) for row in rows]}, indent=2))
        return
    print_table(rows)


def print_table(rows: Sequence[Row]) -> None:
    """One line a layout, then the summary."""
    table = Table(title="a step predicted after `fourfold bench`, and measured (medians)")
    for column in ("ranks", "tokens", "layout", "microbatches", "predicted ms", "measured ms", "error"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        times = (f"{seconds * 1e3:.1f}" for seconds in (row.predicted_seconds, row.measured_seconds))
        table.add_row(
            str(row.ranks), str(row.sequence), row.layout, str(row.microbatches), *times, f"{row.error:+.1%}"
        )
    console = Console()
    console.print(table)
    for name, values in summary(rows).items():
        console.print(f"{name}: " + ", ".join(f"{what} {value:.3g}" for what, value in values.items()))


if __name__ == "__main__":
    main()
