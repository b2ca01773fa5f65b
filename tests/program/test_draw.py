from pathlib import Path

from fourfold.build import build
from fourfold.layer.schedules import one_forward_one_backward, schedule
from fourfold.program import clock
from fourfold.program.draw import grid, listing, picture, summary


def test_the_grid_shows_each_rank_over_time() -> None:
    assert grid(schedule("1f1b", stages=2, microbatches=2)).splitlines() == [
        "rank 0  F0 F1 .  .  B0 B0 .  B1 B1",
        "rank 1  .  F0 B0 B0 F1 B1 B1 .  .",
    ]


def test_the_summary_gives_bubble_and_memory() -> None:
    text = summary(schedule("1f1b", stages=4, microbatches=8))
    assert "bubble 27.3%" in text
    assert "by rank: 4, 3, 2, 1" in text


def test_the_listing_is_the_program() -> None:
    program = build(
        one_forward_one_backward(stages=1, microbatches=1), segments_of_stage=[2], users=[(0,), (1,)]
    )
    assert listing(program) == "rank 0:\n  0F0 1F0 LOSS 1B0 1REDUCE 0B0 0REDUCE UPDATE"


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "program.png"
    picture(clock(schedule("gpipe", stages=3, microbatches=4)), path, title="GPipe", unit="forwards")
    assert path.read_bytes().startswith(b"\x89PNG")
