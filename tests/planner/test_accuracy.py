"""The planner is as near to published runs as ``docs/planner.md`` says; and the table is read rightly."""

from collections import Counter
from statistics import mean, median

from benchmarks.planner_accuracy import complete, flops, gold, scored
from benchmarks.planner_sweeps import LEAST, order, question_of
from benchmarks.published_runs import PublishedRun, published


def test_gold_runs_without_a_pipeline_are_predicted_within_the_target() -> None:
    table, dropped = scored(row for row in gold() if row["pp"] == "1")
    errors = [abs(one.error) for one in table]
    assert len(errors) > 100
    assert mean(errors) <= 0.12
    assert median(errors) <= 0.08
    assert dropped["a mixture of experts"] > 0.5 * sum(dropped.values())


def test_layouts_of_published_sweeps_come_in_their_order() -> None:
    table = complete()
    runs = Counter(map(question_of, table))
    found = order(scored(row for row in table if runs[question_of(row)] >= LEAST)[0])
    assert found["sweeps"] > 20
    assert found["rank_correlation_median"] >= 0.9
    assert found["regret_median"] <= 0.01
    assert found["regret_90th_percentile"] <= 0.1


def test_published_rates_are_our_flops() -> None:
    assert flops()["within_1_percent"] >= 0.78


def test_a_row_becomes_the_step_that_ran() -> None:
    row = next(row for row in complete() if row["id"] == "r1080")  # a candidate for BLOOM 176B
    run = published(row)
    assert isinstance(run, PublishedRun)
    assert str(run.step.layout) == "pp12:1f1b,fsdp8:zero1,tp4:allreduce"
    assert (run.step.microbatches, run.step.rows, str(run.step.recompute)) == (128, 2, "full")
    assert abs(run.step.spec.num_parameters / 176.2e9 - 1) < 0.01
    assert [level.ranks for level in run.machine.levels] == [4, 8, 0]
