"""Every layout of so many devices, and the best of them.

[Note: the search] Nothing is guessed and nothing is sampled. Degrees, size of a microbatch, schedule,
placement and recomputation are enumerated. What breaks a rule or does not fit is dropped, and counted by why.
For the rest a bound comes first: what a pipeline takes if the Batch axis were free. Those whose bound is
above the worst of the best that are kept cannot come among them; the others get their whole time. The
best are then run on the schedule's clock, which has the last word.
"""

import heapq
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from operator import add

from fourfold.errors import UserError
from fourfold.outline import Step
from fourfold.planner.expert import layouts_by_hand
from fourfold.planner.fits import USABLE, Sizes, activations_of, held
from fourfold.planner.pipeline import in_flight, stages_of_ranks
from fourfold.planner.plans import POLICIES, Found, Plan, Question, simplest_first
from fourfold.planner.shapes import BlockSeconds, RankLoads, Shape, Way, block_sizes, fullest, placements_of
from fourfold.planner.stages import closed_form, most_stages, stages_of
from fourfold.planner.step_time import StepTimes
from fourfold.specs import Layout, ScheduleName
from fourfold.specs.placement import PLACEMENTS, REPLICATED
from fourfold.specs.recompute_name import RecomputeName
from fourfold.specs.spec import divisors
from fourfold.traffic import Event

MOST_ROWS = 8
"""Sequences of a microbatch that are tried, at most."""

LEAST_TOKENS = 256
"""Of a sequence on a rank of cp and tp."""

KEPT = 50
"""So many of the best run on the clock."""


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
        self._known_pipelines: dict[object, RankLoads | None] = {}
        self._known_blocks: dict[object, BlockSeconds] = {}
        self._known_sends: dict[object, float] = {}
        self._known_rest: dict[object, list[float]] = {}

    def run(self) -> Found:
        """Search, and run the best on the clock. Raises `UserError` where nothing fits."""
        bounded: list[tuple[float, int, Shape, list[Way]]] = []
        for shape in self._shapes():
            fitting, ways = self._fitting(shape)
            self._found.tried += ways
            self._drop("does not fit into memory", ways - len(fitting))
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

    def anything_fits(self) -> bool:
        """Whether there is a layout that fits at all."""
        return any(self._fitting(shape)[0] for shape in self._shapes())

    def by_hand(self) -> Plan | None:
        """The layout that an expert would write down, None where none of them fits."""
        for shape, way in layouts_by_hand(self._asked):
            step = self._step(shape, shape.layout(*way))
            if not step.problems() and way in self._fitting(shape)[0]:
                return self.plan(step)
        return None

    def plan(self, step: Step) -> Plan:
        """A step's prediction, whether it fits or not. Raises `UserError` with the rules that it breaks."""
        if problems := step.problems():
            raise UserError(*problems)
        return self.plans([step])[0]

    def fits(self, plan: Plan) -> bool:
        """Whether what a plan reserves is there."""
        return plan.memory.reserved <= USABLE * self._asked.machine.memory_bytes

    def _shapes(self) -> Iterator[Shape]:
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

    def _in_depth(self, tp: int, cp: int) -> Iterator[Shape]:
        asked, contexts = self._asked, self._contexts(tp, cp)
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
                    policies = ("none",) if str(schedule).startswith("zb") else POLICIES
                    for choice in product(policies, contexts):
                        yield Shape(tp, cp, pp, rows, share // rows, schedule, *choice)

    def _contexts(self, tp: int, cp: int) -> list[str | None]:
        """Every option of cp that the heads allow: a ring, Ulysses, and Ulysses in groups within a ring."""
        if cp == 1:
            return [None]
        open_ = Layout(cp=cp, tp=tp)
        return [open_.with_ulysses(size).options["cp"] for size in open_.ulysses_sizes(self._asked.spec)]

    def _schedules(self, pp: int, microbatches: int) -> list[str | None]:
        if pp == 1:
            return [None]
        if microbatches < pp:
            return ["1f1b"]  # most of the time idle; a schedule does not change that
        chunks = [v for v in divisors(-(-self._asked.spec.num_hidden_layers // pp)) if v > 1]
        chunks = [*chunks[:3], *chunks[-1:]] if len(chunks) > 3 else chunks
        names = ["1f1b", "zb-h1", "zbv", *(f"interleaved{v}" for v in chunks)]
        return [name for name in names if self._pipeline(pp, name, microbatches) is not None]

    def _pipeline(self, pp: int, name: str | None, microbatches: int) -> RankLoads | None:
        """A pipeline's ranks; None where its schedule does not fit."""
        dealt = self._asked.practice.dealt
        key = pp, name, min(microbatches, 3 * pp)  # with more, no more are in flight
        if key not in self._known_pipelines:
            schedule = ScheduleName.parse(name or "1f1b")
            try:
                layers = most_stages(self._asked.spec.num_hidden_layers, dealt)
                of_ranks = stages_of_ranks(schedule, pp, layers)
            except UserError:
                self._known_pipelines[key] = None
                return None
            stages = stages_of(self._asked.spec, self._asked.sequence_length, sum(map(len, of_ranks)), dealt)
            flying = in_flight(schedule, pp, microbatches)
            self._known_pipelines[key] = RankLoads.of(stages, of_ranks, flying)
        return self._known_pipelines[key]

    def _sizes(self, shape: Shape) -> Sizes:
        key = shape.tp, shape.cp, shape.rows, shape.recompute, shape.context
        if key not in self._known_sizes:
            alone = self._step(shape, shape.inside, alone=True)
            self._known_sizes[key] = block_sizes(alone, self._asked.practice)
        return self._known_sizes[key]

    def _step(self, shape: Shape, layout: Layout, *, alone: bool = False) -> Step:
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

    def _fitting(self, shape: Shape) -> tuple[list[Way], int]:
        """Every dp, fsdp and placement with which a shape fits; and how many there are."""
        data = self._asked.ranks // (shape.tp * shape.cp * shape.pp)
        ways = placements_of(data)
        found = self._pipeline(shape.pp, shape.schedule, shape.microbatches)
        assert found is not None
        kept = self._kept(shape, found)
        fitting: list[Way] = []
        if max(kept) <= self._usable:
            too_much: set[str | None] = set()  # with fewer owners it is more
            for fsdp, placed in ways:
                if fsdp > 1 and placed in too_much:
                    continue
                rest = self._rest(shape, found, fsdp, placed)
                if max(map(add, rest, kept)) <= self._usable:
                    fitting.append((data // fsdp, fsdp, placed))
                else:
                    too_much.add(placed)
        return fitting, len(ways)

    def _rest(self, shape: Shape, found: RankLoads, fsdp: int, placed: str | None) -> list[float]:
        """What ranks reserve beside activations: neither the microbatch nor recomputation changes it."""
        key = shape.tp, shape.cp, shape.pp, id(found), fsdp, placed
        if key not in self._known_rest:
            placement = PLACEMENTS[placed] if fsdp > 1 else REPLICATED
            owners = fsdp * shape.cp if fsdp > 1 else 1
            sizes, none = self._sizes(shape), (0.0, 0.0)
            self._known_rest[key] = [
                held(
                    sizes, load, placement=placement, owners=owners, keep=shape.pp > 1, activations=none
                ).reserved
                for load, _ in found.heavy
            ]
        return self._known_rest[key]

    @cached_property
    def _usable(self) -> float:
        return USABLE * self._asked.machine.memory_bytes

    def _bound(self, shape: Shape) -> float:
        """The time of a shape if the Batch axis and the update were free."""
        inner = self._inner(shape)
        found = self._pipeline(shape.pp, shape.schedule, shape.microbatches)
        assert found is not None
        work = [
            load.layers * inner.layer + load.embed * inner.embed + load.head * inner.head
            for load in found.kinds
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

    def _inner(self, shape: Shape) -> BlockSeconds:
        key = shape.tp, shape.cp, shape.rows, shape.recompute, shape.context
        if key not in self._known_blocks:
            times = self._times.blocks(self._step(shape, shape.inside, alone=True))
            layer = times.layer.forward.total + times.layer.backward.total
            self._known_blocks[key] = BlockSeconds(
                layer if shape.recompute == "none" else layer + times.layer.again.total,
                times.layer.weights.total,
                times.embed.forward.total + times.embed.backward.total,
                times.head.forward.total + times.head.backward.total,
                times.head.weights.total,
            )
        return self._known_blocks[key]

    def _send(self, shape: Shape) -> float:
        key = shape.tp, shape.cp, shape.rows, shape.pp
        if key not in self._known_sends:
            nbytes = self._sizes(shape).layer.input
            self._known_sends[key] = self._asked.machine.collective_seconds(
                Event("send", "pp", nbytes, self._asked.dtype), shape.pp, stride=self._asked.ranks // shape.pp
            )
        return self._known_sends[key]

    def _consider(self, shape: Shape, layout: Layout, heap: list[tuple[float, int, Step]]) -> None:
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
        plans = self.plans([step for _, _, step in self._best])
        plans.sort(key=lambda plan: plan.time.total)
        plans = simplest_first(plans)
        self._found.plans = plans
        if self._flat:
            self._found.without_pipeline = self.plans([self._flat[0][2]])[0]
        self._found.by_hand = self.by_hand()
        return self._found

    def plans(self, steps: Sequence[Step]) -> list[Plan]:
        """Predictions of steps that break no rule, whether they fit or not; in one go for those alike."""
        found = []
        for step, time in zip(steps, self._times.exact(steps), strict=True):
            layout = step.layout
            schedule = str(layout.schedule) if layout.pp > 1 else None
            ranks = self._pipeline(layout.pp, schedule, step.microbatches)
            assert ranks is not None
            owners = layout.size(*layout.shard_axes)
            sizes = block_sizes(step, self._asked.practice)
            memory, rank = fullest(sizes, ranks, layout.placement, owners, keep=layout.pp > 1)
            found.append(Plan(step, time, memory, rank))
        return found

    def _why_nothing(self) -> str:
        """Why no layout is possible, and by how much memory is too small where that is it."""
        asked = self._asked
        reasons = ", ".join(f"{count:,} {why}" for why, count in self._found.dropped.most_common())
        devices = f"{asked.ranks:,} device{'s' if asked.ranks > 1 else ''}"
        least = min(map(self._least, self._shapes()), default=None)
        missing = ""
        if least is not None:
            missing = (
                f"; the layout that takes least needs {least / 1e9:,.1f} GB of {self._usable / 1e9:,.1f}: "
                "use more devices, shorter sequences, or a device with more memory"
            )
        return f"no layout of {devices} is possible: {reasons}{missing}"

    def _least(self, shape: Shape) -> float:
        """What the fullest rank of a shape reserves with the Batch axis in as many pieces as there are."""
        found = self._pipeline(shape.pp, shape.schedule, shape.microbatches)
        assert found is not None
        data = self._asked.ranks // (shape.tp * shape.cp * shape.pp)
        return min(
            max(map(add, self._rest(shape, found, fsdp, placed), self._kept(shape, found)))
            for fsdp, placed in placements_of(data)
            if fsdp == data
        )

    def _kept(self, shape: Shape, found: RankLoads) -> list[float]:
        """What ranks reserve for activations."""
        sizes = self._sizes(shape)
        return [(1 + sizes.fragmentation) * sum(activations_of(sizes, load)) for load, _ in found.heavy]

    def _drop(self, why: str, count: int) -> None:
        self._found.dropped[why] += count
