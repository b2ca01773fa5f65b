"""How long a step takes, and where its time goes.

[Note: the time of a step] A stage of the pipeline takes the time of its blocks (`fourfold.planner.compute`)
and what it waits for the Batch axis: a layer's weights are gathered while the one before computes, its
gradients are summed while the one below computes. What is sent behind computation takes the longer of both,
and slows it (`waits`). The first gather and the last sum of a step have nothing to hide behind. Then the
schedule runs on the clock of `fourfold.planner.pipeline`; or, to look at many layouts, a closed form of its
bubble stands in for it. The update comes last, at the speed of memory.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fourfold.build import Sharding
from fourfold.events import SCALAR_BYTES, SCALAR_DTYPE
from fourfold.outline import Step
from fourfold.planner.compute import (
    BlockTimes,
    Part,
    block_times,
    collective,
    numel_of_blocks,
)
from fourfold.planner.machine import Machine
from fourfold.planner.pipeline import (
    StageSeconds,
    pipeline_seconds,
    stage_array,
    stages_on_ranks,
)
from fourfold.planner.practice import OURS, Practice
from fourfold.planner.stages import Stage, closed_form, loads_of, most_stages, stages_of
from fourfold.traffic import Event

if TYPE_CHECKING:
    from fourfold.planner.pipeline import Columns

OPTIMIZER_BYTES = 30
"""Of memory traffic for a parameter that a rank owns: AdamW reads four float32, writes three and a copy."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the pipeline rank that is busiest, by what they are for; they add up to the step.

    Attributes:
        compute: matrix products, attention and element-wise work, forwards that run again included.
        launch: what kernels wait for the host beyond that.
        tp: collectives of the Channel axis that nothing hides.
        cp: the same of the Sequence axis.
        data: the same of the Batch axis: gathers of weights and sums of gradients.
        bubble: what the rank stands idle in the pipeline, messages included.
        optimizer: the update.
    """

    compute: float = 0.0
    launch: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    data: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(getattr(self, part.name) for part in fields(self))


def step_time(step: Step, machine: Machine, practice: Practice = OURS) -> StepTime:
    """Predict a step, its schedule on the clock. Raises `UserError` where the schedule does not fit."""
    return StepTimes(machine, practice).exact([step])[0]


def waits(sent: float, computed: float, interference: float) -> float:
    """How much longer computation takes with something sent behind it; see [Note: the time of a step]."""
    return max(sent - computed, 0.0) + interference * min(sent, computed)


@dataclass(frozen=True)
class DataTime:
    """Seconds of the Batch axis beyond computation.

    Attributes:
        forward: on each microbatch's forward of a layer, and ``backward`` of its backward.
        once: on a layer once a step.
        ends: of a step that nothing can hide.
        optimizer: of the update on the rank that owns most.
    """

    forward: float
    backward: float
    once: float
    ends: float
    optimizer: float


@dataclass(frozen=True)
class Laid:
    """A step's parts, before its schedule runs.

    Attributes:
        step: which.
        times: of its blocks, and ``data`` of what the Batch axis adds.
        stages: of the pipeline, and ``loads`` what its ranks have of them, each kind once.
        send: seconds of a message between pipeline ranks, behind what they compute; ``stands``, of one for
            which they stand still, the one before a forward or a backward and the one after it at once.
    """

    step: Step
    times: BlockTimes
    data: DataTime
    stages: Sequence[Stage]
    loads: Collection[Stage]
    send: float
    stands: float

    def forward(self, stage: Stage) -> Part:
        """A stage's forward on one microbatch, the Batch axis apart."""
        return _over(stage, self.times.embed.forward, self.times.layer.forward, self.times.head.forward)

    def backward(self, stage: Stage) -> Part:
        """Its backward, with the layers that run again before it."""
        times = self.times
        layer = times.layer.backward
        layer = layer if self.step.recompute.is_none else layer + times.layer.again
        return _over(stage, times.embed.backward, layer, times.head.backward)

    def weights(self, stage: Stage) -> float:
        """Of the backward, the weight gradients."""
        times = self.times
        return _over(stage, times.embed.weights, times.layer.weights, times.head.weights).total

    def seconds(self, stage: Stage) -> tuple[float, float, float]:
        """Of a stage on one microbatch: forward, backward, and of that the weight gradients."""
        forward = self.forward(stage).total + stage.layers * self.data.forward
        backward = self.backward(stage).total + stage.layers * self.data.backward
        return forward + self.stands, backward + self.stands, self.weights(stage)

    def busiest(self) -> tuple[Part, float]:
        """A rank's work on one microbatch, and what the Batch axis adds to it, of the rank with most."""
        found = [self._busy(load) for load in self.loads]
        return max(found, key=lambda one: one[0].total + one[1])

    def _busy(self, load: Stage) -> tuple[Part, float]:
        return self.forward(load) + self.backward(load), load.layers * (
            self.data.forward + self.data.backward
        )

    @property
    def most_layers(self) -> int:
        """Of a pipeline rank."""
        return max(load.layers for load in self.loads)

    @property
    def after(self) -> float:
        """Seconds of the Batch axis once a step."""
        return self.data.once * self.most_layers + self.data.ends


def _over(stage: Stage, embed: Part, layer: Part, head: Part) -> Part:
    found = layer * stage.layers
    found = found + embed if stage.embed else found
    return found + head if stage.head else found


class StepTimes:
    """Predicts steps on one machine; what several of them share is computed once."""

    def __init__(self, machine: Machine, practice: Practice = OURS):
        self.machine, self.practice = machine, practice
        self._blocks: dict[object, BlockTimes] = {}
        self._ends: dict[object, BlockTimes] = {}

    def blocks(self, step: Step) -> BlockTimes:
        """The times of a step's blocks."""
        layout = step.layout
        of_ends = (step.spec, layout.tp, layout.cp, layout.options.get("tp"),
                   step.rows, step.sequence_length, step.dtype)  # fmt: skip
        key = of_ends, layout.options.get("cp"), str(step.recompute)
        if key not in self._blocks:
            found = block_times(step, self.machine, self.practice, ends=self._ends.get(of_ends))
            self._blocks[key] = self._ends[of_ends] = found
        return self._blocks[key]

    def laid(self, step: Step) -> Laid:
        """A step's parts. Raises `UserError` where the schedule does not fit."""
        layout, dealt = step.layout, self.practice.dealt
        of_ranks: Sequence[Sequence[int]] = [[0]]
        if layout.pp > 1:
            of_ranks = stages_on_ranks(layout, step.microbatches, self._most_stages(step))
        stages = stages_of(step.spec, step.sequence_length, sum(map(len, of_ranks)), dealt)
        times = self.blocks(step)
        send = 0.0 if layout.pp == 1 else self._message(step)
        behind, stands = (0.0, send) if self.practice.sends_wait else (send, 0.0)
        loads = set(loads_of(stages, of_ranks))
        most = max(load.layers for load in loads)
        return Laid(step, times, self.data(step, times, most), stages, loads, behind, stands)

    def _most_stages(self, step: Step) -> int:
        return most_stages(step.spec.num_hidden_layers, self.practice.dealt)

    def _message(self, step: Step) -> float:
        """Seconds of a message between pipeline ranks."""
        layout, nbytes = step.layout, step.sizes.stream
        if not self.practice.messages_cut or layout.sequence_parallel(step.sequence_length):
            return collective(Event("send", "pp", nbytes, step.dtype), step, self.machine)
        piece = Event("send", "pp", nbytes // layout.tp, step.dtype)
        gather = Event("all_gather", "tp", nbytes, step.dtype)
        return collective(piece, step, self.machine) + collective(gather, step, self.machine)

    def data(self, step: Step, times: BlockTimes, layers: int) -> DataTime:
        """What the Batch axis adds; ``layers`` are those of the pipeline rank that has most."""
        layout, machine, placement = step.layout, self.machine, step.layout.placement
        numel = numel_of_blocks(step.spec, layout.tp, layout.sequence_parallel(step.sequence_length))
        owners, replicas = layout.size(*layout.shard_axes), layout.size(*layout.replica_axes)
        keep = Sharding.of(layout, step.sharding).keep

        def gather(count: int) -> float:
            return self._sum(step, "all_gather", layout.shard_axes, count * step.itemsize)

        def reduce(count: int) -> float:
            return self._sum(
                step, "reduce_scatter", layout.shard_axes, count * self.practice.reduced_itemsize
            )

        def all_reduce(count: int) -> float:
            piece = count // owners if placement.optimizer else count
            return self._sum(step, "all_reduce", layout.replica_axes, piece * self.practice.reduced_itemsize)

        layer, forward = numel["layer"], times.layer.forward.total
        back = times.layer.backward.total + (0 if step.recompute.is_none else times.layer.again.total)
        slows = machine.interference

        def at_end(seconds: float, computed: float) -> float:
            return seconds if self.practice.sums_wait else waits(seconds, computed, slows)

        of_forward = of_backward = once = ends = 0.0
        if owners > 1 and placement.optimizer:
            gathered, reduced = gather(layer), reduce(layer)
            every_gather = placement.weights and not keep
            every_reduce = placement.gradients and not keep
            if every_gather:
                of_forward = waits(gathered, forward, slows)
            elif self.practice.owners_broadcast:
                ends = self._broadcasts(step, owners, numel["layer"] * layers)
            else:
                once += at_end(gathered, forward)
            sent = (gathered if every_gather else 0.0) + (reduced if every_reduce else 0.0)
            of_backward = waits(sent, back, slows) if sent else 0.0
            if not every_reduce:
                once += at_end(reduced, back)
            ends += gather(numel["embed"]) + reduce(numel["embed"])
        if replicas > 1:
            summed = all_reduce(layer)
            once += at_end(summed, back)
            ends += all_reduce(numel["embed"] or layer)
        own = layer * layers + max(numel["embed"], numel["head"])
        own = own // owners if placement.optimizer else own
        norm = self._sum(step, "all_reduce", ("pp", *layout.shard_axes, "tp"), SCALAR_BYTES)
        optimizer = machine.memory_seconds(own * OPTIMIZER_BYTES) + norm
        return DataTime(of_forward, of_backward, once, ends, optimizer)

    def _broadcasts(self, step: Step, owners: int, count: int) -> float:
        """Of new weights, from each rank that owns some: whole matrices, so no more than there are."""
        senders = min(owners, len(step.spec.parameter_shapes()) // step.layout.pp)
        each = self._sum(step, "broadcast", step.layout.shard_axes, count * step.itemsize // senders)
        return senders * each

    def _sum(self, step: Step, op: str, axes: Sequence[str], nbytes: int) -> float:
        axis = step.layout.axis_name(*axes)
        return collective(Event(op, axis, nbytes, SCALAR_DTYPE), step, self.machine)

    def exact(self, steps: Sequence[Step]) -> list[StepTime]:
        """Predict steps, each with its schedule on the clock; those of one schedule go together."""
        laid = [self.laid(step) for step in steps]
        groups: dict[tuple[str, int, int, int], list[int]] = {}
        for index, step in enumerate(steps):
            key = str(step.layout.schedule), step.layout.pp, step.microbatches, self._most_stages(step)
            groups.setdefault(key, []).append(index)
        found: dict[int, StepTime] = {}
        for key, members in groups.items():
            if key[1] == 1:
                found |= {index: self._added_up(laid[index], None) for index in members}
                continue
            seconds = pipeline_seconds(
                *key,
                *_columns([laid[index] for index in members]),
                steps_overlap=self.practice.steps_overlap,
            )
            found |= {
                index: self._added_up(laid[index], float(value))
                for index, value in zip(members, seconds, strict=True)
            }
        return [found[index] for index in range(len(steps))]

    def _added_up(self, laid: Laid, pipeline_seconds: float | None) -> StepTime:
        """The parts of a step, whose pipeline takes so long; None where there is none."""
        part, data = laid.busiest()
        count = laid.step.microbatches
        busy = count * (part.total + data)
        return StepTime(
            compute=count * part.compute,
            launch=count * part.launch,
            tp=count * part.tp,
            cp=count * part.cp,
            data=count * data + laid.after,
            bubble=0.0 if pipeline_seconds is None else max(0.0, pipeline_seconds - busy),
            optimizer=laid.data.optimizer,
        )

    def quick(self, step: Step) -> StepTime:
        """Predict a step with a closed form of its bubble."""
        laid = self.laid(step)
        if step.layout.pp == 1:
            return self._added_up(laid, None)
        seconds = {stage: laid.seconds(stage) for stage in set(laid.stages)}
        of_stages = [seconds[stage] for stage in laid.stages]
        work = [sum(laid.seconds(load)[:2]) for load in laid.loads]
        whole = sum(forward + backward for forward, backward, _ in of_stages)
        later = sum(weights for _, _, weights in of_stages)
        found = closed_form(
            step.layout.schedule,
            step.microbatches,
            work,
            (whole, later),
            ranks=step.layout.pp,
            chunks=len(laid.stages) // step.layout.pp,
            send=laid.send,
        )
        return self._added_up(laid, found)


def _columns(laid: Sequence[Laid]) -> "tuple[StageSeconds, Columns]":
    of_stages = [[each.seconds(stage) for stage in each.stages] for each in laid]
    forward, backward, weights = (
        stage_array([[stage[part] for stage in stages] for stages in of_stages]) for part in range(3)
    )
    return StageSeconds(forward, backward, weights), stage_array([[each.send] for each in laid])[0]
