"""Draws what `planner_here.py --save` kept: predicted over measured steps, and a step's two timelines.

python benchmarks/planner_here_pictures.py FILES --accuracy PNG --overlay PNG [--layout pp2:zbv]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from matplotlib.figure import Figure

from benchmarks.planner_here import Measured, Row, predicted, simulated_as
from fourfold.planner.machine import Machine
from fourfold.program import Action
from fourfold.program.actions import COMMUNICATION
from fourfold.program.clock import Span
from fourfold.program.draw import COLOURS

COLOURS_OF_RANKS = {2: "#2f5d8c", 4: "#d9772b"}
MARKERS = {128: "o", 256: "s"}


def draw_accuracy(path: Path, rows: Sequence[Row]) -> None:
    """Each layout a point; the band is 15 % to either side."""
    figure = Figure(figsize=(8, 5.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    ends = [
        0.9 * min(min(row.predicted_seconds, row.measured_seconds) for row in rows) * 1e3,
        1.1 * max(max(row.predicted_seconds, row.measured_seconds) for row in rows) * 1e3,
    ]
    axes.fill_between(ends, [0.85 * end for end in ends], [1.15 * end for end in ends], color="#eeeeee")
    axes.plot(ends, ends, color="#999999", linewidth=0.8)
    for ranks, sequence in sorted({(row.ranks, row.sequence) for row in rows}):
        those = [row for row in rows if (row.ranks, row.sequence) == (ranks, sequence)]
        axes.plot(
            [row.measured_seconds * 1e3 for row in those],
            [row.predicted_seconds * 1e3 for row in those],
            MARKERS.get(sequence, "^"),
            color=COLOURS_OF_RANKS[ranks],
            markersize=5,
            alpha=0.8,
            label=f"{ranks} ranks, {sequence} tokens a row",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.0f}")
        axis.set_minor_formatter("{x:.0f}")
    axes.set_xlabel("measured ms of a step")
    axes.set_ylabel("predicted ms of a step")
    axes.set_title("Layouts of a small model on two cores; the band is 15 %", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def draw_overlay(path: Path, machine: Machine, found: Measured) -> None:
    """The timelines of a step as predicted and, below, as it ran, rank by rank."""
    simulated = simulated_as(found, machine)
    ran = [Span(rank, Action.parse(text), begin, end) for rank, text, begin, end in found.spans]
    ranks = simulated.timeline.num_ranks
    figure = Figure(figsize=(11, 1.2 + 0.9 * ranks), dpi=120, layout="constrained")
    axes = figure.subplots()
    for row, (rank, spans) in enumerate(
        (rank, spans) for rank in range(ranks) for spans in (simulated.timeline.spans, ran)
    ):
        for span in spans:
            if span.rank != rank or span.action.kind in COMMUNICATION:
                continue
            begin, length = span.start_seconds * 1e3, (span.end_seconds - span.start_seconds) * 1e3
            axes.barh(
                row, length, left=begin, height=0.85, color=COLOURS[span.action.kind], edgecolor="white",
                linewidth=0.3,
            )  # fmt: skip
    names = [f"rank {rank}, {what}" for rank in range(ranks) for what in ("predicted", "measured")]
    axes.set_yticks(range(2 * ranks), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the step began")
    axes.set_title(
        f"A step on {found.layout}, {found.microbatches} microbatches: forward blue, backward orange, "
        "weight gradients green",
        loc="left",
        fontsize=10,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--accuracy", type=Path)
    parser.add_argument("--overlay", type=Path)
    parser.add_argument("--layout", default="pp2:zbv")
    options = parser.parse_args()
    runs = [
        (Machine.from_json(run["machine"]), [Measured(**found) for found in run["measured"]])
        for path in options.files
        for run in json.loads(path.read_text())
    ]
    if options.accuracy:
        draw_accuracy(
            options.accuracy, [predicted(machine, found) for machine, rows in runs for found in rows]
        )
    if options.overlay:
        machine, found = next(
            (machine, found) for machine, rows in runs for found in rows if found.layout == options.layout
        )
        draw_overlay(options.overlay, machine, found)


if __name__ == "__main__":
    main()
