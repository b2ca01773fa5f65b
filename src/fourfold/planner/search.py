"""Every layout of so many devices, and the best of them.

[Note: the search] Nothing is guessed and nothing is sampled. Degrees, size of a microbatch, schedule,
placement and recomputation are enumerated. What breaks a rule or does not fit is dropped, and counted by why.
For the rest a bound comes first: what a pipeline takes if the Batch axis were free. Those whose bound is
above the worst of the best that are kept cannot come among them; the others get their whole time. The
best are then run on the schedule's clock, which has the last word.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fourfold.errors import UserError
from fourfold.outline import Step
from fourfold.planner.compute import OURS, Practice, numel_of_blocks
from fourfold.planner.fits import USABLE, Held, Sizes, StageLoad, held
from fourfold.planner.machine import Machine
from fourfold.planner.pipeline import pipeline, sizes
from fourfold.planner.step_time import Stage, StepTime, StepTimes, closed_form, loads_of, stages_of
from fourfold.specs import Layout, ModelSpec, ScheduleName
from fourfold.specs.placement import PLACEMENTS, REPLICATED, Placement
from fourfold.specs.recompute_name import RecomputeName
from fourfold.specs.spec import divisors
from fourfold.traffic import Event

POLICIES = ("none", "selective", "full")
"""Recomputation that is tried."""

MOST_ROWS = 8
"""Sequences of a microbatch that are tried, at most."""

LEAST_TOKENS = 256
"""Of a sequence on a rank of cp and tp."""

TIE = 0.03
"""Plans whose times differ by less are not told apart: errors that two layouts of one model do not share."""

KEPT = 50
"""So many of the best run on the clock."""


@dataclass(frozen=True)
class Question:
    """What is to be trained, on what.

    Attributes:
        spec: the model.
        machine: the devices, and ``ranks`` how many.
        sequence_length: tokens of a row.
        batch: rows of a step.
        dtype: of computation.
        practice: of kernels.
    """

    spec: ModelSpec
    machine: Machine
    ranks: int
    sequence_length: int
    batch: int
    dtype: str = "bfloat16"
    practice: Practice = OURS


@dataclass(frozen=True)
class Plan:
    """A layout with its prediction.

    Attributes:
        step: what would run.
        time: of a step.
        memory: of the pipeline rank that holds most, and ``worst_rank`` which that is.
    """

    step: Step
    time: StepTime
    memory: Held
    worst_rank: int

    @property
    def tokens_per_second(self) -> float:
        """On each device."""
        step = self.step
        return step.batch * step.sequence_length / self.time.total / step.layout.world_size


@dataclass
class Found:
    """What a search found.

    Attributes:
        plans: the best, the best first.
        without_pipeline: the best of those that do not cut the Layer axis.
        tried: how many layouts there are, and ``dropped`` how many of them were, by why.
    """

    plans: list[Plan] = field(default_factory=list)
    without_pipeline: Plan | None = None
    tried: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Shape:
    """A choice of everything but how the Batch axis is placed."""

    tp: int
    cp: int
    pp: int
    rows: int
    microbatches: int
    schedule: str | None
    recompute: str

    def layout(self, dp: int = 1, fsdp: int = 1, placed: str | None = None) -> Layout:
        options = {"pp": self.schedule} if self.pp > 1 and self.schedule else {}
        options |= {"fsdp": placed} if fsdp > 1 and placed else {}
        return Layout(pp=self.pp, dp=dp, fsdp=fsdp, cp=self.cp, tp=self.tp, options=options)


class Search:
    """All layouts that a question has, and those that are kept."""

    def __init__(self, question: Question):
        self._asked = question
        self._times = StepTimes(question.machine, question.practice)
        self._found = Found()
        self._best: list[tuple[float, int, Step]] = []
        self._flat: list[tuple[float, int, Step]] = []
        self._number = 0
        self._known_sizes: dict[object, Sizes] = {}
        self._known_pipelines: dict[object, _Pipeline | None] = {}
        self._known_blocks: dict[object, _Inner] = {}
        self._known_sends: dict[object, float] = {}

    def run(self) -> Found:
        """Search, and run the best on the clock. Raises `UserError` where nothing fits."""
        bounded: list[tuple[float, int, _Shape, list[tuple[int, int, str | None]]]] = []
        for shape in self._shapes():
            fitting = self._fitting(shape)
            if fitting:
                bounded.append((self._bound(shape), len(bounded), shape, fitting))
        bounded.sort(key=lambda one: one[:2])
        for bound, _, shape, fitting in bounded:
            heap = self._flat if shape.pp == 1 else self._best
            if len(self._best) >= KEPT and bound >= -self._best[0][0] and (shape.pp > 1 or self._flat):
                self._found.dropped["slower whatever the Batch axis costs"] += len(fitting)
                continue
            for dp, fsdp, placed in fitting:
                self._consider(shape, shape.layout(dp, fsdp, placed), heap)
        return self._on_the_clock()

    def plan(self, step: Step) -> Plan:
        """A step's prediction, whether it fits or not. Raises `UserError` with the rules that it breaks."""
        problems = step.layout.problems(
            step.spec,
            batch=step.batch,
            microbatches=step.microbatches,
            sequence_length=step.sequence_length,
            world_size=None,
        )
        if problems:
            raise UserError(*problems)
        return self._plans([step])[0]

    def fits(self, plan: Plan) -> bool:
        """Whether what a plan reserves is there."""
        return plan.memory.reserved <= USABLE * self._asked.machine.memory_bytes

    def _shapes(self) -> Iterator[_Shape]:
        asked = self._asked
        for tp in divisors(asked.ranks):
            if tp > asked.machine.levels[0].ranks and tp > 1:
                continue
            for cp in divisors(asked.ranks // tp):
                if cp * tp > 1 and asked.sequence_length // (cp * tp) < LEAST_TOKENS:
                    continue
                problems = Layout(cp=cp, tp=tp).problems(
                    asked.spec, batch=asked.batch, microbatches=1,
                    sequence_length=asked.sequence_length, world_size=None,
                )  # fmt: skip
                if problems:
                    self._drop("heads or channels are not divided by tp or cp", 1)
                    continue
                yield from self._in_depth(tp, cp)

    def _in_depth(self, tp: int, cp: int) -> Iterator[_Shape]:
        asked = self._asked
        for pp in divisors(asked.ranks // (tp * cp)):
            if pp > asked.spec.num_hidden_layers:
                self._drop("more stages than layers", 1)
                continue
            data = asked.ranks // (tp * cp * pp)
            if asked.batch % data:
                self._drop("the batch is not divided by dp and fsdp", 1)
                continue
            share = asked.batch // data
            for rows in (rows for rows in divisors(share) if rows <= MOST_ROWS):
                for schedule in self._schedules(pp, share // rows):
                    # Weight gradients that come later keep what recomputation would drop.
                    for recompute in ("none",) if str(schedule).startswith("zb") else POLICIES:
                        yield _Shape(tp, cp, pp, rows, share // rows, schedule, recompute)

    def _schedules(self, pp: int, microbatches: int) -> list[str | None]:
        if pp == 1:
            return [None]
        if microbatches < pp:
            return ["1f1b"]  # most of the time idle; a schedule does not change that
        chunks = [v for v in divisors(-(-self._asked.spec.num_hidden_layers // pp)) if v > 1]
        chunks = [*chunks[:3], *chunks[-1:]] if len(chunks) > 3 else chunks
        names = ["1f1b", "zb-h1", "zbv", *(f"interleaved{v}" for v in chunks)]
        return [name for name in names if self._pipeline(pp, name, microbatches) is not None]

    def _pipeline(self, pp: int, name: str | None, microbatches: int) -> "_Pipeline | None":
        """A pipeline's ranks; None where its schedule does not fit."""
        layers = self._asked.spec.num_hidden_layers
        few = sizes(pp, microbatches)[0] if pp > 1 else 1
        key = pp, name, few
        if key not in self._known_pipelines:
            try:
                found = None if pp == 1 else pipeline(name or "1f1b", pp, few, layers)
            except UserError:
                self._known_pipelines[key] = None
                return None
            of_ranks = [[0]] if found is None else found.stages_of_ranks
            in_flight = [1.0] if found is None else found.in_flight
            stages = stages_of(self._asked.spec, self._asked.sequence_length, sum(map(len, of_ranks)))
            self._known_pipelines[key] = _Pipeline.of(stages, of_ranks, in_flight)
        return self._known_pipelines[key]

    def _sizes(self, shape: _Shape) -> Sizes:
        key = shape.tp, shape.cp, shape.rows, shape.recompute
        if key not in self._known_sizes:
            self._known_sizes[key] = _sizes(self._step(shape, Layout(cp=shape.cp, tp=shape.tp), alone=True))
        return self._known_sizes[key]

    def _step(self, shape: _Shape, layout: Layout, *, alone: bool = False) -> Step:
        asked = self._asked
        return Step(
            asked.spec,
            layout,
            batch=shape.rows if alone else asked.batch,
            sequence_length=asked.sequence_length,
            microbatches=1 if alone else shape.microbatches,
            dtype=asked.dtype,
            recompute=RecomputeName(shape.recompute),
        )

    def _fitting(self, shape: _Shape) -> list[tuple[int, int, str | None]]:
        """Every dp, fsdp and placement with which a shape fits."""
        data = self._asked.ranks // (shape.tp * shape.cp * shape.pp)
        found = []
        for fsdp in reversed(divisors(data)):
            placements: Sequence[str | None] = tuple(PLACEMENTS) if fsdp > 1 else (None,)
            for placed in placements:
                self._found.tried += 1
                if self._worst(shape, fsdp, placed)[0].reserved <= self._usable:
                    found.append((data // fsdp, fsdp, placed))
                else:
                    self._drop("does not fit into memory", 1)
        return found

    @cached_property
    def _usable(self) -> float:
        return USABLE * self._asked.machine.memory_bytes

    def _worst(self, shape: _Shape, fsdp: int, placed: str | None) -> tuple[Held, int]:
        found = self._pipeline(shape.pp, shape.schedule, shape.microbatches)
        assert found is not None
        placement = PLACEMENTS[placed] if fsdp > 1 else REPLICATED
        owners = fsdp * shape.cp if fsdp > 1 else 1
        return _fullest(self._sizes(shape), found, placement, owners, keep=shape.pp > 1)

    def _bound(self, shape: _Shape) -> float:
        """The time of a shape if the Batch axis and the update were free."""
        inner = self._inner(shape)
        found = self._pipeline(shape.pp, shape.schedule, shape.microbatches)
        assert found is not None
        work = [
            layers * inner.layer + embed * inner.embed + head * inner.head
            for layers, embed, head in found.kinds
        ]
        if shape.pp == 1:
            return shape.microbatches * work[0]
        layers = self._asked.spec.num_hidden_layers
        return closed_form(
            ScheduleName.parse(shape.schedule or "1f1b"),
            shape.microbatches,
            work,
            (
                layers * inner.layer + inner.embed + inner.head,
                layers * inner.layer_weights + inner.head_weights,
            ),
            ranks=shape.pp,
            chunks=found.chunks,
            send=self._send(shape),
        )

    def _inner(self, shape: _Shape) -> "_Inner":
        key = shape.tp, shape.cp, shape.rows, shape.recompute
        if key not in self._known_blocks:
            layout = Layout(cp=shape.cp, tp=shape.tp)
            times = self._times.blocks(self._step(shape, layout, alone=True))
            layer = times.layer.forward.total + times.layer.backward.total
            self._known_blocks[key] = _Inner(
                layer if shape.recompute == "none" else layer + times.layer.again.total,
                times.layer.weights.total,
                times.embed.forward.total + times.embed.backward.total,
                times.head.forward.total + times.head.backward.total,
                times.head.weights.total,
            )
        return self._known_blocks[key]

    def _send(self, shape: _Shape) -> float:
        key = shape.tp, shape.cp, shape.rows, shape.pp
        if key not in self._known_sends:
            nbytes = self._sizes(shape).layer.input
            self._known_sends[key] = self._asked.machine.collective_seconds(
                Event("send", "pp", nbytes, self._asked.dtype), shape.pp, stride=self._asked.ranks // shape.pp
            )
        return self._known_sends[key]

    def _consider(self, shape: _Shape, layout: Layout, heap: list[tuple[float, int, Step]]) -> None:
        """Give a layout its whole time, and keep it if it is among the best."""
        step = self._step(shape, layout)
        seconds = self._times.quick(step).total
        self._number += 1
        for kept, most in ((self._best, KEPT), (self._flat, 1)):
            if kept is self._flat and layout.pp > 1:
                continue
            entry = -seconds, -self._number, step
            if len(kept) < most:
                heapq.heappush(kept, entry)
            elif seconds < -kept[0][0]:
                heapq.heappushpop(kept, entry)

    def _on_the_clock(self) -> Found:
        if not self._best:
            raise UserError(self._why_nothing())
        plans = self._plans([step for _, _, step in self._best])
        plans.sort(key=lambda plan: plan.time.total)
        plans = simplest_first(plans)
        self._found.plans = plans
        if self._flat:
            self._found.without_pipeline = self._plans([self._flat[0][2]])[0]
        return self._found

    def _plans(self, steps: Sequence[Step]) -> list[Plan]:
        found = []
        for step, time in zip(steps, self._times.exact(steps), strict=True):
            layout = step.layout
            schedule = str(layout.schedule) if layout.pp > 1 else None
            ranks = self._pipeline(layout.pp, schedule, step.microbatches)
            assert ranks is not None
            owners = layout.size(*layout.shard_axes)
            memory, rank = _fullest(_sizes(step), ranks, layout.placement, owners, keep=layout.pp > 1)
            found.append(Plan(step, time, memory, rank))
        return found

    def _why_nothing(self) -> str:
        reasons = ", ".join(f"{count:,} {why}" for why, count in self._found.dropped.most_common())
        return f"no layout of {self._asked.ranks} devices is possible: {reasons}"

    def _drop(self, why: str, count: int) -> None:
        self._found.dropped[why] += count


def _sizes(step: Step) -> Sizes:
    numel = numel_of_blocks(step.spec, step.layout.tp, step.layout.sequence_parallel(step.sequence_length))
    return Sizes.of(step.sizes, numel, dtype=step.dtype, recompute=step.recompute.name)


def _fullest(
    sizes: Sizes, pipeline: "_Pipeline", placement: Placement, owners: int, *, keep: bool
) -> tuple[Held, int]:
    """What the pipeline rank holds that holds most, and which it is."""
    found = [
        (held(sizes, load, placement=placement, owners=owners, keep=keep), rank)
        for load, rank in pipeline.heavy
    ]
    return max(found, key=lambda one: one[0].allocated)


@dataclass(frozen=True)
class _Inner:
    """Seconds of blocks on one microbatch, forwards and backwards together."""

    layer: float
    layer_weights: float
    embed: float
    head: float
    head_weights: float


@dataclass(frozen=True)
class _Pipeline:
    """What the ranks of a pipeline have: each kind once, and those that may hold most memory."""

    kinds: set[tuple[int, bool, bool]]
    heavy: list[tuple[StageLoad, int]]
    chunks: int

    @classmethod
    def of(
        cls, stages: Sequence[Stage], of_ranks: Sequence[Sequence[int]], in_flight: Sequence[float]
    ) -> "_Pipeline":
        loads = []
        for rank, own in enumerate(of_ranks):
            held_there = [stages[index] for index in own]
            loads.append(
                StageLoad(
                    sum(stage.layers for stage in held_there),
                    any(stage.embed for stage in held_there),
                    any(stage.head for stage in held_there),
                    in_flight[rank],
                )
            )
        most = max(range(len(loads)), key=lambda rank: loads[rank].layers * loads[rank].in_flight)
        widest = max(range(len(loads)), key=lambda rank: loads[rank].layers)
        heavy = {0, len(loads) - 1, most, widest}
        return cls(
            loads_of(stages, of_ranks),
            [(loads[rank], rank) for rank in sorted(heavy)],
            len(stages) // len(loads),
        )


def simplest_first(plans: list[Plan]) -> list[Plan]:
    """The plans by time, but first the simplest of those that cannot be told from the best."""
    ties = [plan for plan in plans if plan.time.total <= plans[0].time.total * (1 + TIE)]
    first = min(ties, key=lambda plan: _complexity(plan.step))
    return [first, *(plan for plan in plans if plan is not first)]


def _complexity(step: Step) -> tuple[int, int]:
    """Of two as fast, the simpler is first: fewer axes that are cut, then less recomputation."""
    axes = sum(step.layout.size(axis) > 1 for axis in ("pp", "dp", "fsdp", "cp", "tp"))
    return axes, POLICIES.index(step.recompute.name)
