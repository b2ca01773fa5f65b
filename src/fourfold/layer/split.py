"""Which segments make a pipeline stage."""

from collections.abc import Callable, Sequence
from itertools import pairwise


def split(costs: Sequence[float], *, stages: int) -> list[int]:
    """Cut a chain of segments into stages of neighbours so that the dearest stage is as cheap as can be.

    The first segment (embedding) goes with the first layer, the last (head) with the last; each stage has at
    least one layer. Of the cuts with the same dearest stage it takes one with the smallest sum of squares.
    Linear partition by dynamic programming, in O(stages x layers^2).

    Args:
        costs: of the embedding, each layer and the head, in model order; any unit.
        stages: how many; at most the number of layers.

    Returns:
        How many segments each stage holds.
    """
    layers = len(costs) - 2
    assert 1 <= stages <= layers
    before = [0.0]  # the cost of the first n layers, the ends with their neighbours
    for layer in range(layers):
        ends = (costs[0] if layer == 0 else 0) + (costs[-1] if layer == layers - 1 else 0)
        before.append(before[-1] + costs[layer + 1] + ends)
    # Stages that end once they pass the mean are few enough, and at most one layer above it.
    bound = before[-1] / stages + max(stop - start for start, stop in pairwise(before))
    dearest = _cheapest(before, stages, bound * (1 + 1e-9), max)[0]
    limit = dearest * (1 + 1e-9)  # sums in another order
    counts = _cheapest(before, stages, limit, lambda total, cost: total + cost * cost)[1]
    counts[0] += 1
    counts[-1] += 1
    return counts


def _cheapest(
    before: Sequence[float], stages: int, limit: float, combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The cut with the least combined cost, no stage above ``limit``: that cost, and the layers by stage."""
    layers = len(before) - 1
    best: list[tuple[float, list[int]] | None] = [(0.0, []), *[None] * layers]  # by layers cut so far
    for stage in range(1, stages + 1):
        following: list[tuple[float, list[int]] | None] = [None] * (layers + 1)
        for stop in range(stage, layers - (stages - stage) + 1):
            for start in range(stop - 1, stage - 2, -1):
                cost, known = before[stop] - before[start], best[start]
                if cost > limit:
                    break  # with more layers it only grows
                if known is None:
                    continue
                total = combine(known[0], cost)
                held = following[stop]
                if held is None or total <= held[0]:
                    following[stop] = total, [*known[1], stop - start]
        best = following
    found = best[layers]
    assert found is not None
    return found
