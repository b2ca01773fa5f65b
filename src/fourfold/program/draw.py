"""Draw a program: as text for the terminal, as a picture for the run folder."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from fourfold.program.actions import COMMUNICATION, COMPUTE, RECEIVES, SENDS, TRANSFERS, Action, Kind
from fourfold.program.clock import Span, Timeline, Times, clock, peak_activations
from fourfold.program.program import Program

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.RECOMPUTE: "#8fb4d9",
    Kind.BACKWARD: "#f2a541",
    Kind.INPUT_GRADIENT: "#f2a541",
    Kind.WEIGHT_GRADIENT: "#59a14f",
    Kind.GATHER: "#76b7b2",
    Kind.FREE: "#d0d0d0",
    Kind.REDUCE: "#b07aa1",
    Kind.ALL_REDUCE: "#9c5a87",
    Kind.SEND_ACTIVATION: "#2f4b6e",
    Kind.RECV_ACTIVATION: "#2f4b6e",
    Kind.SEND_GRADIENT: "#9a6412",
    Kind.RECV_GRADIENT: "#9a6412",
    Kind.LOSS: "#d4a6c8",
    Kind.UPDATE: "#79706e",
}

_MEANING = {
    Kind.FORWARD: "F  forward",
    Kind.RECOMPUTE: "R  forward again",
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


def grid(program: Program, times: Times | None = None, *, width: int | None = None) -> str:
    """A schedule as text: a row a rank, a column a unit of time, in which every action's time goes up.

    Where that would be more than ``MOST_COLUMNS``, as with measured times, starts and ends are rounded to
    columns of which the shortest action takes up to 4. Each cell shows the kind and the microbatch, and the
    stage where a rank holds several; dots are idle time.

    Args:
        program: a schedule, with its messages where they take time.
        times: how long its actions take; None where F = I = W.
        width: the most characters of a line; what is longer goes on below.

    Returns:
        The text, or a line that says why there is none.
    """
    timeline = clock(program, (times or Times()).of(program))
    shortest = _shortest(timeline)
    exact = _common_column(timeline, shortest)
    fine = min(int(MOST_COLUMNS * shortest / timeline.seconds), 4)
    if exact is None and not fine:
        return f"(no grid: it would have more than the {MOST_COLUMNS} columns that can be read)"
    column = shortest / fine if exact is None else exact
    columns = _at(timeline.seconds, column)
    several = len(program.ranks) < program.num_segments
    labels = [["."] * columns for _ in program.ranks]
    for span in timeline.spans:
        if span.action.kind in COMPUTE:
            label = str(span.action) if several else on_row(span.action)
            for place in range(_at(span.start_seconds, column), _at(span.end_seconds, column)):
                labels[span.rank][place] = label
    cell = max((len(label) for row in labels for label in row), default=1)
    name = len(f"rank {len(program.ranks) - 1}")
    fitting = columns if width is None else max(1, (width - name - 1) // (cell + 1))
    blocks = [
        "\n".join(
            f"{f'rank {rank}':<{name}}  "
            + " ".join(f"{label:<{cell}}" for label in row[first : first + fitting]).rstrip()
            for rank, row in enumerate(labels)
        )
        for first in range(0, max(columns, 1), max(fitting, 1))
    ]
    return "\n\n".join(blocks)


MOST_COLUMNS = 200
"""More columns than these cannot be followed."""


def on_row(action: Action) -> str:
    """The label of a schedule's action on the row of its rank: ``F0``."""
    return f"{action.kind}{action.turn}"


def _at(moment: float, column: float) -> int:
    """The column that begins nearest to a moment: what lasts a column or more has one."""
    return math.floor(moment / column + 0.5)


def _shortest(timeline: Timeline) -> float:
    """How long the shortest compute action lasts, of those that take time."""
    lasts = (span.end_seconds - span.start_seconds for span in timeline.spans if span.action.kind in COMPUTE)
    return min(seconds for seconds in lasts if seconds > 0)


def _common_column(timeline: Timeline, shortest: float) -> float | None:
    """The longest time that all starts and ends of compute are multiples of; None if it is too short.

    They are taken in thousandths of the shortest action, rounded.
    """
    common = Fraction(0)
    for span in timeline.spans:
        if span.action.kind in COMPUTE:
            for seconds in (span.start_seconds, span.end_seconds):
                moment = Fraction(seconds / shortest).limit_denominator(1000)
                scale = math.lcm(common.denominator, moment.denominator)
                common = Fraction(math.gcd(int(common * scale), int(moment * scale)), scale)
                if common and timeline.seconds > common * shortest * (MOST_COLUMNS + 0.5):
                    return None
    return float(common) * shortest


def summary(program: Program, times: Times | None = None) -> str:
    """Makespan, bubble and peak activations of a schedule, with its messages where they take time."""
    timeline = clock(program, (times or Times()).of(program))
    held = ", ".join(f"{peak:.4g}" for peak in peak_activations(program))
    busy = max(timeline.busy_seconds(rank) for rank in range(len(program.ranks)))
    return (
        f"makespan {timeline.seconds:.6g}, of which work {busy:.6g}; bubble {timeline.bubble:.1%}\n"
        f"most activations held at once, in microbatches, by rank: {held}"
    )


def picture(
    timeline: Timeline,
    path: Path,
    *,
    title: str,
    names: Callable[[Action], str] = str,
    unit: str = "ms",
    shaded: bool = False,
) -> None:
    """Draw a timeline, simulated or measured, as a PNG or SVG, by the suffix of the file.

    A rank has a lane for compute, one for communication, and where weights are freed one that shows how long
    each unit's are held: from the start of a GATHER to the end of its FREE. Where a label does not fit, the
    number of the segment or unit stands alone. Messages between neighbouring ranks are thin lines, if few.

    Args:
        timeline: what to draw.
        path: the file to write.
        title: says what it is and whether it is measured.
        names: the label of an action, shown where the longest of its kind would fit.
        unit: ``ms`` for times in seconds, or what a simulated time is counted in, as ``forwards``.
        shaded: of a schedule: the later stages of a rank are lighter, and where a label does not fit, the
            number of the microbatch stands alone.
    """
    from matplotlib.figure import Figure  # loaded here: floor 0 is imported without it

    scale = 1000.0 if unit == "ms" else 1.0
    total = timeline.seconds * scale
    lanes = {key: (spans, *_rows(spans)) for key, spans in _lanes(timeline).items()}
    heights = [max(1.0, min(count, _MOST_LABELLED_ROWS) / 2.5) for _, _, count in lanes.values()]
    figure = Figure(figsize=(12, 1.7 + 0.5 * sum(heights)), dpi=120, layout="constrained")
    axes = figure.subplots()
    lightness = _lightness(timeline) if shaded else {}
    widths = _widths(timeline, names, shaded)
    middles = []
    top = 0.0
    for (spans, rows, count), height in zip(lanes.values(), heights, strict=True):
        bar = (height - 0.2) / count
        middles.append(top + height / 2)
        for span, row in zip(spans, rows, strict=True):
            start, length = span.start_seconds * scale, (span.end_seconds - span.start_seconds) * scale
            middle = top + 0.1 + (row + 0.5) * bar
            lighter = lightness.get((span.rank, span.action.place), 0.0)
            colour = _lighter(COLOURS[span.action.kind], lighter)
            axes.barh(middle, length, left=start, height=bar, color=colour, edgecolor="white", linewidth=0.4)
            labels = zip(_labels(span.action, names, shaded), widths[span.action.kind], strict=True)
            fitting = [label for label, width in labels if length > total * 0.007 * width]
            if fitting and count <= _MOST_LABELLED_ROWS:
                colour = "#303030" if span.action.kind is Kind.FREE or lighter else "white"
                where = start + length / 2, middle
                axes.text(*where, fitting[0], ha="center", va="center", fontsize=7.5, color=colour)
        top += height
    _draw_messages(axes, timeline, dict(zip(lanes, middles, strict=True)), scale)
    axes.set_yticks(middles, [_lane_name(key, lanes) for key in lanes])
    axes.set_ylim(top, 0)
    axes.set_xlim(0, total or 1)
    axes.set_xlabel("milliseconds since the step began" if unit == "ms" else f"time in {unit}")
    _draw_frame(figure, axes, timeline, title, has_lighter=any(lightness.values()))
    figure.savefig(path)


def _draw_frame(figure: "Figure", axes: "Axes", timeline: Timeline, title: str, *, has_lighter: bool) -> None:
    """The title, and what the colours mean that are there."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    present = {span.action.kind for span in timeline.spans}
    kinds = [kind for kind in _MEANING if kind in present]
    handles = [axes.barh(0, 0, color=COLOURS[kind], label=_MEANING[kind]) for kind in kinds]
    if has_lighter:
        pale = _lighter(COLOURS[kinds[0]], 0.5)
        handles.append(axes.barh(0, 0, color=pale, label="lighter: a later stage of the rank"))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8,
        columnspacing=1.2, handlelength=1.2, handletextpad=0.5,
    )  # fmt: skip


_MOST_LABELLED_ROWS = 6
"""Of spans at once in a lane: more rows than these are too low for text."""

_MOST_MESSAGES = 150
"""More lines than these hide what they cross."""

Lane = tuple[int, str]
"""A rank, and what of it: compute, communication or weights."""


def _lanes(timeline: Timeline) -> dict[Lane, list[Span]]:
    """The spans of each lane, by their start."""
    lanes: dict[Lane, list[Span]] = {}
    gathered: dict[tuple[int, Action], Span] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.rank, span.start_seconds)):
        if span.action.kind in TRANSFERS:
            continue
        part = "communication" if span.action.kind in COMMUNICATION else "compute"
        if span.action.kind is Kind.GATHER:
            gathered[span.rank, span.action] = span
        if span.action.kind is Kind.FREE:
            part = "weights"
            gather = gathered[span.rank, span.action._replace(kind=Kind.GATHER)]
            span = replace(span, start_seconds=gather.start_seconds)
        lanes.setdefault((span.rank, part), []).append(span)
    for spans in lanes.values():
        spans.sort(key=lambda span: span.start_seconds)
    return dict(sorted(lanes.items(), key=lambda lane: (lane[0][0], _PARTS.index(lane[0][1]))))


_PARTS = ("compute", "communication", "weights")
"""Of a rank, from top to bottom."""


def _labels(action: Action, names: Callable[[Action], str], by_turn: bool) -> list[str]:
    """The name of an action and, shorter, its place, or its turn."""
    number = action.turn if by_turn else action.place
    short = [] if number is None else [str(number)]
    return short if action.kind is Kind.FREE else [names(action), *short]


def _widths(timeline: Timeline, names: Callable[[Action], str], by_turn: bool) -> dict[Kind, list[int]]:
    """The most characters of a kind's labels, of each form: so equal bars have a label all, or none."""
    found: dict[Kind, list[int]] = {}
    for span in timeline.spans:
        lengths = [len(label) for label in _labels(span.action, names, by_turn)]
        before = found.setdefault(span.action.kind, lengths)
        found[span.action.kind] = [max(pair) for pair in zip(before, lengths, strict=True)]
    return found


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


def _draw_messages(axes: "Axes", timeline: Timeline, middles: Mapping[Lane, float], scale: float) -> None:
    """A line for each message that takes time, from the lane of its sender to that of a neighbour."""
    receivers = {span.action: span.rank for span in timeline.spans if span.action.kind in RECEIVES}
    lines = []
    for span in timeline.spans:
        if span.action.kind in SENDS and span.end_seconds > span.start_seconds:
            receiver = receivers.get(span.action.other_end, span.rank)  # a timeline may be of one rank only
            if abs(receiver - span.rank) == 1:
                lines.append((span, receiver))
    for span, receiver in lines if len(lines) <= _MOST_MESSAGES else ():
        edge = 0.4 if receiver > span.rank else -0.4
        axes.plot(
            [span.start_seconds * scale, span.end_seconds * scale],
            [middles[span.rank, "compute"] + edge, middles[receiver, "compute"] - edge],
            color=COLOURS[span.action.kind],
            linewidth=0.8,
        )


def _lightness(timeline: Timeline) -> dict[tuple[int, int | None], float]:
    """How much lighter each (rank, stage) is drawn: the first of a rank not at all, the last half."""
    stages: dict[int, set[int]] = {}
    for span in timeline.spans:
        if span.action.kind in COMPUTE:
            stages.setdefault(span.rank, set()).add(span.action.segment)
    return {
        (rank, stage): 0.5 * number / max(len(found) - 1, 1)
        for rank, found in stages.items()
        for number, stage in enumerate(sorted(found))
    }


def _lighter(colour: str, lightness: float) -> str:
    """A colour, mixed with so much white."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * lightness):02x}" for part in parts)
