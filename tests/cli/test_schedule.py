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
            f"error: {path} is a schedule for 3 pipeline ranks: 4 were asked for\n",
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
