"""Write the tables and the pictures of ``docs/planner.md`` from `benchmarks.planner_accuracy`.

python -m benchmarks.planner_page
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.planner_accuracy import complete, gold, grouped, score, scored
from benchmarks.planner_sweeps import NOISE, Scored, Sweep, sweeps

PAGE = Path(__file__).parent.parent / "docs" / "planner.md"
PICTURE, SWEEPS = PAGE.with_suffix(".png"), PAGE.with_name("planner_sweeps.png")
START, END = "<!-- written by benchmarks/planner_page.py -->", "<!-- end -->"


def main() -> None:
    """Score, and put the tables where the page has room for them."""
    found = score()
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{tables(found)}\n{END}{after}", encoding="utf-8")
    draw(scored(gold())[0])
    draw_sweeps(sweeps(scored(complete())[0]))
    print(f"wrote {PAGE}, {PICTURE} and {SWEEPS}")


def tables(found: Mapping[str, Any]) -> str:
    """The scores as Markdown."""
    lines = ["", "| published runs | rows | mean error | median | bias |", "|---|---|---|---|---|"]
    named = {
        "**gold, by the catalogue**": found["gold"],
        "gold, one factor for each stack": found["factor_by_stack"],
        "gold, one factor for each stack and device": found["factor_by_stack_and_gpu"],
        "complete beside the gold ones": found["rest"],
    }
    lines += [_row(name, value) for name, value in named.items()]
    for what, groups in found["by"].items():
        lines += [_row(f"gold, {what}: {name}", value) for name, value in groups.items()]
    sweep, memory, flops = found["sweeps"], found["memory"], found["flops"]
    dropped = ", ".join(f"{count} {why}" for why, count in found["gold_not_predicted"].items())
    told = ", ".join(f"{count} {what}" for what, count in memory["out_of_memory"].items())
    lines += [
        "",
        f"Gold rows that are not predicted: {dropped}.",
        "",
        f"Order: in {sweep['sweeps']} published sweeps of at least four layouts the rank correlation is "
        f"{sweep['rank_correlation_median']:.2f} (median; mean {sweep['rank_correlation_mean']:.2f}). What "
        f"the layout that comes first here loses against the best one measured: {sweep['regret_median']:.1%} "
        f"(median), {sweep['regret_90th_percentile']:.1%} (90th percentile). Of two layouts of a sweep the "
        f"faster one is known in {sweep['pairs'][1]:.0%} of {sweep['pairs'][0]} pairs, and in "
        f"{sweep['pairs_beyond_noise'][1]:.0%} of the {sweep['pairs_beyond_noise'][0]} that differ by more "
        f"than {NOISE:.0%}.",
        "",
        "| sweep | layouts | rank correlation | regret |",
        "|---|---|---|---|",
        *(
            f"| {name} | {count} | {correlation:.2f} | {regret:.1%} |"
            for name, count, correlation, regret in sweep["by_sweep"]
        ),
        "",
        f"Memory: {memory['peaks']['rows']} published peaks, mean error {memory['peaks']['mean']:.0%}, "
        f"median {memory['peaks']['median']:.0%}, bias {memory['peaks']['bias']:+.0%}. "
        f"Runs out of memory: {told}.",
        "",
        f"FLOPs: of {flops['rows']} rows that publish both a rate in tokens and one in FLOPs, "
        f"{flops['within_1_percent']:.1%} agree with ours within 1%, by the row's own convention.",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, value: Mapping[str, float]) -> str:
    shares = " | ".join([f"{value['mean']:.1%}", f"{value['median']:.1%}", f"{value['bias']:+.1%}"])
    return f"| {name} | {value['rows']:.0f} | {shares} |"


def draw(table: list[Scored]) -> None:
    """Predicted over measured, a point for each gold row."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 6), layout="constrained")
    for name, group in sorted(grouped(table, lambda one: one.run.stack).items()):
        measured = [one.run.seconds or 0.0 for one in group]
        axes.scatter(measured, [one.ratio for one in group], s=14, label=name, alpha=0.7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhspan(0.88, 1.12, color="black", alpha=0.06)
    axes.set(xscale="log", ylim=(0.3, 1.7), xlabel="measured step, seconds", ylabel="predicted / measured")
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(PICTURE, dpi=110)


def draw_sweeps(table: list[Sweep]) -> None:
    """Measured against predicted rates, each by the best of its sweep; a line joins the layouts of one."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 7), layout="constrained")
    stacks = sorted({sweep.layouts[0].run.stack for sweep in table})
    lines: dict[str, Any] = {}
    for sweep in table:
        points = sorted(
            (one / max(sweep.predicted), other / max(sweep.measured))
            for one, other in zip(sweep.predicted, sweep.measured, strict=True)
        )
        stack = sweep.layouts[0].run.stack
        line = axes.plot(*zip(*points, strict=True), "o-", color=f"C{stacks.index(stack)}", linewidth=0.8)
        lines[stack] = line[0]
    axes.legend(lines.values(), lines)
    axes.plot([0.47, 1], [0.47, 1], color="black", linewidth=0.8)
    axes.set_aspect("equal")
    axes.set(
        xlabel="predicted rate by the best of the sweep", ylabel="measured rate by the best of the sweep"
    )
    figure.savefig(SWEEPS, dpi=110)


if __name__ == "__main__":
    main()
