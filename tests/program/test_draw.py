from pathlib import Path

from fourfold.build import Sharding
from fourfold.layer.schedules import schedule
from fourfold.layer.transfers import with_transfers
from fourfold.program import Kind, clock
from fourfold.program.actions import TRANSFERS
from fourfold.program.clock import Times
from fourfold.program.draw import COLOURS, grid, listing, on_row, picture, summary
from tests.programs import FSDP, one_stage


def test_the_grid_shows_each_rank_over_time() -> None:
    assert grid(schedule("1f1b", ranks=2, microbatches=2)).splitlines() == [
        "rank 0  F0 F1 .  .  B0 B0 .  B1 B1",
        "rank 1  .  F0 B0 B0 F1 B1 B1 .  .",
    ]


def test_a_column_is_what_all_times_are_multiples_of() -> None:
    """Forward 1, backward 1.5: a column is half a unit. Two stages a rank: half of that again."""
    times = Times(1, 1, 0.5)
    assert grid(schedule("1f1b", ranks=1, microbatches=2), times) == "rank 0  F0 F0 B0 B0 B0 F1 F1 B1 B1 B1"
    assert grid(schedule("interleaved2", ranks=1, microbatches=1), times) == (
        "rank 0  0F0 0F0 1F0 1F0 1B0 1B0 1B0 0B0 0B0 0B0"
    )
    assert grid(schedule("zb-h1", ranks=2, microbatches=2), Times(2, 2, 2)).splitlines() == [
        "rank 0  F0 F1 .  I0 W0 I1 W1",
        "rank 1  .  F0 I0 F1 I1 W0 W1",
    ]


def test_messages_leave_time_between() -> None:
    program = with_transfers(schedule("1f1b", ranks=2, microbatches=1))
    assert grid(program, Times(1, 1, 1, send=2)).splitlines() == [
        "rank 0  F0 .  .  .  .  .  .  .  B0 B0",
        "rank 1  .  .  .  F0 B0 B0 .  .  .  .",
    ]


def test_a_grid_goes_on_below_where_it_is_too_wide() -> None:
    program = schedule("1f1b", ranks=2, microbatches=2)
    assert grid(program, width=22).splitlines() == [
        "rank 0  F0 F1 .  .  B0",
        "rank 1  .  F0 B0 B0 F1",
        "",
        "rank 0  B0 .  B1 B1",
        "rank 1  B1 B1 .  .",
    ]


def test_measured_times_are_rounded_to_columns() -> None:
    """In seconds, with nothing in common: the shortest, W of 0.9 ms, takes 4 columns."""
    times = Times(0.002003, 0.0031, 0.0009)
    assert grid(schedule("zb-h1", ranks=2, microbatches=1), times).splitlines() == [
        "rank 0 " + 9 * " F0" + 23 * " . " + 13 * " I0" + 4 * " W0",
        "rank 1 " + 9 * " . " + 9 * " F0" + 14 * " I0" + 4 * " W0" + 12 * " . " + " .",
    ]


def test_a_grid_of_too_many_actions_is_left_out() -> None:
    text = grid(schedule("1f1b", ranks=2, microbatches=67), Times())
    assert text == "(no grid: it would have more than the 200 columns that can be read)"


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


def test_a_picture_of_a_schedule_shades_stages_and_shows_messages(tmp_path: Path) -> None:
    times = Times(1, 1, 1, send=0.2)
    program = with_transfers(schedule("zbv", ranks=2, microbatches=3))
    path = tmp_path / "schedule.svg"
    timeline = clock(program, times.of(program))
    picture(timeline, path, title="ZBV", names=on_row, unit="forwards", shaded=True)
    svg = path.read_text()
    for colour in ("#4c78a8", "#a6bcd4", "#f2a541", "#f8d2a0", "#59a14f", "#acd0a7"):
        assert colour in svg, "each kind in two shades"
    messages = sum(svg.count(f"stroke: {COLOURS[kind]}") for kind in TRANSFERS) // 2
    assert messages == 2 * 2 * 3, "down and up, there and back, of three microbatches"


def test_the_listing_of_a_sharded_program_names_every_gather() -> None:
    program = one_stage(2, 1, sharding=Sharding(FSDP), replicated=True, lookups=frozenset({0}))
    assert listing(program, width=60).splitlines() == [
        "rank 0:",
        "  0GATHER0 1GATHER0 0F0 0FREE0 1F0 LOSS 1B0 1REDUCE 1FREE0 0B0",
        "  0REDUCE 1ALLREDUCE 0ALLREDUCE UPDATE",
    ]


def test_every_kind_of_action_can_be_drawn(tmp_path: Path) -> None:
    assert set(COLOURS) == set(Kind)
    path = tmp_path / "program.png"
    program = one_stage(3, 2, sharding=Sharding(FSDP), replicated=True, lookups=frozenset({0}))
    drawn = {action.kind for _, action in program.actions()}
    others = {Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE}
    assert drawn == set(Kind) - others - TRANSFERS
    picture(clock(program, lambda action: 1.0), path, title="FSDP on two replicas", unit="forwards")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "bubble 0.0%" in summary(program)
    assert grid(program).startswith("rank 0  0F0 1F0 2F0 2B0 2B0 1B0 1B0")
