"""Layers to stages: every layer once, in order, and the dearest stage as cheap as it can be."""

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.flops import forward_flops
from fourfold.layer.split import split
from fourfold.specs import ModelSpec


def layers_of(counts: list[int]) -> list[int]:
    """How many layers each stage holds: the segments but embedding and head."""
    counts = list(counts)
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def stage_costs(costs: list[float], counts: list[int]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in pairwise(accumulate(counts, initial=0))]


def every_cut(layers: int, stages: int) -> list[list[int]]:
    """All ways to deal the segments of so many layers, at least one layer a stage."""
    cuts = [
        [stop - start for start, stop in pairwise((0, *places, layers))]
        for places in combinations(range(1, layers), stages - 1)
    ]
    for counts in cuts:
        counts[0] += 1
        counts[-1] += 1
    return cuts


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        # 2 layers for each of 16 ranks' 2 or 3 stages: no layer is left out (64 of 80 would be the fault).
        (80, 32, [2] * 16 + [3] * 16),
        (80, 40, [2] * 40),
        (30, 4, [7, 7, 8, 8]),
        (7, 2, [3, 4]),
        (4, 4, [1, 1, 1, 1]),
        (5, 1, [5]),
    ],
)
def test_no_layer_is_lost(layers: int, stages: int, expected: list[int]) -> None:
    # PP-05
    counts = split([0, *[10.0] * layers, 0], stages=stages)
    assert sum(counts) == layers + 2
    assert sorted(layers_of(counts)) == expected


def test_the_head_counts() -> None:
    """A head as dear as two layers, and an embedding of one, take the place of layers."""
    assert split([0, 1, 1, 1, 1, 1, 1, 2], stages=2) == [5, 3]
    assert split([1, 1, 1, 1, 1, 1, 1, 2], stages=2) in ([4, 4], [5, 3])
    assert split([0, 1, 1, 1, 5], stages=3) == [2, 1, 2]
    # A vocabulary of 32 times the channels: the head is half as dear as a layer, and more at short lengths.
    wide = ModelSpec(
        vocab_size=8192, hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4
    )
    costs = forward_flops(wide, 64).segments
    assert costs[-1] > 4 * costs[1]
    first, last = layers_of(split(costs, stages=2))
    assert first - last >= 4


def test_ties_go_to_the_evenest() -> None:
    """7 layers on 4 stages: 2, 2, 2, 1, never 1, 1, ... beside a 2 that another could share."""
    assert sorted(layers_of(split([0, *[1.0] * 7, 0], stages=4))) == [1, 2, 2, 2]
    # The first layer decides the dearest stage; the others are dealt evenly all the same.
    assert split([0, 9, 1, 1, 1, 1, 1, 1, 0], stages=3) == [2, 3, 4]


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.7]), min_size=1, max_size=7),
    st.sampled_from([0.0, 0.3, 4.0]),
    st.sampled_from([0.0, 1.0, 7.5]),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_no_cut_is_better(layers: list[float], embedding: float, head: float, data: st.DataObject) -> None:
    """Among all cuts: the dearest stage is as cheap as can be, then the squares are as small as can be."""
    stages = data.draw(st.integers(1, len(layers)))
    costs = [embedding, *layers, head]
    counts = split(costs, stages=stages)
    assert len(counts) == stages
    assert sum(counts) == len(costs)
    assert min(layers_of(counts)) >= 1

    def rank(cut: list[int]) -> tuple[float, float]:
        found = stage_costs(costs, cut)
        return max(found), sum(cost * cost for cost in found)

    dearest, squares = min(map(rank, every_cut(len(layers), stages)))
    assert rank(counts)[0] == pytest.approx(dearest, rel=1e-9)
    assert rank(counts)[1] == pytest.approx(squares, rel=1e-6)
