"""How long the blocks of a decoder take on a rank: forward, forward again, backward.

[Note: the time of a block] A block's matrix products go one after another (`Machine.product_seconds`), with
q, k and v as one and so gate and up, as libraries choose tiles for either. Fused attention has its own rate.
What is element-wise takes the time of its traffic with memory. All of it is a queue of kernels that the host
fills: a block takes no less than it takes to start them. What tp and cp send while a block computes stands
on its way, but for the messages of a ring, which travel behind attention.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from fourfold.explain import segment_costs
from fourfold.memory import tokens_of_logits
from fourfold.outline import Step, block_of, decoder_cuts
from fourfold.planner.attention import attention_seconds, unfused_attention_seconds
from fourfold.planner.machine import Machine
from fourfold.planner.measured_blocks import measured_seconds
from fourfold.planner.practice import OURS, Practice
from fourfold.program.actions import Kind
from fourfold.specs import AXES, Layout, ModelSpec
from fourfold.traffic import Event

FORWARD_KERNELS = {"embed": 4, "layer": 30, "head": 12}
"""Kernels of a block's forward that is not compiled; its backward has twice as many."""

FUSED = 0.5
"""Of kernels, and of element-wise traffic, what is left where chains of them are compiled to one."""

BACKWARD_TRAFFIC = 1.8
"""Element-wise traffic of a backward by that of its forward."""


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a block by what they are for; see `fourfold.planner.step_time.StepTime`."""

    compute: float = 0.0
    launch: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    total: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.compute + self.launch + self.tp + self.cp)

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.compute + other.compute, self.launch + other.launch, self.tp + other.tp, self.cp + other.cp
        )

    def __mul__(self, factor: float) -> "Part":
        return Part(self.compute * factor, self.launch * factor, self.tp * factor, self.cp * factor)


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block on one microbatch.

    Attributes:
        forward: the first time.
        again: where it runs again for its backward.
        backward: all of it, of which ``weights`` is for weight gradients alone.
    """

    forward: Part
    again: Part
    backward: Part
    weights: Part

    @property
    def whole(self) -> Part:
        """Forward, once again, backward."""
        return self.forward + self.again + self.backward


@dataclass(frozen=True)
class BlockTimes:
    """Of each kind of block."""

    embed: BlockTime
    layer: BlockTime
    head: BlockTime

    def of(self, block: str) -> BlockTime:
        """By the block's name: ``embed``, ``layer.0``, ``head``."""
        found: BlockTime = getattr(self, block.partition(".")[0])
        return found


def block_times(
    step: Step, machine: Machine, practice: Practice = OURS, *, ends: BlockTimes | None = None
) -> BlockTimes:
    """The time of each kind of block of a step. Depends on its microbatch, tp, cp and recomputation alone.

    The embedding and the head are as in ``ends`` if that is given: the times of a step that differs in
    recomputation or in how attention is cut alone.
    """
    one = replace(step, layout=_inside(step.layout), batch=step.rows, microbatches=1)
    blocks = _Blocks(one, machine, practice)
    is_measured = machine.blocks and not practice.compiled and not practice.products

    def of(block: str, times: Callable[[], BlockTime]) -> BlockTime:
        return _measured(one, machine, block, times()) if is_measured else times()

    layer = of("layer", blocks.layer)
    if ends is not None:
        return BlockTimes(ends.embed, layer, ends.head)
    return BlockTimes(of("embed", blocks.embed), layer, of("head", blocks.head))


def _measured(step: Step, machine: Machine, block: str, times: BlockTime) -> BlockTime:
    """What was measured of a block in place of the formulas.

    A forward that runs again takes the share of a forward's time that the formulas give it.
    """

    def put(part: Part, kind: Kind, share: float = 1.0) -> Part:
        seconds = measured_seconds(step, machine, block, kind)
        return part if seconds is None else replace(part, compute=seconds * share, launch=0.0)

    forward = times.forward.compute + times.forward.launch
    again = (times.again.compute + times.again.launch) / forward if forward else 1.0
    return BlockTime(
        put(times.forward, Kind.FORWARD),
        put(times.again, Kind.FORWARD, again),
        put(times.backward, Kind.BACKWARD),
        put(times.weights, Kind.WEIGHT_GRADIENT),
    )


def _inside(layout: Layout) -> Layout:
    """The axes within which a microbatch is computed."""
    options = {axis: option for axis, option in layout.options.items() if axis in ("cp", "tp")}
    return Layout(cp=layout.cp, tp=layout.tp, options=options)


def stride_of(layout: Layout, axis: str) -> int:
    """How many ranks lie between neighbours of an axis, or of joint axes as ``fsdp,cp``."""
    fastest = max(map(AXES.index, axis.split(",")))
    return layout.size(*AXES[fastest + 1 :])


def collective(event: Event, step: Step, machine: Machine) -> float:
    """Seconds of a collective of a step."""
    return machine.collective_seconds(
        event, step.taking_part(event), stride=stride_of(step.layout, event.axis)
    )


@lru_cache(maxsize=64)
def numel_of_blocks(spec: ModelSpec, tp: int, sequence_parallel: bool) -> dict[str, int]:
    """Parameters of each kind of block on a rank of tp."""
    found = {"embed": 0, "layer": 0, "head": 0}
    for name, cut in decoder_cuts(spec, tp, sequence_parallel=sequence_parallel).items():
        block, _, number = block_of(name).partition(".")
        if number in ("", "0"):
            found[block] += prod(cut.local_shape(0))
    return found


class _Blocks:
    """The times of one microbatch's blocks."""

    def __init__(self, step: Step, machine: Machine, practice: Practice):
        self._step, self._machine, self._practice = step, machine, practice
        self._sizes = step.sizes
        self._dtype = practice.products or step.dtype
        self._costs = segment_costs(step, [["embed"], ["layer.0"], ["head"]])
        self._kernels = FUSED if practice.compiled else 1.0

    def _product(self, n: int, k: int) -> float:
        """Of all tokens of a microbatch with a weight of (n, k)."""
        return self._machine.product_seconds(
            self._sizes.tokens, n, k, self._dtype, itemsize=self._step.itemsize
        ) + self._cast(k, n)

    def _backward_product(self, n: int, k: int) -> tuple[float, float]:
        """The input gradient and the weight gradient."""
        tokens, itemsize = self._sizes.tokens, self._step.itemsize
        seconds = self._machine.product_seconds
        return (
            seconds(tokens, k, n, self._dtype, itemsize=itemsize) + self._cast(n, 0),
            seconds(n, k, tokens, self._dtype, itemsize=itemsize),
        )

    def _cast(self, channels: int, weight_rows: int) -> float:
        """What it takes to bring operands to float8: read, and write twice, once transposed."""
        if self._dtype != "float8":
            return 0.0
        elements = channels * (self._sizes.tokens + weight_rows)
        return self._machine.memory_seconds(elements * (self._step.itemsize + 2))

    def _elements(self, nbytes: float) -> float:
        return self._machine.memory_seconds(nbytes) * (FUSED if self._practice.compiled else 1.0)

    def _part(self, block: str, compute: float, *, events: list[Event], hidden: float, times: int) -> Part:
        """A part of a block: what its kernels take, and what it waits for messages and for the host."""
        machine, seconds = self._machine, {"tp": 0.0, "all_to_all": 0.0, "send": 0.0}
        for event, count in Counter(events).items():  # most are alike
            kind = "tp" if event.axis == "tp" else event.op
            if kind != "recv":  # it arrives while as much is sent
                seconds[kind] += count * collective(event, self._step, machine)
        tp = seconds["tp"] * (1 - self._practice.tp_hidden)
        cp = seconds["all_to_all"] + max(0.0, seconds["send"] - hidden)
        started = FORWARD_KERNELS[block] * times * self._kernels + len(events)
        launch = started * (self._practice.launch_seconds or machine.launch_seconds)
        if not self._practice.launches_wait:
            launch = max(0.0, launch - compute - tp - cp)
        return Part(compute, launch, tp, cp)

    def embed(self) -> BlockTime:
        size = self._sizes.entered
        events = self._costs.forward(0, 0), self._costs.backward(0, 0)
        forward = self._part("embed", self._elements(2 * size), events=events[0], hidden=0, times=1)
        backward = self._part("embed", self._elements(4 * size), events=events[1], hidden=0, times=1)
        return BlockTime(forward, forward, backward, backward)

    def layer(self) -> BlockTime:
        products = _products(self._step.spec, self._step.layout.tp)
        forward = {names: self._product(n, k) for names, (n, k) in products.items()}
        backward = [self._backward_product(n, k) for n, k in products.values()]
        attention, attention_backward = (
            attention_seconds(self._step, self._machine, rate=self._practice.attention)
            if self._practice.fused_attention
            else unfused_attention_seconds(self._step, self._machine)
        )
        elements = self._elements(self._layer_traffic())
        back = sum(of_input for of_input, _ in backward)
        weights = sum(of_weight for _, of_weight in backward)
        kept = self._step.recompute.not_again(tp=self._step.layout.tp)
        again = sum(
            seconds * sum(name not in kept for name in names) / len(names)
            for names, seconds in forward.items()
        )
        again_attention = 0.0 if "attention" in kept else attention
        events = self._costs.forward(1, 0), self._costs.forward(1, 0, again=True), self._costs.backward(1, 0)
        parts = [
            self._part("layer", sum(forward.values()) + attention + elements, events=events[0],
                       hidden=attention, times=1),
            self._part("layer", again + again_attention + elements, events=events[1],
                       hidden=again_attention, times=1),
            self._part("layer", back + weights + attention_backward + BACKWARD_TRAFFIC * elements,
                       events=events[2], hidden=attention_backward, times=2),
        ]  # fmt: skip
        return BlockTime(parts[0], parts[1], parts[2], Part(weights))

    def _layer_traffic(self) -> float:
        """Element-wise bytes forward: two norms and two sums, rotation, and the activation."""
        sizes, spec = self._sizes, self._step.spec
        matrices = len([name for name in spec.layer_shapes() if name.startswith("mlp.")])
        return 10 * sizes.stream + 4 * (sizes.queries + sizes.keys) + (4 if matrices > 2 else 2) * sizes.inner

    def head(self) -> BlockTime:
        step, sizes, practice = self._step, self._sizes, self._practice
        columns = -(-step.spec.vocab_size // step.layout.tp)
        logits = sizes.tokens * columns
        own = replace(practice, products=None)
        plain = _Blocks(step, self._machine, own) if practice.products else self  # never in float8
        product = plain._product(columns, step.spec.hidden_size)
        back, weights = plain._backward_product(columns, step.spec.hidden_size)
        softmax = self._elements(logits * (step.itemsize + 2 * sizes.high) + 4 * sizes.stream)
        softmax_back = self._elements(logits * (step.itemsize + sizes.high) + 8 * sizes.stream)
        again = 0.0
        if practice.logits_again:
            chunk = tokens_of_logits(step.spec.vocab_size, itemsize=step.itemsize, ranks=step.layout.tp)
            again = (max(0, sizes.tokens - 1) // chunk * chunk) / sizes.tokens * (product + softmax)
        events = self._costs.forward(2, 0), self._costs.backward(2, 0)
        forward = self._part("head", product + softmax, events=events[0], hidden=0, times=1)
        backward = self._part(
            "head", back + weights + softmax_back + again, events=events[1], hidden=0, times=2
        )
        return BlockTime(forward, forward, backward, Part(weights))


@lru_cache(maxsize=64)
def _products(spec: ModelSpec, tp: int) -> dict[tuple[str, ...], tuple[int, int]]:
    """The products of a layer on a rank of tp, those of one input as one: rows and columns of the weights."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    copies = max(1, tp // spec.num_key_value_heads)
    groups: dict[str, list[tuple[str, int, int]]] = {}
    for name, shape in spec.layer_shapes().items():
        short = name.split(".")[-2]
        if len(shape) < 2:
            continue
        rows, columns = shape[0], shape[1]
        if short in ("o_proj", "down_proj"):
            groups[short] = [(short, rows, columns // tp)]
        else:
            own = rows * (copies if short in ("k_proj", "v_proj") else 1) // tp
            groups.setdefault(name.split(".")[0], []).append((short, own, columns))
    for members in groups.values():
        names = tuple(name for name, _, _ in members)
        found[names] = sum(rows for _, rows, _ in members), members[0][2]
    return found
