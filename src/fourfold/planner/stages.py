"""What the stages of a pipeline hold, and the closed form of a pipeline's time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fourfold.outline import blocks_of_stages
from fourfold.specs import ModelSpec, ScheduleName


@dataclass(frozen=True)
class Stage:
    """What a stage, or a rank, of a pipeline has: so many layers, and whether the embedding or the head."""

    layers: int
    embed: bool
    head: bool


Dealt = Literal["by work", "layers", "blocks"]
"""How blocks come to stages: with as equal work as can be, as `fourfold.outline` cuts; as many layers on
each, with the embedding and the head beside the first and the last; or the same number of blocks, where those
two count as a layer each and may be a stage of their own."""


@lru_cache(maxsize=1024)
def stages_of(
    spec: ModelSpec, sequence_length: int, stages: int, dealt: Dealt = "by work"
) -> tuple[Stage, ...]:
    """Each stage of a model. There are no more stages than `most_stages`."""
    layers = spec.num_hidden_layers
    if dealt == "by work":
        counts = blocks_of_stages(spec, sequence_length, stages=stages)
    elif dealt == "layers":
        counts = _equal(layers, stages)
        counts = [count + (index == 0) + (index == stages - 1) for index, count in enumerate(counts)]
    else:
        counts = _equal(layers + 2, stages)
    last = len(counts) - 1
    return tuple(
        Stage(count - (index == 0) - (index == last), index == 0, index == last)
        for index, count in enumerate(counts)
    )


def most_stages(layers: int, dealt: Dealt) -> int:
    """The most stages that a model of so many layers is cut into."""
    return layers + 2 if dealt == "blocks" else layers


def _equal(count: int, parts: int) -> list[int]:
    """As equal parts as can be, the first ones with one more."""
    each, more = divmod(count, parts)
    return [each + (part < more) for part in range(parts)]


def loads_of(stages: Sequence[Stage], stages_of_ranks: Sequence[Sequence[int]]) -> list[Stage]:
    """What each rank of a pipeline has, of all its stages together."""
    return [
        Stage(
            sum(stages[index].layers for index in own),
            any(stages[index].embed for index in own),
            any(stages[index].head for index in own),
        )
        for own in stages_of_ranks
    ]


def closed_form(
    schedule: ScheduleName,
    count: int,
    work: Sequence[float],
    total: tuple[float, float],
    *,
    ranks: int,
    chunks: int,
    send: float,
) -> float:
    """Seconds of a pipeline; `fourfold.layer.schedules` says the bubble of each schedule.

    With unequal ranks the slowest one works without pause, and the others' work on one microbatch is what
    it waits for.

    Args:
        schedule: which.
        count: microbatches.
        work: of each kind of rank, the seconds of its share on one microbatch.
        total: of all ranks, and of that the weight gradients.
        ranks: of the pipeline, and ``chunks`` how many stages each has.
        send: of a message.
    """
    most = max(work)
    others = total[0] - most
    others_later = total[1] * (ranks - 1) / ranks
    hops = 2 * (ranks - 1) * send
    match schedule.name:
        case "interleaved" | "bfs":
            bubble = others / chunks + hops * chunks
        case "zb-h1" | "zb-h2":
            bubble = others - 2 * others_later + hops
        case "zbv" | "dualpipev":
            bubble = max(0.0, others - 3 * others_later) + others_later / 2 + 2 * hops
        case "1f1b" if schedule.number is None:
            bubble = others + hops * (1 + (count - 1) / ranks)  # each microbatch waits for its messages
        case _:
            bubble = others + hops
    return count * most + bubble
