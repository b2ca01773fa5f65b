"""Which part of a parameter each rank holds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.channel.cuts import Cut, in_parts, vocabulary, whole
from fourfold.channel.parts import assembled, part


def rows_of(cut: Cut) -> list[list[int]]:
    return [[i for start, stop in runs for i in range(start, stop)] for runs in cut.runs]


def test_columns_and_rows() -> None:
    cut = in_parts((8, 3), 0, 4)
    assert rows_of(cut) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (cut.local_shape(2), cut.copies, cut.adds_up) == ((2, 3), 1, False)
    assert in_parts((8, 6), 1, 2).local_shape(0) == (8, 3)


def test_a_fused_gate_and_up_are_cut_each() -> None:
    """Gate rows 0 to 3, up rows 4 to 7: a contiguous slice would give one rank the gate, one the up."""
    cut = in_parts((8, 3), 0, 2, fused=2)
    assert rows_of(cut) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    weight = torch.arange(24.0).view(8, 3)
    assert torch.equal(assembled([part(weight, cut, rank) for rank in range(2)], cut), weight)


def test_fewer_heads_than_ranks_are_copied_to_neighbours() -> None:
    """Two key/value heads of 3 rows on 4 ranks: ranks 0 and 1 hold head 0. Their gradients add up."""
    cut = in_parts((6, 5), 0, 4, groups=2, copied=True)
    assert rows_of(cut) == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert (cut.copies, cut.adds_up, cut.is_whole) == (2, True, False)
    alone = in_parts((3, 5), 0, 4, groups=1, copied=True)
    assert (alone.copies, alone.is_whole) == (4, True)


@pytest.mark.parametrize(("groups", "ranks"), [(3, 2), (6, 4), (2, 3)])
def test_heads_that_do_not_divide_are_refused(groups: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"tp={ranks} neither divides {groups} groups nor is a multiple"):
        in_parts((groups * 4, 2), 0, ranks, groups=groups, copied=True)


@pytest.mark.parametrize(
    ("rows", "ranks", "how", "message"),
    [
        (16, 8, {"groups": 4}, "tp=8 does not divide 4 groups"),  # query heads have no copies
        (4, 8, {}, "tp=8 does not divide 4 channels"),
        (9, 2, {}, "tp=2 does not divide 9 channels"),
        (9, 2, {"groups": 2}, "9 channels are not 2 groups of equal size"),
        (9, 2, {"fused": 2}, "its 9 channels are not 2 matrices of equal size"),
    ],
)
def test_no_row_is_left_out(rows: int, ranks: int, how: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_parts((rows, 2), 0, ranks, **how)


def test_a_single_number_is_whole() -> None:
    cut = whole((), 2, adds_up=True)
    assert (cut.is_whole, cut.copies, cut.local_shape(1)) == (True, 2, ())
    assert list(cut.global_runs(1, 0, 1)) == [(0, 1)]


def test_a_vocabulary_of_any_size() -> None:
    assert rows_of(vocabulary((10, 2), 4)) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    with pytest.raises(ValueError, match="tp=4 is more than the 3 tokens of the vocabulary"):
        vocabulary((3, 2), 4)


cuts = st.one_of(
    st.builds(
        lambda parts, size, before, after, ranks, fused: in_parts(
            (*before, parts * size * fused, *after),
            len(before),
            ranks,
            groups=parts,
            copied=True,
            fused=fused,
        ),
        st.sampled_from([4, 8]),
        st.integers(1, 3),
        st.lists(st.integers(1, 3), max_size=1),
        st.lists(st.integers(1, 3), max_size=1),
        st.sampled_from([1, 2, 4, 8]),
        st.integers(1, 3),
    ),
    st.builds(lambda size, ranks: vocabulary((size, 3), ranks), st.integers(8, 20), st.integers(1, 8)),
    st.builds(
        lambda shape: whole(shape, 3, adds_up=True), st.lists(st.integers(1, 4), min_size=1, max_size=2)
    ),
)


@given(cuts, st.data())
def test_runs_of_a_part_lie_where_its_elements_do(cut: Cut, data: st.DataObject) -> None:
    """Elements numbered by their place in the whole: any stretch of any rank's part names its own numbers."""
    number = torch.arange(torch.Size(cut.shape).numel()).view(cut.shape)
    rank = data.draw(st.integers(0, len(cut.runs) - 1))
    held = part(number, cut, rank)
    assert held.shape == cut.local_shape(rank)
    first = data.draw(st.integers(0, held.numel()))
    count = data.draw(st.integers(0, held.numel() - first))
    named = [i for start, stop in cut.global_runs(rank, first, count) for i in range(start, stop)]
    assert named == held.flatten()[first : first + count].tolist()
    parts = [part(number, cut, rank) for rank in range(len(cut.runs))]
    assert torch.equal(assembled(parts, cut), number)
