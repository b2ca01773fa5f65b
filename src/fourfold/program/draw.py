"""Draw a program: as text for the terminal, as a picture for the run folder."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from fourfold.program.actions import COMMUNICATION, Action, Kind, Program
from fourfold.program.clock import Span, Timeline, clock, peak_in_flight, unit_seconds

COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f2a541",
    Kind.INPUT_GRADIENT: "#f2a541",
    Kind.WEIGHT_GRADIENT: "#59a14f",
    Kind.GATHER: "#76b7b2",
    Kind.FREE: "#d0d0d0",
    Kind.REDUCE: "#b07aa1",
    Kind.ALL_REDUCE: "#9c5a87",
    Kind.LOSS: "#d4a6c8",
    Kind.UPDATE: "#79706e",
}

_MEANING = {
    Kind.FORWARD: "F  forward",
    Kind.BACKWARD: "B  backward",
    Kind.INPUT_GRADIENT: "I  input gradient",
    Kind.WEIGHT_GRADIENT: "W  weight gradient",
    Kind.GATHER: "GATHER  bring weights",
    Kind.FREE: "weights held until FREE",
    Kind.REDUCE: "REDUCE  sum gradients",
    Kind.ALL_REDUCE: "ALLREDUCE  over replicas",
    Kind.LOSS: "LOSS  sum the loss",
    Kind.UPDATE: "UPDATE  optimizer",
}


def listing(program: Program, *, width: int = 100) -> str:
    """The actions of each rank, in order, as wrapped lines of text."""
    blocks = []
    for rank, actions in enumerate(program.ranks):
        lines = wrap(" ".join(str(action) for action in actions), width=width)
        blocks.append("\n".join([f"rank {rank}:", *(f"  {line}" for line in lines)]))
    return "\n".join(blocks)


def grid(program: Program) -> str:
    """A schedule as text: a row a rank, a column a unit of time; a forward takes one unit, a backward two.

    Each cell shows the kind and the microbatch, and the stage where a rank holds several; dots are idle time.
    """
    timeline = clock(program)
    several = len(program.ranks) < program.num_segments
    columns = round(timeline.seconds)
    labels = [["."] * columns for _ in program.ranks]
    for span in timeline.spans:
        label = str(span.action) if several else f"{span.action.kind}{span.action.turn}"
        for column in range(round(span.start_seconds), round(span.end_seconds)):
            labels[span.rank][column] = label
    cell = max((len(label) for row in labels for label in row), default=1)
    name = len(f"rank {len(program.ranks) - 1}")
    return "\n".join(
        f"{f'rank {rank}':<{name}}  " + " ".join(f"{label:<{cell}}" for label in row).rstrip()
        for rank, row in enumerate(labels)
    )


def summary(program: Program) -> str:
    """Bubble and peak activations of a schedule, with a backward twice as long as a forward."""
    timeline = clock(program)
    peaks = peak_in_flight(program)
    ideal = sum(unit_seconds(action) for action in program.ranks[0])
    return (
        f"bubble {timeline.bubble:.1%} of all ranks' time "
        f"(step {timeline.seconds:g}, work {ideal:g} forwards; a backward counted as two)\n"
        f"most activations held at once, by rank: {', '.join(map(str, peaks))}"
    )


def picture(
    timeline: Timeline, path: Path, *, title: str, names: Callable[[Action], str] = str, unit: str = "ms"
) -> None:
    """Draw a timeline, simulated or measured, as a PNG.

    A rank has a lane for compute, one for communication, and where weights are freed one that shows how long
    each unit's are held: from the start of a GATHER to the end of its FREE. Where a label does not fit, the
    number of the segment or unit stands alone.

    Args:
        timeline: what to draw.
        path: the file to write.
        title: says what it is and whether it is measured.
        names: the label of an action, shown where it fits.
        unit: ``ms`` for times in seconds, or ``forwards`` for simulated units.
    """
    from matplotlib.figure import Figure  # loaded here: floor 0 is imported without it

    scale = 1000.0 if unit == "ms" else 1.0
    total = timeline.seconds * scale
    lanes = {key: (spans, *_rows(spans)) for key, spans in _lanes(timeline).items()}
    heights = [max(1.0, min(count, _MOST_LABELLED_ROWS) / 2.5) for _, _, count in lanes.values()]
    figure = Figure(figsize=(12, 1.7 + 0.5 * sum(heights)), dpi=120, layout="constrained")
    axes = figure.subplots()
    middles = []
    top = 0.0
    for (spans, rows, count), height in zip(lanes.values(), heights, strict=True):
        bar = (height - 0.2) / count
        middles.append(top + height / 2)
        for span, row in zip(spans, rows, strict=True):
            start, length = span.start_seconds * scale, (span.end_seconds - span.start_seconds) * scale
            middle = top + 0.1 + (row + 0.5) * bar
            colour = COLOURS[span.action.kind]
            axes.barh(middle, length, left=start, height=bar, color=colour, edgecolor="white", linewidth=0.4)
            fitting = [label for label in _labels(span.action, names) if length > total * 0.007 * len(label)]
            if fitting and count <= _MOST_LABELLED_ROWS:
                colour = "#303030" if span.action.kind is Kind.FREE else "white"
                where = start + length / 2, middle
                axes.text(*where, fitting[0], ha="center", va="center", fontsize=7.5, color=colour)
        top += height
    axes.set_yticks(middles, [_lane_name(key, lanes) for key in lanes])
    axes.set_ylim(top, 0)
    axes.set_xlim(0, total or 1)
    axes.set_xlabel("milliseconds since the step began" if unit == "ms" else "time in forwards")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    present = {span.action.kind for span in timeline.spans}
    kinds = [kind for kind in _MEANING if kind in present]
    handles = [axes.barh(0, 0, color=COLOURS[kind], label=_MEANING[kind]) for kind in kinds]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=len(kinds), frameon=False, fontsize=8,
        columnspacing=1.2, handlelength=1.2, handletextpad=0.5,
    )  # fmt: skip
    figure.savefig(path)


_MOST_LABELLED_ROWS = 6
"""Of spans at once in a lane: more rows than these are too low for text."""

Lane = tuple[int, str]
"""A rank, and what of it: compute, communication or weights."""


def _lanes(timeline: Timeline) -> dict[Lane, list[Span]]:
    """The spans of each lane, by their start."""
    lanes: dict[Lane, list[Span]] = {}
    gathered: dict[tuple[int, Action], Span] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.rank, span.start_seconds)):
        part = "communication" if span.action.kind in COMMUNICATION else "compute"
        if span.action.kind is Kind.GATHER:
            gathered[span.rank, span.action] = span
        if span.action.kind is Kind.FREE:
            part = "weights"
            gather = gathered[span.rank, replace(span.action, kind=Kind.GATHER)]
            span = replace(span, start_seconds=gather.start_seconds)
        lanes.setdefault((span.rank, part), []).append(span)
    for spans in lanes.values():
        spans.sort(key=lambda span: span.start_seconds)
    return dict(sorted(lanes.items(), key=lambda lane: (lane[0][0], _PARTS.index(lane[0][1]))))


_PARTS = ("compute", "communication", "weights")
"""Of a rank, from top to bottom."""


def _labels(action: Action, names: Callable[[Action], str]) -> list[str]:
    """The name of an action and, shorter, its place."""
    place = [] if action.place is None else [str(action.place)]
    return place if action.kind is Kind.FREE else [names(action), *place]


def _rows(spans: list[Span]) -> tuple[list[int], int]:
    """A row for each span so that none overlap, and how many rows that takes."""
    ends: list[float] = []
    rows = []
    for span in spans:
        free = [row for row, end in enumerate(ends) if end <= span.start_seconds]
        row = free[0] if free else len(ends)
        ends[row : row + 1] = [span.end_seconds]
        rows.append(row)
    return rows, len(ends)


def _lane_name(key: Lane, lanes: Mapping[Lane, object]) -> str:
    rank, part = key
    return f"rank {rank}, {part}" if any(other != "compute" for _, other in lanes) else f"rank {rank}"
