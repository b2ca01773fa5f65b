"""What a cp without an option is: a ring, Ulysses, or Ulysses in groups with a ring between them.

[Note: the default of cp] Of the sizes of groups that the heads allow:

1. Where the devices are known, those whose layer would take more than `TIE` longer than the fastest drop out,
   by the formulas that the planner predicts steps with: what a ring does not hide, the exchange of Ulysses,
   kernels of pieces, copies. Differences within `TIE` are not told apart.
2. Groups that do not lie within a node drop out where others are left: attention waits for an exchange, and
   not for the messages of a ring.
3. The one is taken that sends least (`fourfold.traffic.heads_sent`, which knows windows), of two the larger
   group.

It is a pure function of the model, cp, tp, the length of a row, the dtype and the links. Neither the size of
a batch nor the other axes count, and rows are taken for one document each.
"""

from dataclasses import dataclass

from fourfold.errors import choices
from fourfold.outline import Step
from fourfold.planner.compute import block_times
from fourfold.planner.machine import Machine
from fourfold.planner.plans import TIE
from fourfold.specs import Layout
from fourfold.specs.cp_option import cp_option, least_sent


@dataclass(frozen=True)
class Choice:
    """A layout in which the option of cp is written, and why it is this one; no word where it was given."""

    layout: Layout
    why: str = ""


def chosen(step: Step, *, machine: Machine | None = None, node: int = 0) -> Choice:
    """Write out what cp means for a step that breaks no rule; see [Note: the default of cp].

    Args:
        step: its layout may name the option of cp: then that is it.
        machine: what it runs on, None where that is not known.
        node: where ``machine`` is None, how many ranks share a node; 0 where that is not known either.
    """
    layout = step.layout
    if layout.cp == 1 or "cp" in layout.options:
        return Choice(layout)
    sizes = layout.ulysses_sizes(step.spec)
    slow: list[int] = []
    if machine is not None:
        seconds = {size: _layer_seconds(step, size, machine) for size in sizes}
        slow = [size for size in sizes if seconds[size] > min(seconds.values()) * (1 + TIE)]
        node = machine.levels[0].ranks if len(machine.levels) > 1 else 0
    level = [size for size in sizes if size not in slow]
    near = [size for size in level if _is_near(layout, size, node)] or level
    size = least_sent(near, layout.cp, *layout.heads(step.spec), window=step.window_share)
    reasons = {
        "would send no less": [other for other in near if other != size],
        f"would exchange heads between nodes of {node} ranks": [one for one in level if one not in near],
        f"would be slower on {machine.name if machine else ''}": slow,
    }
    said = [f"{choices(map(cp_option, others))} {reason}" for reason, others in reasons.items() if others]
    why = f"cp={layout.cp} is {cp_option(size)}: {', '.join(said) or 'the heads allow no other'}"
    return Choice(layout.with_ulysses(size), why)


def _is_near(layout: Layout, size: int, node: int) -> bool:
    """Whether groups of Ulysses of so many ranks lie within nodes; ``node`` is 0 where all share one."""
    return size == 1 or node == 0 or layout.world_size <= node or node % (size * layout.tp) == 0


def _layer_seconds(step: Step, size: int, machine: Machine) -> float:
    """A layer forward and backward on one row, with groups of so many."""
    layout = step.layout
    options = {"tp": layout.options["tp"]} if "tp" in layout.options else {}
    one = Step(
        step.spec,
        Layout(cp=layout.cp, tp=layout.tp, options=options).with_ulysses(size),
        batch=1,
        sequence_length=step.sequence_length,
        dtype=step.dtype,
    )
    layer = block_times(one, machine).layer
    return layer.forward.total + layer.backward.total
