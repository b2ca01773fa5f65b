"""Who owns what: every granularity covers every parameter once, and the cuts fall where they may."""

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.batch.pieces import BALANCED, Pieces, Shape, balance, cut
from fourfold.specs import ModelSpec

HOW = ["matrices", "rows", "flat", "auto"]
SMALL: dict[str, Shape] = {"norm": (6,), "up": (4, 6), "bias": (4,), "down": (6, 4)}


def numel(shapes: Mapping[str, Shape]) -> int:
    return sum(map(math.prod, shapes.values()))


def blocks_of(name: str) -> list[dict[str, Shape]]:
    """The parameters of each segment of a preset: embedding, blocks, final norm and head."""
    segments: dict[str, dict[str, Shape]] = {}
    for key, shape in ModelSpec.preset(name).parameter_shapes().items():
        segment = ".".join(key.split(".")[:3]) if "layers" in key else ("head", "embed")["embed" in key]
        segments.setdefault(segment, {})[key] = shape
    return list(segments.values())


def owners(pieces: Pieces, shapes: Mapping[str, Shape]) -> dict[str, list[int]]:
    """How many elements of each parameter each rank owns."""
    stops = [sum(pieces.counts[: rank + 1]) for rank in range(len(pieces.counts))]
    offset = 0
    owned = {}
    for name in pieces.order:
        stop = offset + math.prod(shapes[name])
        owned[name] = [
            max(min(stop, end) - max(offset, end - count), 0)
            for end, count in zip(stops, pieces.counts, strict=True)
        ]
        offset = stop
    return owned


def assert_covered(
    units: Sequence[Mapping[str, Shape]], pieces: Sequence[Pieces], ranks: int, how: str
) -> None:
    assert len(pieces) == len(units)
    for shapes, piece in zip(units, pieces, strict=True):
        assert sorted(piece.order) == sorted(shapes)
        assert len(piece.counts) == ranks
        assert min(piece.counts) >= 0
        unused = sum(piece.counts) - numel(shapes)
        assert 0 <= unused < ranks
        assert how == "flat" or unused == 0
        for name, counts in owners(piece, shapes).items():
            assert sum(counts) == math.prod(shapes[name]), "an element without an owner"
            if how == "matrices" and math.prod(shapes[name]):
                assert sum(count > 0 for count in counts) == 1
            elif how != "flat":
                row = math.prod(shapes[name][1:])
                assert all(count % (row or 1) == 0 for count in counts), "a row is cut"
    if how == "flat":
        for piece in pieces:
            assert len(set(piece.counts)) == 1


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2", "tiny-qwen3"])
def test_every_element_has_one_owner(name: str, ranks: int, how: str) -> None:
    units = blocks_of(name)
    assert_covered(units, cut(units, ranks=ranks, how=how), ranks, how if ranks > 1 else "flat")


@pytest.mark.parametrize("how", HOW)
def test_matrices_lie_before_vectors_in_every_piece(how: str) -> None:
    """So what decays is the first part of a piece."""
    for ranks in (1, 2, 3, 5):
        for shapes, piece in zip(
            blocks_of("tiny-qwen2"), cut(blocks_of("tiny-qwen2"), ranks=ranks, how=how), strict=True
        ):
            owned = owners(piece, shapes)
            for rank in range(ranks):
                mine = [len(shapes[name]) for name in piece.order if owned[name][rank]]
                assert mine == sorted(mine, reverse=True)


def test_rows_of_one_matrix() -> None:
    """Rows as near to equal as they can be, where chunks of equal size leave ranks without any.

    9 rows over 4 ranks are 3, 3, 3, 0 in equal chunks; 5 over 4 are 2, 2, 1, 0.
    """
    # FS-02
    for rows, ranks, expected in (
        (9, 4, (2, 2, 3, 2)),
        (5, 4, (1, 1, 2, 1)),
        (3, 8, (0, 1, 0, 1, 0, 0, 1, 0)),
        (8, 4, (2, 2, 2, 2)),
        (1, 3, (0, 1, 0)),
    ):
        for width in (1, 7):
            [piece] = cut([{"weight": (rows, width)}], ranks=ranks, how="rows")
            counts = tuple(count // width for count in piece.counts)
            assert sum(counts) == rows
            assert max(counts) - min(counts) <= 1
            assert counts == expected, (rows, ranks)


def test_rows_of_several_parameters() -> None:
    """58 elements on 3 ranks, cuts wanted at 19.3 and 38.7: after row 3 of `up` and 3.67 -> 4 of `down`."""
    [piece] = cut([SMALL], ranks=3, how="rows")
    assert piece == Pieces(("up", "down", "norm", "bias"), (18, 22, 18))
    assert owners(piece, SMALL) == {
        "up": [18, 6, 0],
        "down": [0, 16, 8],
        "norm": [0, 0, 6],
        "bias": [0, 0, 4],
    }


def test_flat_pieces_are_equal_and_end_with_padding() -> None:
    for ranks, piece_numel in ((1, 58), (3, 20), (4, 15), (7, 9)):
        [piece] = cut([SMALL], ranks=ranks, how="flat")
        assert piece == Pieces(("up", "down", "norm", "bias"), (piece_numel,) * ranks)
    # Even pieces have no padding, and fewer elements than ranks leave whole pieces unused.
    [piece] = cut([{"weight": (4, 2)}], ranks=4, how="flat")
    assert piece.counts == (2, 2, 2, 2)
    [piece] = cut([{"weight": (3,)}], ranks=8, how="flat")
    assert piece.counts == (1,) * 8


def test_matrices_go_to_the_rank_that_owns_least_so_far() -> None:
    """Largest first, unit after unit: 24, 24, 6, 4 over 2 ranks, then 25 to the lighter one and 9."""
    first, second = cut([SMALL, {"a": (5, 5), "b": (3, 3)}], ranks=2, how="matrices")
    assert first == Pieces(("up", "norm", "down", "bias"), (30, 28))
    assert second == Pieces(("b", "a"), (9, 25))


def test_a_piece_may_be_empty() -> None:
    """More ranks than elements: nobody owns an element twice, some own none."""
    for how in ("matrices", "rows", "auto"):
        [piece] = cut([{"weight": (2, 1), "norm": (1,)}], ranks=8, how=how)
        assert sum(piece.counts) == 3
        assert piece.counts.count(0) >= 5
    [piece] = cut([{"weight": (2, 3), "norm": (3,)}], ranks=8, how="matrices")
    assert piece == Pieces(("weight", "norm"), (6, 3, 0, 0, 0, 0, 0, 0))


def test_the_balance_is_the_heaviest_rank_over_the_mean_of_all_units() -> None:
    assert balance([Pieces(("a",), (6, 2)), Pieces(("b",), (2, 6))]) == 1.0
    assert balance([Pieces(("a",), (6, 2)), Pieces(("b",), (4, 4))]) == 1.25
    assert balance([Pieces(("a",), (3, 0, 0))]) == 3.0
    assert balance([Pieces(("a",), (0, 0))]) == 0.0


EVEN = {f"matrix{index}": (8, 8) for index in range(8)} | {"norm": (8,)}


def test_auto_gives_blocks_whole_matrices_and_cuts_the_embedding_by_rows() -> None:
    embedding, head = {"embed": (40, 8)}, {"lm_head": (40, 8), "norm": (8,)}
    pieces = cut([embedding, EVEN, EVEN, head], ranks=4, how="auto")
    rows = cut([embedding, EVEN, EVEN, head], ranks=4, how="rows")
    assert pieces[0] == rows[0] == Pieces(("embed",), (80, 80, 80, 80))
    assert pieces[3] == rows[3]
    assert pieces[1:3] == cut([EVEN, EVEN], ranks=4, how="matrices")
    for piece, shapes in zip(pieces[1:3], (EVEN, EVEN), strict=True):
        assert all(sorted(counts)[:3] == [0, 0, 0] for counts in owners(piece, shapes).values())
    assert balance(pieces) <= BALANCED == 1.1


def test_auto_falls_back_to_rows_where_whole_matrices_do_not_balance() -> None:
    """Three equal matrices on two ranks: 2 to 1, which is 1.33 times the mean."""
    block = dict.fromkeys(("a", "b", "c"), (8, 8))
    assert balance(cut([block], ranks=2, how="matrices")) == pytest.approx(4 / 3)
    assert cut([block], ranks=2, how="auto") == cut([block], ranks=2, how="rows")
    # Two such blocks even out, and keep their matrices whole.
    two = cut([block, block], ranks=2, how="auto")
    assert two == cut([block, block], ranks=2, how="matrices")
    assert balance(two) == 1.0


def test_auto_falls_back_for_many_ranks() -> None:
    """More ranks than a small model has matrices: by rows nearly all of them own something."""
    units = blocks_of("tiny")
    assert cut(units, ranks=64, how="auto") == cut(units, ranks=64, how="rows")
    assert balance(cut(units, ranks=64, how="auto")) < balance(cut(units, ranks=64, how="matrices"))


@pytest.mark.parametrize("name", ["small-2m", "tiny"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_and_flat_pieces_balance(name: str, ranks: int) -> None:
    units = blocks_of(name)
    assert balance(cut(units, ranks=ranks, how="flat")) == 1.0
    assert balance(cut(units, ranks=ranks, how="rows")) < 1.05
    assert balance(cut(units, ranks=ranks, how="auto")) <= BALANCED


def test_one_rank_owns_all_whatever_is_asked_for() -> None:
    for how in HOW:
        assert cut([SMALL], ranks=1, how=how) == [Pieces(("up", "down", "norm", "bias"), (58,))]


shapes = st.one_of(
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 40), st.integers(1, 20)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
)
units_of_shapes = st.lists(st.lists(shapes, min_size=1, max_size=7), min_size=1, max_size=4)


@given(units_of_shapes, st.integers(1, 12), st.sampled_from(HOW))
def test_any_shapes_on_any_number_of_ranks(listed: list[list[Shape]], ranks: int, how: str) -> None:
    units = [{f"p{index}": shape for index, shape in enumerate(unit)} for unit in listed]
    pieces = cut(units, ranks=ranks, how=how)
    assert_covered(units, pieces, ranks, how if ranks > 1 else "flat")
    if how == "rows":
        # A cut lies half a row from where equal pieces end, at most.
        for unit, piece in zip(units, pieces, strict=True):
            largest_row = max(math.prod(shape[1:]) for shape in unit.values())
            mean = numel(unit) / ranks
            assert all(abs(count - mean) <= max(largest_row, 1) + 1e-9 for count in piece.counts)
    assert pieces == cut(units, ranks=ranks, how=how), "ranks must come to the same cut"
