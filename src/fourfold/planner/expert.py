"""The layouts that an expert would write down, in the order in which they would be tried."""

from collections.abc import Iterator

from fourfold.outline import Step
from fourfold.planner.context import chosen
from fourfold.planner.plans import POLICIES, Question
from fourfold.planner.shapes import Shape, Way
from fourfold.specs import Layout

LONGEST_UNCUT = 16384
"""Tokens of a row up to which an expert leaves it whole."""

MOST_SHARDS = 1024
"""Ranks over which an expert shards weights: over more, gathers of small pieces take longer than layers."""


def layouts_by_hand(asked: Question) -> Iterator[tuple[Shape, Way]]:
    """Sharded weights, the least recomputation first; else the same beside tensor parallelism over a node;
    else that and a pipeline, rather with more stages than with more recomputation.

    Pipelines have ZeRO-1, two stages a rank, and a microbatch of one row for each stage at least. Rows longer
    than `LONGEST_UNCUT` are cut.
    """
    node, cp = min(8, asked.machine.levels[0].ranks), 1
    while asked.sequence_length // cp > LONGEST_UNCUT:
        cp *= 2
    flat = [(tp, 1, recompute) for tp in (1, node) for recompute in POLICIES]
    deep = [(node, 2**power, recompute) for recompute in POLICIES for power in range(1, 8)]
    for tp, pp, recompute in [*flat, *deep]:
        layers, data = asked.spec.num_hidden_layers, asked.ranks // (tp * cp * pp)
        if pp > layers or data * tp * cp * pp != asked.ranks or data == 0 or asked.batch % data:
            continue
        microbatches = asked.batch // data
        if data * cp > MOST_SHARDS if pp == 1 else microbatches < pp:
            continue
        schedule = None if pp == 1 else "interleaved2" if 2 * pp <= layers else "1f1b"
        placed = "zero1" if pp > 1 and data > 1 else None
        shape = Shape(tp, cp, pp, 1, microbatches, schedule, recompute, _context(asked, tp, cp))
        yield shape, (1, data, placed)


def _context(asked: Question, tp: int, cp: int) -> str | None:
    """The option of cp: what a run on this machine takes where none is given."""
    step = Step(asked.spec, Layout(cp=cp, tp=tp), 1, asked.sequence_length, dtype=asked.dtype)
    return None if step.problems() else chosen(step, machine=asked.machine).layout.options.get("cp")
