"""What each thing that is known of other software does for the order of published sweeps: it is left out.

    python -m benchmarks.planner_terms

A `fourfold.planner.practice.Practice` says what software had at its release. Each of its fields in turn is as
of our own engine in all runs; so are the share of Omni-Path that NCCL reached and the boards that no links
join as of other machines. What changes is what that one fact carries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from benchmarks.planner_accuracy import complete, scored
from benchmarks.planner_sweeps import Scored, order, sweeps
from benchmarks.published_runs import PublishedRun
from benchmarks.published_software import chunks_of
from fourfold.planner.catalogue import machine
from fourfold.planner.practice import OURS
from fourfold.planner.step_time import StepTimes


def main() -> None:
    """Score with all that is known, and without each."""
    for name, found in without_each([one for sweep in sweeps(scored(complete())[0]) for one in sweep.runs]):
        print(
            f"{name:24} rank correlation {found['rank_correlation_median']:.2f} (median), "
            f"{found['rank_correlation_mean']:.2f} (mean); regret {found['regret_median']:.1%} (median), "
            f"{found['regret_90th_percentile']:.1%} (90th percentile)"
        )


def without_each(table: Sequence[Scored]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The scores of the order with all that is known, and with one thing left out each, by its name."""
    yield "all", order(table)
    for field in fields(OURS):
        own = getattr(OURS, field.name)
        runs = [_without(one.run, field.name, own) for one in table]
        if any(run.practice != one.run.practice for run, one in zip(runs, table, strict=True)):
            yield field.name, order(_predicted(runs))
    usual = {one.run.row["gpu"]: machine(one.run.row["gpu"].removesuffix("-SXM")) for one in table}
    yield "network", order(_predicted([replace(one.run, machine=usual[one.run.row["gpu"]]) for one in table]))


def _without(run: PublishedRun, name: str, own: Any) -> PublishedRun:
    """The run with a field as of our own engine; as it was where it has more stages than layers."""
    if name == "dealt" and _stages(run) > run.step.spec.num_hidden_layers:
        return run
    return replace(run, practice=replace(run.practice, **{name: own}))


def _stages(run: PublishedRun) -> int:
    return run.step.layout.pp * chunks_of(run.row)


def _predicted(runs: Sequence[PublishedRun]) -> list[Scored]:
    times: dict[tuple[int, object], StepTimes] = {}
    found = []
    for run in runs:
        known = times.setdefault((id(run.machine), run.practice), StepTimes(run.machine, run.practice))
        found.append(Scored(run, known.exact([run.step])[0]))
    return found


if __name__ == "__main__":
    main()
