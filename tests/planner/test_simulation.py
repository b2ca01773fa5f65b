import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fourfold.build import Sharding
from fourfold.cli import app
from fourfold.cli.simulate import machine_of
from fourfold.errors import UserError
from fourfold.layer.schedules import named_schedules, schedule
from fourfold.layer.transfers import with_transfers
from fourfold.outline import Outline, Step, outline
from fourfold.planner.catalogue import machine
from fourfold.planner.simulated import COMPUTING, Devices, Load, Phase
from fourfold.planner.simulation import simulate
from fourfold.planner.simulation_loads import Knobs, simulate_step
from fourfold.planner.simulation_trace import write_simulation
from fourfold.program import Action, Kind, Program, clock
from fourfold.program.actions import COMMUNICATION
from fourfold.program.clock import Span, Times
from fourfold.program.trace import write_trace
from fourfold.specs import Layout, ModelSpec
from tests.programs import FSDP, ZERO1, one_stage

ALONE = Devices()


def load_of(durations: dict[Kind, float], lane: str = "fsdp") -> Load:
    """One phase an action; communication takes no cores."""

    def load(rank: int, action: Action) -> tuple[Phase, ...]:
        sends = action.kind in COMMUNICATION
        return (Phase(lane if sends else COMPUTING, durations[action.kind], 0.0 if sends else 1.0),)

    return load


def flat(spans: Iterable[Span]) -> dict[str, float]:
    found = {}
    for span in spans:
        found[f"{span.rank}:{span.action} begins"] = span.start_seconds
        found[f"{span.rank}:{span.action} ends"] = span.end_seconds
    return found


def starts(program: Program, load: Load, devices: Devices = ALONE) -> dict[str, tuple[float, float]]:
    spans = simulate(program, load, devices).timeline.spans
    return {f"{span.rank}:{span.action}": (span.start_seconds, span.end_seconds) for span in spans}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_with_nothing_that_slows_it_is_the_clock(ranks: int) -> None:
    """Of every schedule, with messages that take time."""
    for found in named_schedules(ranks=ranks, microbatches=2 * ranks).values():
        program = with_transfers(found)
        times = Times(1.0, 1.25, 0.75, send=0.5)
        durations = times.by_kind(len(program.ranks) / program.num_segments)
        simulated = simulate(program, load_of(durations, "pp"), ALONE).timeline.spans
        assert flat(simulated) == pytest.approx(flat(clock(program, times.of(found)).spans))


@pytest.mark.parametrize("placement", [FSDP, ZERO1])
def test_collectives_behind_computation_are_those_of_the_clock(placement: object) -> None:
    program = one_stage(4, 2, sharding=Sharding(placement))  # type: ignore[arg-type]
    durations = dict.fromkeys(Kind, 0.0) | {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: 2.0,
        Kind.GATHER: 1.5,
        Kind.REDUCE: 2.5,
        Kind.UPDATE: 0.25,
    }
    simulated = simulate(program, load_of(durations), ALONE).timeline.spans
    assert flat(simulated) == pytest.approx(flat(clock(program, lambda action: durations[action.kind]).spans))


def test_what_is_sent_behind_computation_slows_it() -> None:
    """4 seconds of the backward run at two thirds of the rate behind the reduction of the segment above."""
    program = one_stage(2, 1)
    durations = dict.fromkeys(Kind, 0.0) | {Kind.BACKWARD: 10.0, Kind.REDUCE: 4.0}
    found = starts(program, load_of(durations), replace(ALONE, interference=0.5))
    assert found["0:1REDUCE"] == (10, 14)
    assert found["0:0B0"] == pytest.approx((10, 14 + 10 - 4 / 1.5))


def test_ranks_share_cores_and_an_idle_one_leaves_its_own_to_the_others() -> None:
    """Two stages of one rank each on one core: a stage alone has all of it, both have half each."""
    program = with_transfers(schedule("gpipe", ranks=2, microbatches=2))
    durations = dict.fromkeys(Kind, 0.0) | {Kind.FORWARD: 1.0}
    found = starts(program, load_of(durations, "pp"), Devices(cores=1.0))
    assert found["0:0F0"] == (0, 1), "alone"
    assert (found["0:0F1"], found["1:1F0"]) == ((1, 3), (1, 3)), "together"
    assert found["1:1F1"] == (3, 4), "alone again"


def test_each_pipeline_rank_stands_for_several() -> None:
    """Four ranks of one stage on two cores take twice the time; what they send takes cores as well."""
    program = one_stage(1, 1)
    durations = dict.fromkeys(Kind, 0.0) | {Kind.FORWARD: 3.0}
    assert starts(program, load_of(durations), Devices(cores=2.0, ranks=4))["0:0F0"] == (0, 6)

    def load(rank: int, action: Action) -> tuple[Phase, ...]:
        return (Phase("fsdp", 2.0, 0.75),) if action.kind is Kind.REDUCE else ()

    assert starts(program, load, Devices(cores=2.0, ranks=4))["0:0REDUCE"] == (0, 3)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    program = replace(schedule("1f1b", ranks=2, microbatches=1), ranks=((Action(Kind.BACKWARD, 0, 0),), ()))
    with pytest.raises(ValueError, match="wait for ever at 0B0"):
        simulate(program, load_of(dict.fromkeys(Kind, 0.0)), ALONE)


def outlined(layout: str, *, recompute: str = "none") -> Outline:
    from fourfold.specs.recompute_name import RecomputeName

    return outline(
        Step(
            ModelSpec.preset("llama3-8b"),
            Layout.parse(layout),
            batch=64,
            sequence_length=8192,
            microbatches=8,
            dtype="bfloat16",
            recompute=RecomputeName.parse(recompute),
        )
    )


H100 = machine("H100-80GB")


@pytest.mark.parametrize("layout", ["pp2,fsdp4", "pp4,dp2,tp2", "fsdp8", "cp2,tp4"])
def test_the_parts_of_every_rank_add_up_to_the_step(layout: str) -> None:
    found = simulate_step(outlined(layout), H100)
    for parts in found.parts:
        assert sum(parts.values()) == pytest.approx(found.seconds)
        assert min(parts.values()) >= 0
    exposed = {name for parts in found.parts for name in parts if name.startswith("exposed")}
    axes = {"pp2,fsdp4": {"fsdp"}, "pp4,dp2,tp2": {"dp", "tp"}, "fsdp8": {"fsdp"}, "cp2,tp4": {"cp", "tp"}}
    assert exposed >= {f"exposed {axis}" for axis in axes[layout]}


def test_the_update_begins_when_all_ranks_have_come_to_it() -> None:
    found = simulate_step(outlined("pp4,dp2"), H100)
    spans = found.timeline.spans
    norms = {waited.start_seconds for waited in found.inside if waited.action.kind is Kind.UPDATE}
    sums = max(span.end_seconds for span in spans if span.action.kind in (Kind.REDUCE, Kind.LOSS))
    assert norms == {sums}
    began = {span.rank: span.start_seconds for span in spans if span.action.kind is Kind.UPDATE}
    assert max(began.values()) == sums
    assert began[3] < sums, "its own sums were done, and it waits for the norm"


def test_a_slow_rank_costs_what_it_computes_longer_and_a_slow_link_what_it_sends_longer() -> None:
    found = outlined("pp4,dp2")
    plain, slow = (simulate_step(found, H100, knobs=knobs) for knobs in (Knobs(), Knobs(slow={1: 1.5})))
    assert slow.parts[1]["compute"] == pytest.approx(1.5 * plain.parts[1]["compute"], rel=0.02)
    longer = (slow.seconds - plain.seconds) / plain.parts[1]["compute"]
    assert 0.35 < longer < 0.5, "it was waiting before, too"
    assert slow.parts[2]["bubble"] > plain.parts[2]["bubble"]
    link = simulate_step(outlined("fsdp8"), H100, knobs=Knobs(links={"fsdp": 50.0}))
    assert (
        link.parts[0]["exposed fsdp"] > 10 * simulate_step(outlined("fsdp8"), H100).parts[0]["exposed fsdp"]
    )


def test_forwards_that_run_again_are_told_apart() -> None:
    parts = simulate_step(outlined("fsdp8", recompute="full"), H100).parts[0]
    forward = parts["compute"] / 3
    assert parts["recompute"] == pytest.approx(forward, rel=0.3)


def test_the_trace_has_prediction_and_measurement_side_by_side(tmp_path: Path) -> None:
    found = simulate_step(outlined("pp2,tp4"), H100)
    write_trace(found.timeline, tmp_path / "run.json")
    write_simulation(found, tmp_path / "both.json", measured=tmp_path / "run.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        0: "rank 0, predicted",
        1: "rank 0, measured",
        2: "rank 1, predicted",
        3: "rank 1, measured",
    }
    actions = [
        {(event["name"], event["ts"]) for event in events if event["pid"] == pid and event["ph"] in "Xbe"}
        for pid in range(4)
    ]
    waited = {pair for pair in actions[0] if pair[0].startswith("exposed")}
    assert {name for name, _ in waited} == {"exposed tp", "exposed pp,tp"}, "the norm is a sum over both"
    assert actions[0] - waited == actions[1]
    assert actions[2] >= actions[3]
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert len(begun) == len(set(begun))


def test_a_trace_of_another_layout_is_refused(tmp_path: Path) -> None:
    write_trace(simulate_step(outlined("pp4,dp2"), H100).timeline, tmp_path / "run.json")
    found = simulate_step(outlined("pp2,dp4"), H100)
    with pytest.raises(UserError, match="4 pipeline ranks and the layout 2"):
        write_simulation(found, tmp_path / "both.json", measured=tmp_path / "run.json")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(UserError, match="no trace of a run"):
        write_simulation(found, tmp_path / "both.json", measured=tmp_path / "no.json")


def test_a_machine_is_a_device_or_a_file_or_both(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"launch_seconds": 1e-6}))
    assert machine_of("H100-80GB", path, "bfloat16").launch_seconds == 1e-6
    with pytest.raises(UserError, match="does not describe a whole machine"):
        machine_of(None, path, "bfloat16")
    path.write_text(json.dumps(H100.to_json()))
    assert machine_of(None, path, "bfloat16") == H100
    with pytest.raises(UserError, match="no rate for float64"):
        machine_of(None, _without(path, "float64"), "float64")
    with pytest.raises(UserError, match="on what"):
        machine_of(None, None, "bfloat16")


def _without(path: Path, dtype: str) -> Path:
    values = json.loads(path.read_text())
    values["peak_flops"].pop(dtype)
    path.write_text(json.dumps(values))
    return path


STEP = ("--model", "tiny", "--sequence", "64", "--batch", "8", "--layout", "pp2,dp2", "--microbatches", "2")


def test_the_command_tells_the_step_and_where_it_goes(tmp_path: Path) -> None:
    files = ("--trace", str(tmp_path / "t.json"), "--picture", str(tmp_path / "t.png"))
    told = CliRunner().invoke(app, ["simulate", *STEP, "--gpu", "H100-80GB", *files]).output
    assert "on H100-80GB (catalogue)\n\na step takes" in told
    assert "pipeline rank" in told
    assert (tmp_path / "t.json").exists()
    assert (tmp_path / "t.png").stat().st_size > 1000
    numbers = json.loads(CliRunner().invoke(app, ["simulate", *STEP, "--gpu", "H100-80GB", "--json"]).output)
    assert numbers["tokens_per_second"] == pytest.approx(8 * 64 / numbers["step_seconds"])
    assert sum(numbers["pipeline_ranks"][1].values()) == pytest.approx(numbers["step_seconds"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--slow", "1"), "--slow 1: write what and how many times as long"),
        (("--slow", "2:1.5"), "--slow 2: the layout has pipeline ranks 0 to 1"),
        (("--link", "ib:2"), "--link ib: axes are pp, dp"),
        (("--trace", "t.txt"), "--trace t.txt: the file's name must end in .json"),
        (("--measured", "t.json"), "--measured is for the trace"),
    ],
)
def test_mistakes_are_told(options: tuple[str, ...], message: str) -> None:
    found = CliRunner().invoke(app, ["simulate", *STEP, "--gpu", "H100-80GB", *options])
    assert found.exit_code == 2
    assert message in found.output
