"""Order: how the planner ranks the layouts of published sweeps, and what its choice would have lost.

[Note: a sweep] Runs that answer one question: the same source, model (every size of it), length of rows,
batch, devices, nodes, network, precision and compiler, by the same software on the same day as far as the
source says. They differ in layout, microbatch and recomputation alone. Sources themselves ask not to compare
across that: "A100s PCI-Express/NUMA was improved today", "do not compare these numbers to the previous ones"
(BigScience's chronicles). The batch counts, too: a pipeline with more microbatches is faster whatever its
layout. One layout may be there several times: the best of its rates counts, as noise only slows down.

Runs of one layout of one sweep differ by 3% (median) and by up to 9%, and by 80% on the V100 of 2021
(`repeats`). Of two layouts that are nearer than `NOISE` the order is not known; so next to all pairs stand
those farther apart.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.published_runs import PublishedRun
from benchmarks.published_software import Row
from fourfold.planner.step_time import StepTime

LEAST = 4
"""Layouts that a sweep has at least, for an order and a choice to mean something."""

NOISE = 0.05
"""By so much two runs of one layout differ; between releases of one software it is 5 to 15%."""

ONE_QUESTION = (
    "source", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "seq_len", "global_batch_seqs",
    "gpu", "n_gpus", "gpus_per_node", "inter_node_bw", "precision", "compile",
)  # fmt: skip

EXPERIMENT = re.compile(
    r"section '[^']*'|date [\d-]+|mixes branches|container [\d.]+|dgxc-benchmarking [\d.]+|task=[^;]*"
)
"""What notes say of the software and the day."""


@dataclass(frozen=True)
class Scored:
    """A published run with its prediction."""

    run: PublishedRun
    time: StepTime

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        assert self.run.seconds is not None
        return self.time.total / self.run.seconds

    @property
    def error(self) -> float:
        """Relative."""
        return self.ratio - 1

    @property
    def rate(self) -> float:
        """Tokens a second, as measured."""
        assert self.run.seconds is not None
        return self.run.step.batch * self.run.step.sequence_length / self.run.seconds


@dataclass(frozen=True)
class Sweep:
    """The layouts of one question, each once, and all runs of them."""

    name: str
    layouts: list[Scored]
    runs: list[Scored]

    @property
    def measured(self) -> list[float]:
        """Tokens a second."""
        return [one.rate for one in self.layouts]

    @property
    def predicted(self) -> list[float]:
        """The same."""
        return [one.rate / one.ratio for one in self.layouts]

    @property
    def rank_correlation(self) -> float:
        """Spearman's."""
        places = [
            np.argsort(np.argsort(values)).astype(np.float64) for values in (self.measured, self.predicted)
        ]
        return float(np.corrcoef(places[0], places[1])[0, 1])

    @property
    def regret(self) -> float:
        """By how much the best layout is faster than the one that would have been chosen."""
        measured, predicted = self.measured, self.predicted
        return max(measured) / measured[predicted.index(max(predicted))] - 1

    def pairs(self) -> list[tuple[float, bool]]:
        """Of every two layouts by how much they differ, and whether the faster one is known."""
        found = []
        for one, other in combinations(self.layouts, 2):
            better, worse = (one, other) if one.rate > other.rate else (other, one)
            known = better.rate / better.ratio > worse.rate / worse.ratio
            found.append((better.rate / worse.rate - 1, known))
        return found


def question_of(row: Row) -> tuple[str, ...]:
    """What a row shares with those of its sweep."""
    return *(row[name] for name in ONE_QUESTION), *EXPERIMENT.findall(row["notes"])


def sweeps(table: Iterable[Scored]) -> list[Sweep]:
    """All that have layouts enough; see [Note: a sweep]."""
    questions: dict[tuple[str, ...], list[Scored]] = defaultdict(list)
    for one in table:
        questions[question_of(one.run.row)].append(one)
    found = []
    for runs in questions.values():
        best: dict[tuple[object, ...], Scored] = {}
        for one in runs:
            step = one.run.step
            key = str(step.layout), step.rows, str(step.recompute)
            if key not in best or one.rate > best[key].rate:
                best[key] = one
        if len(best) >= LEAST:
            row = runs[0].run.row
            name = f"{row['model']}, {row['n_gpus']} {row['gpu']}, batch {row['global_batch_seqs']}"
            if day := re.search(r"date ([\d-]+)", row["notes"]):
                name += f", on {day[1]}"
            found.append(Sweep(f"{runs[0].run.stack}: {name}", list(best.values()), runs))
    return found


def repeats(table: Iterable[Scored]) -> list[float]:
    """By how much the fastest and the slowest run of one layout differ, of those that ran several times."""
    rates: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for one in table:
        step = one.run.step
        key = (*question_of(one.run.row), str(step.layout), step.rows, str(step.recompute))
        rates[key].append(one.rate)
    return [max(values) / min(values) - 1 for values in rates.values() if len(values) > 1]


def order(table: Sequence[Scored]) -> dict[str, Any]:
    """The scores of all sweeps together, and of each."""
    found = sweeps(table)
    regrets = [sweep.regret for sweep in found]
    correlations = [sweep.rank_correlation for sweep in found]
    pairs = [pair for sweep in found for pair in sweep.pairs()]
    apart = [known for difference, known in pairs if difference > NOISE]
    return {
        "sweeps": len(found),
        "rank_correlation_median": median(correlations),
        "rank_correlation_mean": mean(correlations),
        "regret_median": median(regrets),
        "regret_90th_percentile": float(np.quantile(regrets, 0.9)),
        "pairs": [len(pairs), mean(known for _, known in pairs)],
        "pairs_beyond_noise": [len(apart), mean(apart)],
        "repeats": repeats(table),
        "by_sweep": [
            [sweep.name, len(sweep.layouts), sweep.rank_correlation, sweep.regret] for sweep in found
        ],
    }


def order_lines(found: dict[str, Any]) -> list[str]:
    """The scores as text."""
    every, apart = found["pairs"], found["pairs_beyond_noise"]
    return [
        f"{found['sweeps']} sweeps: rank correlation {found['rank_correlation_median']:.2f} (median), "
        f"{found['rank_correlation_mean']:.2f} (mean); regret {found['regret_median']:.1%} (median), "
        f"{found['regret_90th_percentile']:.1%} (90th percentile)",
        *(
            f"  {name}: {count} layouts, rank correlation {correlation:.2f}, regret {regret:.1%}"
            for name, count, correlation, regret in found["by_sweep"]
        ),
        f"pairs of layouts in the right order: {every[1]:.0%} of {every[0]}; of the {apart[0]} that differ "
        f"by more than {NOISE:.0%}: {apart[1]:.0%}",
    ]
