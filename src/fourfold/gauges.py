"""What a run measures of itself: its FLOPs, where its time went, what it sent, what it held."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fourfold.explain import memory_of_rank
from fourfold.measured import by_op, gathered
from fourfold.memory import Category
from fourfold.outline import Step
from fourfold.parallel_model import ParallelModel
from fourfold.rank_memory import RankMemory
from fourfold.sequence.rows import Documents
from fourfold.step_flops import Runs, StepFlops, StepWork, runs_of
from fourfold.traffic import Event, counted
from fourfold.training import StepReport


class RunFlops:
    """The FLOPs of the steps of a run, on all ranks together: a formula, from the lengths of documents.

    Args:
        parallel: the model as it is laid out.
        documents: gives the lengths of the documents in each row of the global batch of a step, from 0.
        keeps: the names of the results that are not made again where a layer's forward runs again.
    """

    def __init__(
        self, parallel: ParallelModel, documents: Callable[[int], Documents], *, keeps: frozenset[str]
    ):
        blocks = [piece.blocks for piece in parallel.stages.segments]
        self._documents = documents
        self._microbatches = parallel.program.microbatches
        self._runs: Runs = runs_of((action for _, action in parallel.program.actions()), blocks)
        self._work = StepWork(
            parallel.model.spec,
            parallel.mesh.layout,
            blocks,
            (),
            itemsize=parallel.units[0].weights.itemsize,
            ranks_of_data=parallel.mesh.data.size,
            keeps=keeps,
        )

    def __call__(self, step: int) -> StepFlops:
        """The FLOPs of ``step``, from 0."""
        rows = self._documents(step)
        size = len(rows) // self._microbatches
        documents = [rows[m * size : (m + 1) * size] for m in range(self._microbatches)]
        return replace(self._work, documents=documents).of_runs(self._runs)


@dataclass(frozen=True)
class TrafficRow:
    """What one rank sent in a step by one op on one axis.

    Attributes:
        op: as in ``all_gather``.
        axis: over which ranks.
        calls: how often, as recorded.
        bytes: of the messages, as recorded; see `fourfold.traffic`.
        predicted_calls: by the program and the model's sizes, before anything ran.
        predicted_bytes: the same.
        exposed_seconds: measured: the rank did nothing else. None where that is not known.
        behind_seconds: measured: under way behind other work; the most that was hidden.
    """

    op: str
    axis: str
    calls: int
    bytes: int
    predicted_calls: int
    predicted_bytes: int
    exposed_seconds: float | None
    behind_seconds: float | None


def traffic(report: StepReport, predicted: Sequence[Event]) -> list[TrafficRow]:
    """What a rank sent in a step, beside what was predicted; the most bytes first."""
    there, foreseen = counted(report.events), counted(predicted)
    waited = by_op(report.waits) if report.spent is not None else None
    rows = []
    for op, axis in sorted({*there, *foreseen}, key=lambda key: (-there[key][1] if key in there else 0, key)):
        calls, size = there.get((op, axis), (0, 0))
        predicted_calls, predicted_size = foreseen.get((op, axis), (0, 0))
        times: tuple[float | None, float | None] = (None, None)
        if waited is not None:
            found = waited.get((op, axis))
            times = (found.exposed_seconds, found.behind_seconds) if found else (0.0, 0.0)
        rows.append(TrafficRow(op, axis, calls, size, predicted_calls, predicted_size, *times))
    return rows


@dataclass(frozen=True)
class MemoryRow:
    """What one rank held in a step.

    Attributes:
        rank: which one, of all ranks.
        pipeline_rank: where it stands in a pipeline.
        counted: tensor by tensor, while the step ran.
        predicted: by the program and the model's sizes, before anything ran.
        memory_bytes: that the process took at most so far, or on an accelerator its tensors.
    """

    rank: int
    pipeline_rank: int
    counted: RankMemory
    predicted: RankMemory
    memory_bytes: int


def memory(
    by_rank: Sequence["Held"], step: Step, documents: Documents, *, device_type: str
) -> list[MemoryRow]:
    """What was held beside what was predicted: of each pipeline rank's ranks the one that held most.

    Args:
        by_rank: what was counted.
        step: what was trained.
        documents: in each row of the global batch while it was counted.
        device_type: ``cuda`` or ``cpu``: whose collectives it used.
    """
    of_stage: dict[int, int] = {}
    for rank, held in enumerate(by_rank):
        place = step.layout.coordinates(rank)["pp"]
        before = of_stage.get(place)
        if before is None or held.counted.peak > by_rank[before].counted.peak:
            of_stage[place] = rank
    found = []
    for place, rank in sorted(of_stage.items()):
        own = step.documents_of(rank, documents)
        predicted = memory_of_rank(step, rank, device_type=device_type, documents=own)
        found.append(MemoryRow(rank, place, by_rank[rank].counted, predicted, by_rank[rank].memory_bytes))
    return found


@dataclass(frozen=True)
class Held:
    """What a rank held: ``counted`` in one step, and ``memory_bytes`` that the process took at most."""

    counted: RankMemory
    memory_bytes: int


class Gauges:
    """Adds up what one rank reports of its steps. The first step is left out where there are more."""

    def __init__(self) -> None:
        self.last: StepReport | None = None
        self.held: RankMemory | None = None
        self.held_at_step: int | None = None
        self._sums: Counter[str] = Counter()
        self._steps = 0
        self._is_warm = False

    def add(self, report: StepReport) -> None:
        """Take a step."""
        if self._steps == 1 and not self._is_warm:
            self._sums, self._steps, self._is_warm = Counter(), 0, True
        self.last = report
        if report.held is not None:
            self.held, self.held_at_step = report.held, report.step
        self._steps += 1
        if report.spent is not None:
            self._sums.update(report.spent.parts())

    def mean(self) -> dict[str, float]:
        """The mean seconds of a step by part, of this rank; empty where not known."""
        return {name: seconds / self._steps for name, seconds in self._sums.items()}

    def of_all_ranks(self, parallel: ParallelModel) -> list[dict[str, float]]:
        """The mean seconds of a step by part, of every rank. All ranks call it; empty where not known."""
        by_rank = gathered(self.mean(), parallel.mesh.world, parallel.mesh.device)
        return by_rank if all(by_rank) else []

    def held_by_all_ranks(self, parallel: ParallelModel) -> list[Held]:
        """What every rank held in the step in which it was counted. All ranks call it."""
        assert self.held is not None
        assert self.last is not None
        mine = {"counted": asdict(self.held), "memory_bytes": self.last.memory_bytes}
        return [
            Held(
                RankMemory(
                    **{
                        part: {Category(name): nbytes for name, nbytes in held.items()}
                        for part, held in of_rank["counted"].items()
                    }
                ),
                of_rank["memory_bytes"],
            )
            for of_rank in gathered(mine, parallel.mesh.world, parallel.mesh.device)
        ]


def mean_parts(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over ranks of each part; a rank without a part spent nothing on it."""
    names = dict.fromkeys(name for parts in by_rank for name in parts)
    found = {name: sum(parts.get(name, 0.0) for parts in by_rank) / len(by_rank) for name in names}
    return {name: found[name] for name in sorted(found, key=_place)}


def time_lines(by_rank: Sequence[Mapping[str, float]]) -> list[str]:
    """Where the time of a step went, as text: the mean over ranks, and how far they differ."""
    parts = mean_parts(by_rank)
    total = sum(parts.values())
    who = "on one rank" if len(by_rank) == 1 else f"mean of {len(by_rank)} ranks (least and most)"
    lines = [f"where the {_seconds(total)} of a step went, {who}:"]
    for name, seconds in parts.items():
        if seconds == 0:
            continue
        line = f"  {name:<24}{_seconds(seconds):>10}  {seconds / total:6.1%}"
        if len(by_rank) > 1:
            of_ranks = [of_rank.get(name, 0.0) for of_rank in by_rank]
            line += f"  ({_seconds(min(of_ranks))} to {_seconds(max(of_ranks))})"
        lines.append(line)
    return lines


def traffic_lines(rows: Sequence[TrafficRow]) -> list[str]:
    """What a rank sent in a step, as text."""
    if not rows:
        return []
    lines = [
        "what rank 0 sent in the last step (in brackets: predicted):",
        f"  {'':<24}{'calls':>12}{'MB':>22}{'exposed':>12}{'hidden, at most':>17}",
    ]
    for row in rows:
        calls = f"{row.calls} ({row.predicted_calls})"
        size = f"{row.bytes / 1e6:,.3f} ({row.predicted_bytes / 1e6:,.3f})"
        times = ["-" if t is None else _seconds(t) for t in (row.exposed_seconds, row.behind_seconds)]
        lines.append(f"  {row.op + ' ' + row.axis:<24}{calls:>12}{size:>22}{times[0]:>12}{times[1]:>17}")
    return lines


_SHOWN_BYTES = 1000
"""Of a category of which there is less, as of what a loss sends, there is no line."""


def memory_lines(rows: Sequence[MemoryRow]) -> list[str]:
    """What ranks held, as text: by category of the rank that held most, of others the sum."""
    most = max(rows, key=lambda row: row.counted.peak)
    counted, predicted = most.counted, most.predicted
    who = f"rank {most.rank}" if len(rows) == 1 else f"rank {most.rank} (pipeline rank {most.pipeline_rank})"
    lines = [
        f"what {who} held in a step, tensor by tensor, in MB (in brackets: predicted):",
        f"  {'':<24}{'at the peak':>24}{'at most':>24}",
    ]
    for category in Category:
        if max(counted.most[category], predicted.most[category]) >= _SHOWN_BYTES:
            at_peak = _beside(counted.at_peak[category], predicted.at_peak[category])
            at_most = _beside(counted.most[category], predicted.most[category])
            lines.append(f"  {category.value:<24}{at_peak:>24}{at_most:>24}")
    lines.append(f"  {'all':<24}{_beside(counted.peak, predicted.peak):>24}{_off(most):>24}")
    for row in rows:
        if row is not most:
            name = f"pipeline rank {row.pipeline_rank}, rank {row.rank}"
            lines.append(f"  {name:<24}{_beside(row.counted.peak, row.predicted.peak):>24}{_off(row):>24}")
    lines.append(f"  with all else, {who} took {most.memory_bytes / 1e6:,.0f} MB at most")
    return lines


def _beside(counted: int, predicted: int) -> str:
    return f"{counted / 1e6:,.3f} ({predicted / 1e6:,.3f})"


def _off(row: MemoryRow) -> str:
    return f"{row.counted.peak / row.predicted.peak - 1:+.1%}"


def summary(
    by_rank: Sequence[Mapping[str, float]], rows: Sequence[TrafficRow], held: Sequence[MemoryRow]
) -> dict[str, Any]:
    """All of it as one line of metrics.jsonl."""
    return {
        "seconds_by_part": mean_parts(by_rank) if by_rank else None,
        "seconds_by_part_of_ranks": [dict(parts) for parts in by_rank],
        "traffic_of_rank_0": [asdict(row) for row in rows],
        "memory": [asdict(row) for row in held],
    }


_ORDER = ["compute", "recompute", "exposed", "bubble", "optimizer", "data", "other"]


def _place(name: str) -> tuple[int, str]:
    return _ORDER.index(name.split(" ")[0]), name


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
