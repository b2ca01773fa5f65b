"""``fourfold schedule`` in this process: what it prints, saves and reads."""

import json
from pathlib import Path

import pytest

from tests.commands import fourfold_


def test_schedule(tmp_path: Path):
    result = fourfold_(
        "schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--picture", str(tmp_path / "p.png")
    )
    # Two forwards, then two backwards of twice the length; the bubble is (P-1)(F+B) of each rank.
    assert result.stdout.splitlines()[:2] == [
        "rank 0  F0 F1 .  .  .  B0 B0 B1 B1",
        "rank 1  .  F0 F1 B0 B0 B1 B1 .  .",
    ]
    assert result.stdout.splitlines()[2:6] == [
        "",
        "gpipe: 2 stages on 2 ranks, 2 microbatches",
        "makespan 9, of which work 6; bubble 33.3%",
        "most activations held at once, in microbatches, by rank: 2, 2",
    ]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_schedule_in_numbers():
    result = fourfold_("schedule", "interleaved2", "--times", "1,1,1,0", "--json")
    assert json.loads(result.stdout) == {
        "bubble_fraction": pytest.approx(4.5 / 28.5),
        "peak_activations": [5.5, 4.5, 3.5, 2.5],
        "makespan": 28.5,
    }
    with_messages = json.loads(fourfold_("schedule", "gpipe", "--times", "1,1,1,0.5", "--json").stdout)
    assert with_messages["makespan"] == 33 + 6 * 0.5


def test_schedules_compared():
    result = fourfold_("schedule", "--compare", "--cap", "4", "--stages", "4", "--microbatches", "8")
    rows = {words[0]: words[1:] for line in result.stdout.splitlines() if (words := line.split())}
    heading, _, quickest, *_ = rows
    assert (heading, quickest) == ("schedule", "auto4")
    assert rows["zbv"] == ["25.5", "5.9%", "4", "8"]
    assert rows["gpipe"] == ["33", "27.3%", "8", "!", "4"]
    assert "! more than the 4 microbatches that are allowed" in result.stdout
    numbers = json.loads(fourfold_("schedule", "1f1b2", "--compare", "--json").stdout)
    assert {
        "1f1b2",
        "1f1b",
        "gpipe",
        "interleaved2",
        "bfs4",
        "zb-h1",
        "zb-h2",
        "zbv",
        "dualpipev",
        "auto",
    } <= set(numbers)
    assert min(numbers, key=lambda name: numbers[name]["makespan"]) == "auto"


def test_what_is_compared_is_what_is_meant():
    """One auto, of the cap; what holds more is marked; with --recompute forwards run again in all."""
    numbers = json.loads(fourfold_("schedule", "auto", "--compare", "--cap", "4", "--json").stdout)
    assert [name for name in numbers if name.startswith("auto")] == ["auto4"]
    assert "\nauto4: " in fourfold_("schedule", "auto", "--cap", "4").stdout
    small = ["--stages", "2", "--microbatches", "3", "--compare"]
    result = fourfold_("schedule", "gpipe", *small, "--cap", "2")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert [row for row in rows if row[:1] == ["gpipe"]] == [["gpipe", "12", "25.0%", "3", "!", "2"]]
    recomputed = json.loads(fourfold_("schedule", *small, "--recompute", "--json").stdout)
    # The last rank runs 3 forwards again; the first does so while it waits.
    assert recomputed["gpipe"]["makespan"] == 12 + 3


def test_a_schedule_has_no_more_stages_than_the_model_has_layers(tmp_path: Path):
    path, measured = tmp_path / "s.csv", ["--times", "1,1.2,0.8,0.1", "--cap", "6"]
    fourfold_("schedule", "auto", *measured, "--save", str(path))
    refused = fourfold_("schedule", str(path), "--layers", "8")
    advice = (
        f"a schedule of 8 stages or fewer, as from fourfold schedule auto --stages 4 --microbatches 8 "
        f"--layers 8 --save {path}, or 12 layers or more"
    )
    assert (refused.exit_code, refused.stderr) == (
        2,
        f"error: schedule {path} cuts the model into 12 stages on 4 ranks, but there are layers for 8: use "
        f"{advice}\n",
    )
    fourfold_("schedule", "auto", *measured, "--layers", "8", "--save", str(path))
    assert fourfold_("schedule", str(path), "--layers", "8").exit_code == 0
    table = fourfold_("schedule", "--compare", "--layers", "8", "--stages", "4", "--microbatches", "4").stdout
    rows = [words for line in table.splitlines() if len(words := line.split()) == 5]
    assert {words[0]: words[-1] for words in rows}.items() >= {("gpipe", "4"), ("zbv", "8")}
    assert {words[-1] for words in rows} == {"4", "8"}
    few = fourfold_("schedule", "zbv", "--layers", "4").stderr
    assert few.endswith("layers for 4: use 1f1b, of one stage a rank, or 8 layers or more\n")
    fewer = fourfold_("schedule", "auto", "--layers", "3").stderr
    assert fewer.endswith("layers for 3: use 3 pipeline ranks or fewer, or 4 layers or more\n")


def test_a_schedule_is_saved_and_read_again(tmp_path: Path):
    for suffix in ("csv", "json"):
        path = str(tmp_path / f"s.{suffix}")
        saved = fourfold_("schedule", "zbv", "--stages", "3", "--microbatches", "5", "--save", path)
        assert saved.stdout.splitlines()[-1] == f"schedule: {path}"
        read = fourfold_("schedule", path)
        assert read.stdout.splitlines()[:3] == saved.stdout.splitlines()[:3], "its sizes are in the file"
        refused = fourfold_("schedule", path, "--stages", "4")
        assert (refused.exit_code, refused.stderr) == (
            2,
            f"error: {path} is a schedule for 3 pipeline ranks: 4 were asked for, use pp=3\n",
        )
    broken = (tmp_path / "s.csv").read_text().replace("5I4,", "")
    (tmp_path / "s.csv").write_text(broken)
    refused = fourfold_("schedule", str(tmp_path / "s.csv"))
    assert refused.exit_code == 2
    assert "the backward of stage 5 on microbatch 4 is B 0, I 0, W 1 times" in refused.stderr


def test_a_schedule_as_a_trace(tmp_path: Path):
    path = tmp_path / "t.json"
    fourfold_("schedule", "auto2", "--stages", "2", "--microbatches", "2", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") >= 6000


def test_times_are_read_from_a_trace(tmp_path: Path):
    """Of what a rank does for a microbatch in all its segments; a whole backward is half I and half W."""
    path = tmp_path / "program.json"
    asked = ["--stages", "2", "--microbatches", "3", "--times", "2,1.5,0.5"]
    for name, found in (("zbv", "F 2, I 1.5, W 0.5"), ("interleaved2", "F 2, I 1, W 1")):
        expected = fourfold_("schedule", name, *asked, "--trace", str(path)).stdout.splitlines()[:-1]
        printed = fourfold_("schedule", name, *asked[:4], "--times", str(path)).stdout.splitlines()
        assert printed == [f"medians of {path}, in ms: {found}", "", *expected]
    path.write_text('{"traceEvents": [{"ph": "X", "pid": 0, "cat": "UPDATE"}]}')
    refused = fourfold_("schedule", "1f1b", "--times", str(path))
    assert refused.exit_code == 2
    assert f"{path} holds no forwards and backwards of a step (no median for empty data)" in refused.stderr
