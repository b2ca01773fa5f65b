"""The pictures of a run: its loss and its throughput."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fourfold.data import TokenFile
from fourfold.run_folder import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, LIGHT_BLUE, ORANGE, GREY = "#2f5d8c", "#b9cfe4", "#d9772b", "#6b6b6b"
# Enough for four digits of the entropy of any text; counting more would take seconds.
COUNTED_TOKENS = 2**25


def unigram_entropy(tokens: TokenFile) -> float:
    """Return the entropy in nats of a token drawn from the corpus: the loss of knowing only frequencies.

    H = -sum_v p_v ln p_v, with p from the first tokens of the file.
    """
    counts = np.bincount(tokens.tokens[:COUNTED_TOKENS], minlength=1)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def draw_loss(
    path: Path,
    losses: Sequence[float],
    *,
    evaluations: Sequence[tuple[int, float]] = (),
    unigram: float | None = None,
    title: str = "",
) -> None:
    """Draw the loss of every step from step 1 on, the held-out losses, and the unigram entropy as a line.

    Losses that are not finite have no place and are left out.
    """
    figure, axes = _figure(title)
    steps = np.arange(1, len(losses) + 1)
    values = np.asarray(losses, dtype=float)
    values[~np.isfinite(values)] = np.nan  # left out of the line
    width = len(losses) // 100 * 2 + 1
    axes.plot(
        steps, values, color=LIGHT_BLUE if width > 1 else BLUE, linewidth=1, label="training, each step"
    )
    if width > 1:
        axes.plot(
            steps, _smooth(values, width), color=BLUE, linewidth=1.8, label=f"training, mean of {width} steps"
        )
    if unigram is not None:
        axes.axhline(unigram, color=GREY, linestyle=(0, (4, 3)), linewidth=1.2)
        axes.annotate(
            f"unigram entropy {unigram:.2f}",
            (1, unigram),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=GREY,
        )
    evaluations = [(step, loss) for step, loss in evaluations if math.isfinite(loss)]
    if evaluations:
        places, found = zip(*evaluations, strict=True)
        axes.plot(places, found, "o", color=ORANGE, markersize=6, label="held out", zorder=3)
        axes.annotate(
            f"{found[-1]:.3f}", (places[-1], found[-1]), xytext=(-2, 8), textcoords="offset points",
            ha="right", color=ORANGE, fontweight="bold",
        )  # fmt: skip
    _step_axis(axes, len(losses))
    axes.set_ylabel("loss (nats per token)")
    axes.set_ylim(bottom=0)
    # A loss falls from the upper left, and from 0 up there is room below it.
    axes.legend(frameon=False, loc="lower left")
    _save(figure, path)


def draw_throughput(
    path: Path,
    tokens_per_second: Sequence[float],
    *,
    mfu: float | None = None,
    origin: str = "",
    title: str = "",
) -> None:
    """Draw the tokens per second of every step, their median, and what MFU that is."""
    figure, axes = _figure(title)
    values = np.asarray(tokens_per_second, dtype=float)
    steps = np.arange(1, len(values) + 1)
    unit, scale = _unit(float(values.max()))
    axes.plot(steps, values / scale, color=LIGHT_BLUE, linewidth=1)
    axes.plot(steps, values / scale, ".", color=BLUE, markersize=3)
    middle = median(tokens_per_second)
    share = "" if mfu is None else f", MFU {mfu:.1%}"
    axes.axhline(middle / scale, color=ORANGE, linewidth=1.5)
    axes.annotate(
        f"median {middle:,.0f} tokens/s{share}",
        (1, 0.04),
        xycoords="axes fraction",
        ha="right",
        color=ORANGE,
        fontweight="bold",
    )
    _step_axis(axes, len(values))
    axes.set_ylabel(f"{unit}tokens per second, all ranks")
    axes.set_ylim(0, float(values.max()) / scale * 1.08)
    if origin:
        figure.supxlabel(f"MFU against the {origin}", fontsize=8, color=GREY, x=0.99, ha="right")
    _save(figure, path)


PART_COLORS = {
    "compute": BLUE,
    "recompute": LIGHT_BLUE,
    "exposed": ORANGE,
    "bubble": "#a99bc4",
    "optimizer": "#5b8c5a",
    "data": "#b3cfae",
    "other": "#c9c9c9",
}
MOST_BARS = 16
"""Of more ranks, so many are drawn, evenly chosen."""


def draw_time(path: Path, by_rank: Sequence[Mapping[str, float]], *, title: str = "") -> None:
    """Draw where the time of a step went: a bar for each rank, its parts stacked.

    Args:
        path: the picture.
        by_rank: seconds by part, with names as those of `fourfold.measured.TimeSpent.parts`.
        title: over it.
    """
    figure, axes = _figure(title)
    count = min(len(by_rank), MOST_BARS)
    ranks = [index * len(by_rank) // count for index in range(count)]
    scale, unit = (1.0, "seconds") if sum(by_rank[0].values()) >= 1 else (1e3, "milliseconds")
    left = np.zeros(count)
    names = dict.fromkeys(name for rank in ranks for name in by_rank[rank])
    for kind in PART_COLORS:
        of_kind = sorted(name for name in names if name.split(" ")[0] == kind)
        for number, name in enumerate(of_kind):
            widths = np.array([by_rank[rank].get(name, 0.0) for rank in ranks]) * scale
            if widths.any():
                alpha = 1 - 0.25 * number
                axes.barh(
                    range(count), widths, left=left, color=PART_COLORS[kind], alpha=alpha, label=name,
                    height=0.7, edgecolor="white", linewidth=0.5,
                )  # fmt: skip
            left += widths
    axes.set_yticks(range(count), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_xlabel(f"{unit} of a step")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    _save(figure, path)


def _figure(title: str) -> tuple["Figure", "Axes"]:
    """Return a figure of 1200 x 675 pixels that stays readable at 800."""
    from matplotlib.figure import Figure  # loaded here: it takes half a second

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=11)
    return figure, axes


def _step_axis(axes: "Axes", steps: int) -> None:
    """Label the steps with whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.set_xlim(0 if steps > 1 else 0.5, max(steps * 1.01, 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _smooth(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return at each step the mean of the ``width`` values around it; of fewer, evenly, near the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    reach = np.minimum(np.minimum(places, places[::-1]), width // 2)
    return (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)


def _unit(largest: float) -> tuple[str, float]:
    """Return the prefix of the unit, and the factor, for readable ticks."""
    bounds = ((1e6, "million "), (1e3, "thousand "))
    return next(((name, factor) for factor, name in bounds if largest >= 2 * factor), ("", 1.0))


def _save(figure: "Figure", path: Path) -> None:
    with writing(path):
        figure.savefig(path)
