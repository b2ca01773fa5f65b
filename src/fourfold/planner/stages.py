"""What the stages of a pipeline hold, and the closed form of a pipeline's time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fourfold.outline import blocks_of_stages
from fourfold.specs import ModelSpec, ScheduleName


@dataclass(frozen=True)
class Stage:
    """What a stage, or a rank, of a pipeline has: so many layers, and whether the embedding or the head."""

    layers: int
    embed: bool
    head: bool


@lru_cache(maxsize=1024)
def stages_of(spec: ModelSpec, sequence_length: int, stages: int) -> tuple[Stage, ...]:
    """Each stage of a model, as `fourfold.outline` cuts it."""
    counts = blocks_of_stages(spec, sequence_length, stages=stages)
    last = len(counts) - 1
    return tuple(
        Stage(count - (index == 0) - (index == last), index == 0, index == last)
        for index, count in enumerate(counts)
    )


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
