"""What people ask beside the best layout: by when, how long, how large, what one more knob would give."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from fourfold.errors import UserError
from fourfold.planner.plans import Plan, Question
from fourfold.planner.search import Search

MOST_DOUBLINGS = 12
"""How often a number of devices or of tokens is doubled in search of an end."""

SHORTEST = 1024
"""Tokens of the shortest row that is looked at."""

DEEPEST = 8
"""Times as many layers as the model has are looked at, at most."""


@dataclass(frozen=True)
class Cost:
    """What training on so many tokens takes with a plan.

    Attributes:
        plan: the plan.
        steps: of its batch.
        days: of all devices, and ``device_hours`` of one.
    """

    plan: Plan
    steps: int
    days: float
    device_hours: float


def cost(plan: Plan, tokens: float) -> Cost:
    """What so many tokens take."""
    step = plan.step
    steps = ceil(tokens / (step.batch * step.sequence_length))
    seconds = steps * plan.time.total
    return Cost(plan, steps, seconds / 86400, seconds / 3600 * step.layout.world_size)


def fewest_devices(asked: Question, tokens: float, days: float) -> Cost | None:
    """The fewest devices with which so many tokens take no longer, of the numbers that double a node's.

    None where no number does: the batch ends what may be divided.
    """
    ranks = max(1, min(8, asked.machine.levels[0].ranks))
    for _ in range(MOST_DOUBLINGS):
        try:
            found = Search(replace(asked, ranks=ranks)).run()
        except UserError:
            ranks *= 2
            continue
        answer = cost(found.plans[0], tokens)
        if answer.days <= days:
            return answer
        ranks *= 2
    return None


def longest_sequence(asked: Question) -> int:
    """The longest row that fits of those that double `SHORTEST`, with as many tokens a step; or 0."""
    tokens = asked.batch * asked.sequence_length
    longest, length, end = 0, SHORTEST, end_of_lengths(asked)
    while length <= end:
        batch = tokens // length
        if Search(replace(asked, sequence_length=length, batch=batch)).anything_fits():
            longest = length
        length *= 2
    return longest


def end_of_lengths(asked: Question) -> int:
    """The longest row that is looked at; 0 where a step has fewer than `SHORTEST` tokens."""
    doubled = (SHORTEST << times for times in range(MOST_DOUBLINGS + 1))
    return max((length for length in doubled if length <= asked.batch * asked.sequence_length), default=0)


def deepest_model(asked: Question) -> int:
    """How many layers of the model's width fit, `DEEPEST` times its own at most; 0 where not one does."""

    def fits(layers: int) -> bool:
        spec = asked.spec.replace({"num_hidden_layers": layers})
        return Search(replace(asked, spec=spec)).anything_fits()

    layers = most = asked.spec.num_hidden_layers
    while most < DEEPEST * layers and fits(2 * most):
        most *= 2
    if most == DEEPEST * layers:
        return most
    low, high = (0, most) if not fits(most) else (most, 2 * most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def knobs(asked: Question) -> Iterator[tuple[str, Question]]:
    """The question with one thing changed each."""
    machine, practice = asked.machine, asked.practice
    yield "element-wise kernels compiled", replace(asked, practice=replace(practice, compiled=True))
    if "float8" in machine.peak_flops:
        yield "products in float8", replace(asked, practice=replace(practice, products="float8"))
    if asked.dtype == "bfloat16":
        yield "computation in float32", replace(asked, dtype="float32")
    yield (
        "twice the memory",
        replace(asked, machine=replace(machine, memory_bytes=2 * machine.memory_bytes)),
    )
    if len(machine.levels) > 1:
        last = machine.levels[-1]
        faster = replace(last, bytes_per_second=2 * last.bytes_per_second)
        levels = (*machine.levels[:-1], faster)
        yield "twice the network between nodes", replace(asked, machine=replace(machine, levels=levels))
