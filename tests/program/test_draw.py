from pathlib import Path

from fourfold.build import Sharding
from fourfold.layer.schedules import schedule
from fourfold.program import Kind, clock
from fourfold.program.draw import COLOURS, grid, listing, picture, summary
from tests.programs import FSDP, one_stage


def test_the_grid_shows_each_rank_over_time() -> None:
    assert grid(schedule("1f1b", ranks=2, microbatches=2)).splitlines() == [
        "rank 0  F0 F1 .  .  B0 B0 .  B1 B1",
        "rank 1  .  F0 B0 B0 F1 B1 B1 .  .",
    ]


def test_the_summary_gives_bubble_and_memory() -> None:
    text = summary(schedule("1f1b", ranks=4, microbatches=8))
    assert "bubble 27.3%" in text
    assert "by rank: 4, 3, 2, 1" in text


def test_the_listing_is_the_program() -> None:
    program = one_stage(2, 1)
    assert listing(program) == "rank 0:\n  0F0 1F0 LOSS 1B0 1REDUCE 0B0 0REDUCE UPDATE"


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "program.png"
    picture(clock(schedule("gpipe", ranks=3, microbatches=4)), path, title="GPipe", unit="forwards")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_listing_of_a_sharded_program_names_every_gather() -> None:
    program = one_stage(2, 1, sharding=Sharding(FSDP, replicas=True), lookups=frozenset({0}))
    assert listing(program, width=60).splitlines() == [
        "rank 0:",
        "  0GATHER0 1GATHER0 0F0 0FREE0 1F0 LOSS 1B0 1REDUCE 1FREE0 0B0",
        "  0REDUCE 1ALLREDUCE 0ALLREDUCE UPDATE",
    ]


def test_every_kind_of_action_can_be_drawn(tmp_path: Path) -> None:
    assert set(COLOURS) == set(Kind)
    path = tmp_path / "program.png"
    program = one_stage(3, 2, sharding=Sharding(FSDP, replicas=True), lookups=frozenset({0}))
    drawn = {action.kind for _, action in program.actions()}
    assert drawn == set(Kind) - {Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}
    picture(clock(program, lambda action: 1.0), path, title="FSDP on two replicas", unit="forwards")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "bubble 0.0%" in summary(program)
    assert grid(program).startswith("rank 0  0F0 1F0 2F0 2B0 2B0 1B0 1B0")
