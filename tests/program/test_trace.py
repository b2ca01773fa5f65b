import json
from pathlib import Path

from fourfold.build import Sharding
from fourfold.layer.schedules import schedule
from fourfold.layer.transfers import with_transfers
from fourfold.program import clock
from fourfold.program.clock import Times
from fourfold.program.trace import write_trace
from tests.programs import FSDP, one_stage


def test_the_trace_has_what_ran_when(tmp_path: Path) -> None:
    program = with_transfers(schedule("1f1b", ranks=2, microbatches=1))
    write_trace(clock(program, Times(1, 1, 1, send=0.5).of(program)), tmp_path / "t.json", microseconds=1000)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        0: "rank 0",
        1: "rank 1",
    }
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        (0, "0F0", 0, 1000),
        (1, "1F0", 1500, 1000),
        (1, "1B0", 2500, 2000),
        (0, "0B0", 5000, 2000),
    ]
    messages = [(e["ph"], e["pid"], e["name"], e["ts"]) for e in events if e["ph"] in "be"]
    assert messages == [
        ("b", 0, "0SEND_F0", 1000),
        ("e", 0, "0SEND_F0", 1500),
        ("b", 1, "1SEND_B0", 4500),
        ("e", 1, "1SEND_B0", 5000),
    ]


def test_what_overlaps_has_a_number_of_its_own(tmp_path: Path) -> None:
    program = one_stage(3, 2, sharding=Sharding(FSDP))
    write_trace(clock(program, lambda action: 1.0), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(begun) == sorted(event["id"] for event in events if event["ph"] == "e")
    assert len(begun) == len(set(begun))
    kinds = {event["cat"] for event in events if event["ph"] in "Xb"}
    assert kinds == {"F", "B", "GATHER", "REDUCE", "LOSS", "UPDATE"}
