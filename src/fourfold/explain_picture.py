"""The picture of an explanation: memory by category and pipeline rank, and the schedule."""

from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.explain import Explanation
from fourfold.memory import Category
from fourfold.program.actions import COMPUTE, Action, Kind
from fourfold.program.draw import COLOURS, on_row
from fourfold.run_folder import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CATEGORY_COLOURS = {
    Category.WEIGHTS: "#4c78a8",
    Category.GRADIENTS: "#f2a541",
    Category.OPTIMIZER: "#79706e",
    Category.GATHERED: "#76b7b2",
    Category.ACTIVATIONS: "#59a14f",
    Category.LOGITS: "#e15759",
    Category.COMMUNICATION: "#b07aa1",
    Category.BATCH: "#d4a6c8",
}


def draw(found: Explanation, path: Path, *, name: str) -> None:
    """Draw it into a PNG or SVG file, by its suffix."""
    from matplotlib.figure import Figure

    ranks = found.step.layout.pp
    height = min(1.2 + 0.16 * ranks, 5.0)
    figure = Figure(figsize=(11, 3.4 + height), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2.6, height))
    _draw_memory(above, found)
    step = found.step
    layout = step.layout.resolved(step.spec)
    above.set_title(
        f"{name} on {layout.world_size:,} ranks, {layout}: {step.microbatches} x {step.rows} sequences of "
        f"{step.sequence_length:,}, recompute {step.recompute}: predicted",
        fontsize=10,
        loc="left",
    )
    _draw_schedule(below, found)
    with writing(path):
        figure.savefig(path)


def _draw_memory(axes: "Axes", found: Explanation) -> None:
    ranks = range(len(found.memory))
    bottom = [0.0 for _ in ranks]
    for category in Category:
        sizes = [held.at_peak[category] / 2**30 for held in found.memory]
        if max(sizes) > 0.002 * max(held.peak / 2**30 for held in found.memory):
            axes.bar(ranks, sizes, bottom=bottom, color=CATEGORY_COLOURS[category], label=category.value)
        bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
    axes.set_ylabel("GiB at the peak")
    axes.set_xlabel("pipeline rank", fontsize=8)
    axes.set_xticks(list(ranks))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_schedule(axes: "Axes", found: Explanation) -> None:
    """Draw the timeline whose bubble is told. What follows at once for the same microbatch is one bar."""
    timeline, ranks = found.timeline, found.step.layout.pp
    lanes: dict[tuple[int, Kind], list[tuple[float, float]]] = {}
    bars: dict[int, list[tuple[Action, float, float]]] = {}
    for span in timeline.spans:
        if span.action.kind in COMPUTE and span.end_seconds > span.start_seconds:
            row, action, start = bars.setdefault(span.rank, []), span.action, span.start_seconds
            if row and row[-1][2] == start and _alike(row[-1][0], action):
                action, start, _ = row.pop()
            row.append((action, start, span.end_seconds))
    for rank, row in bars.items():
        for action, start, end in row:
            lanes.setdefault((rank, action.kind), []).append((start, end - start))
            if end - start > timeline.seconds * 0.02 and ranks <= 16:
                where = start + (end - start) / 2, rank
                axes.text(*where, on_row(action), ha="center", va="center", fontsize=5.5, color="white")
    for (rank, kind), spans in lanes.items():
        edges = [0.3 if length > timeline.seconds * 0.005 else 0.0 for _, length in spans]
        axes.broken_barh(
            spans, (rank - 0.42, 0.84), facecolors=COLOURS[kind], edgecolor="white", linewidths=edges
        )
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_xlim(0, timeline.seconds)
    axes.set_ylabel("pipeline rank")
    axes.set_xticks([])
    axes.set_xlabel(
        f"time, if an action takes as long as its FLOPs and a message none: bubble {timeline.bubble:.1%}",
        fontsize=8,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)


def _alike(one: Action, other: Action) -> bool:
    return (one.kind, one.microbatch) == (other.kind, other.microbatch)
