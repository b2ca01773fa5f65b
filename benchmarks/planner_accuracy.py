"""The planner against published training runs: time, order within sweeps, memory, FLOPs.

    python -m benchmarks.planner_accuracy [--json] [--rows]

Errors are (predicted - measured) / measured. With a factor for each stack, a row is scored with the median
ratio of the *other* rows of its stack, so that it has no part in its own.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.planner_sweeps import Scored, order, order_lines
from benchmarks.published_runs import PublishedRun, model_of, published, rows
from benchmarks.published_software import Row
from fourfold.flops import Convention, model_flops_per_token
from fourfold.planner.fits import USABLE
from fourfold.planner.plans import Question
from fourfold.planner.search import Search
from fourfold.planner.step_time import StepTimes


def main() -> None:
    """Score, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", action="store_true", help="print every row of the gold ones")
    given = parser.parse_args()
    found = score()
    if given.json:
        print(json.dumps(found))
        return
    print(text(found))
    if given.rows:
        for one in sorted(scored(gold())[0], key=lambda one: one.run.row["id"]):
            row = one.run.row
            print(
                row["id"], one.run.stack, row["model"], row["gpu"], one.run.step.layout, f"{one.error:+.1%}"
            )


def gold() -> list[Row]:
    """The rows that are complete and agree with themselves."""
    return [row for row in rows() if row["gold"] == "1"]


def complete() -> list[Row]:
    """All rows with a layout and a rate that nothing speaks against, the gold ones included."""
    return [row for row in rows() if row["tier"] == "full" and not row["flag"]]


def scored(table: Iterable[Row]) -> tuple[list[Scored], Counter[str]]:
    """Predict what can be predicted, and count what cannot, by why."""
    found, dropped = [], Counter[str]()
    times: dict[int, StepTimes] = {}
    kept: list[PublishedRun] = []  # a machine is known by its identity as long as its run lives
    for row in table:
        run = published(row)
        if isinstance(run, str):
            dropped[run] += 1
        elif run.seconds is None:
            dropped["no rate"] += 1
        else:
            kept.append(run)
            known = times.setdefault(
                hash((id(run.machine), run.practice)), StepTimes(run.machine, run.practice)
            )
            found.append(Scored(run, known.exact([run.step])[0]))
    return found, dropped


def score() -> dict[str, Any]:
    """Everything."""
    table, dropped = scored(gold())
    by: dict[str, Callable[[Scored], str]] = {
        "stack": lambda one: one.run.stack,
        "gpu": lambda one: one.run.row["gpu"],
        "products": lambda one: one.run.practice.products or "16 bits",
    }
    everything = scored(complete())[0]
    rest = [one for one in everything if one.run.row["gold"] != "1"]
    return {
        "gold": errors([one.error for one in table]),
        "gold_not_predicted": dict(dropped.most_common()),
        "factor_by_stack": errors(with_factors(table, by["stack"])),
        "factor_by_stack_and_gpu": errors(
            with_factors(table, lambda one: f"{one.run.stack} {one.run.row['gpu']}")
        ),
        "by": {
            name: {
                key: errors([one.error for one in group]) for key, group in sorted(grouped(table, of).items())
            }
            for name, of in by.items()
        },
        "rest": errors([one.error for one in rest]),
        "rest_by_stack": {
            key: errors([one.error for one in group])
            for key, group in sorted(grouped(rest, by["stack"]).items())
        },
        "sweeps": order(everything),
        "memory": memory(),
        "flops": flops(),
    }


def grouped(table: Iterable[Scored], of: Callable[[Scored], str]) -> dict[str, list[Scored]]:
    """By a key."""
    found: dict[str, list[Scored]] = defaultdict(list)
    for one in table:
        found[of(one)].append(one)
    return found


def errors(values: Sequence[float]) -> dict[str, float]:
    """Mean and median of absolute errors, and the mean with its sign."""
    sizes = [abs(value) for value in values]
    if not sizes:
        return {"rows": 0}
    return {"rows": len(sizes), "mean": mean(sizes), "median": median(sizes), "bias": mean(values)}


def with_factors(table: Sequence[Scored], of: Callable[[Scored], str]) -> list[float]:
    """Errors where each row's prediction is divided by the median ratio of the others of its group."""
    found = []
    for group in grouped(table, of).values():
        for one in group:
            others = [other.ratio for other in group if other is not one]
            found.append(one.ratio / (median(others) if others else 1.0) - 1)
    return found


def memory() -> dict[str, Any]:
    """Published peaks against what is predicted; and runs out of memory told from those that fit.

    Megatron's log has what tensors took; other peaks are what a device showed, and its context is in them.
    """
    ratios, told = [], Counter[str]()
    for row in rows():
        run = published(row)
        if isinstance(run, str) or not (row["peak_mem_gb"] or row["tier"] == "oom"):
            continue
        search = Search(
            Question(
                run.step.spec,
                run.machine,
                run.step.layout.world_size,
                run.step.sequence_length,
                run.step.batch,
                practice=run.practice,
            )
        )
        plan = search.plans([run.step])[0]
        if row["tier"] == "oom":
            fits = plan.memory.reserved <= USABLE * run.machine.memory_bytes
            told["out of memory, and predicted to fit" if fits else "out of memory, as predicted"] += 1
            continue
        logged = run.stack in ("Megatron-LM", "Megatron-Bridge", "Megatron (zero bubble)")
        predicted = plan.memory.allocated if logged else plan.memory.reserved
        ratios.append(predicted / (float(row["peak_mem_gb"]) * 1e9) - 1)
    return {"peaks": errors(ratios), "out_of_memory": dict(told)}


def flops() -> dict[str, Any]:
    """Published FLOP/s against tokens a second times our FLOPs of a token, by the row's convention."""
    conventions: dict[str, tuple[Convention, float]] = {
        "model_full_attn": ("square", 1.0),
        "model_causal_attn": ("pairs", 1.0),
        "hw_4x": ("square", 4 / 3),
    }
    found: dict[str, list[bool]] = defaultdict(list)
    for row in rows():
        both = row["tflops_per_gpu"] and row["tokens_per_s_per_gpu"]
        if not both or row["flag"] or row["tflops_convention"] not in conventions or not row["n_layers"]:
            continue
        try:
            spec = model_of(row)
        except ValueError:
            continue
        if isinstance(spec, str):
            continue
        convention, factor = conventions[row["tflops_convention"]]
        ours = model_flops_per_token(spec, int(row["seq_len"]), convention=convention) * factor
        theirs = float(row["tflops_per_gpu"]) * 1e12 / float(row["tokens_per_s_per_gpu"])
        found[row["tflops_convention"]].append(abs(ours / theirs - 1) <= 0.01)
    every = [agrees for group in found.values() for agrees in group]
    return {
        "rows": len(every),
        "within_1_percent": mean(every),
        "by_convention": {name: [len(group), mean(group)] for name, group in found.items()},
    }


def text(found: dict[str, Any]) -> str:
    """The scores as lines."""
    lines = [_line("gold rows, catalogue constants", found["gold"])]
    lines += [_line(f"  {name}", value) for group in found["by"].values() for name, value in group.items()]
    lines += [
        _line("one factor for each stack", found["factor_by_stack"]),
        _line("one factor for each stack and device", found["factor_by_stack_and_gpu"]),
        _line("complete rows beside the gold ones", found["rest"]),
        *(_line(f"  {name}", value) for name, value in found["rest_by_stack"].items()),
    ]
    lines += [
        *order_lines(found["sweeps"]),
        _line("peak memory", found["memory"]["peaks"]),
        f"out of memory: {found['memory']['out_of_memory']}",
        f"FLOPs within 1%: {found['flops']['within_1_percent']:.1%} of {found['flops']['rows']} rows, "
        f"by convention {found['flops']['by_convention']}",
        f"gold rows not predicted: {found['gold_not_predicted']}",
    ]
    return "\n".join(lines)


def _line(name: str, value: dict[str, float]) -> str:
    return (
        f"{name:42} {value['rows']:4.0f} rows: mean {value['mean']:6.1%}, median {value['median']:6.1%}, "
        f"bias {value['bias']:+6.1%}"
    )


if __name__ == "__main__":
    main()
