import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fourfold.bench import network, timing
from fourfold.bench.compute import (
    Shapes,
    measured_attentions,
    measured_blocks,
    measured_products,
    measured_updates,
)
from fourfold.bench.measure import calibration
from fourfold.bench.network import measured_collectives
from fourfold.cli import app
from fourfold.cli.bench import collectives
from fourfold.outline import Step, outline
from fourfold.planner import catalogue
from fourfold.planner.calibration import (
    BlockTable,
    MeasuredAttention,
    MeasuredBlock,
    MeasuredUpdate,
    interpolated,
    shape_of_block,
)
from fourfold.planner.machine import Level, Machine, MeasuredCollective
from fourfold.planner.simulation_loads import simulate_step
from fourfold.planner.step_time import step_time
from fourfold.program import Kind
from fourfold.specs import Layout, ModelSpec
from tests.ranks import RankPool

TINY = ModelSpec.preset("tiny")
CPU = torch.device("cpu")


def test_between_sizes_seconds_lie_on_a_line_of_logarithms() -> None:
    table = [(10.0, 1.0), (1000.0, 100.0)]
    assert interpolated(table, 100) == pytest.approx(10.0)
    assert interpolated(table, 1) == 1.0, "what is left is the time to start"
    assert interpolated(table, 4000) == 400.0


def test_shapes_are_those_of_a_rank_of_tp() -> None:
    spec = ModelSpec.preset("llama3-8b")
    assert shape_of_block(spec, "layer") == (4096, 32, 8, 128, 14336)
    assert shape_of_block(spec, "layer", tp=16) == (4096, 2, 1, 128, 896), "a key/value head at least"
    assert shape_of_block(spec, "head", tp=3) == (4096, 42752)


def cpu(**measured: object) -> Machine:
    """One rank a core, so fast that what was not measured takes next to nothing."""
    values = {
        "name": "cpu",
        "peak_flops": {"float32": 1e15},
        "product_efficiency": {"float32": 1.0},
        "memory_bytes": 1e9,
        "memory_bytes_per_second": 1e15,
        "levels": (Level(0, 1e15, 0.0),),
        "launch_seconds": 0.0,
        "interference": 0.0,
    }
    return Machine(**(values | measured))  # type: ignore[arg-type]


def blocks(*, tp: int = 1, rows: int = 2, sequence: int = 64) -> tuple[MeasuredBlock, ...]:
    """A layer takes 10, 30, 18 and 14 ms, by kind of action."""
    seconds = {"F": 0.010, "B": 0.030, "I": 0.018, "W": 0.014}
    shape = shape_of_block(TINY, "layer", tp=tp)
    return tuple(
        MeasuredBlock("layer", kind, shape, rows, sequence, "float32", took) for kind, took in seconds.items()
    )


def step(layout: str, *, microbatches: int = 1, sequence: int = 64) -> Step:
    parsed = Layout.parse(layout)
    batch = 2 * microbatches * parsed.size("dp", "fsdp")
    return Step(TINY, parsed, batch=batch, sequence_length=sequence, microbatches=microbatches)


def test_measured_blocks_stand_in_place_of_formulas() -> None:
    """Of the layers of one rank: a forward and a backward each."""
    found = simulate_step(outline(step("dp1")), cpu(blocks=blocks(), updates=(MeasuredUpdate(10, 0.5),)))
    layers = TINY.num_hidden_layers
    assert found.parts[0]["compute"] == pytest.approx(layers * 0.040, rel=1e-3)
    elements = TINY.num_parameters
    assert found.parts[0]["optimizer"] == pytest.approx(0.5 * elements / 10)


def test_the_planners_own_prediction_takes_them_too() -> None:
    """And ranks that share a core take that much longer."""
    found = step_time(step("dp4"), cpu(blocks=blocks(), ranks_per_device=2.0))
    assert found.compute == pytest.approx(2 * TINY.num_hidden_layers * 0.040, rel=1e-3)


def test_halves_of_a_backward_are_measured_apart() -> None:
    """Of the two layers of a stage, which are one segment."""
    found = simulate_step(outline(step("pp2", microbatches=2)), cpu(blocks=blocks())).timeline
    seconds = {
        kind: [span.end_seconds - span.start_seconds for span in found.spans if span.action.kind is kind]
        for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    }
    assert max(seconds[Kind.INPUT_GRADIENT]) == pytest.approx(2 * 0.018, rel=1e-2)
    assert max(seconds[Kind.WEIGHT_GRADIENT]) == pytest.approx(2 * 0.014, rel=1e-2)


def test_a_part_of_a_row_pays_for_the_attention_of_the_whole_row() -> None:
    """Of cp2 a rank was measured on 32 tokens that see themselves; it computes half of all pairs of 64."""
    shape = shape_of_block(TINY, "layer")
    heads, kv_heads, head_dim = shape[1:4]
    attentions = tuple(
        MeasuredAttention(2, length, count, kv_heads, head_dim, "float32", took, 2 * took)
        for length, count, took in ((32, heads, 0.001), (64, heads // 2, 0.002))
    )
    machine = cpu(blocks=blocks(sequence=32), attentions=attentions)
    found = simulate_step(outline(step("cp2:ulysses")), machine)
    assert found.parts[0]["compute"] == pytest.approx(TINY.num_hidden_layers * (0.040 + 0.003), rel=1e-3)


def test_ranks_that_share_cores_take_as_much_longer() -> None:
    alone = simulate_step(outline(step("dp4")), cpu(blocks=blocks()))
    shared = simulate_step(outline(step("dp4")), cpu(blocks=blocks(), ranks_per_device=2.0))
    assert shared.parts[0]["compute"] == pytest.approx(2 * alone.parts[0]["compute"])


def test_what_is_sent_takes_the_cores_that_it_was_measured_to_need() -> None:
    """Two ranks on two cores compute and each needs half of one for a reduction: 2 / 3 of the rate."""
    rows = tuple(
        MeasuredCollective("all_reduce", 2, 2, nbytes, 0.004, busy)
        for nbytes, busy in ((8, 0.0), (2**20, 0.5))
    )
    plain, busy = (
        simulate_step(outline(step("dp2")), cpu(blocks=blocks(), collectives=found))
        for found in (tuple(replace(row, busy=0.0) for row in rows), rows)
    )
    assert busy.parts[0]["compute"] > plain.parts[0]["compute"] + 0.001


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    machine = cpu(
        blocks=blocks(),
        attentions=(MeasuredAttention(1, 2, 3, 3, 4, "float32", 0.1, 0.2),),
        updates=(MeasuredUpdate(1, 1.0),),
        collectives=(MeasuredCollective("send", 2, 2, 8, 1.0, 0.5),),
    )
    text = json.dumps(machine.to_json())
    assert Machine.from_json(json.loads(text)) == machine
    (tmp_path / "found.json").write_text(text)
    assert replace(cpu().calibrated(tmp_path / "found.json"), source="catalogue") == machine


def test_what_was_measured_on_one_node_stands_over_the_catalogue(tmp_path: Path) -> None:
    """Other dtypes keep their rates, and the network between nodes stays."""
    h100 = catalogue.machine("H100-80GB")
    found = replace(
        h100,
        source="measured by fourfold bench",
        peak_flops={"bfloat16": 1e15},
        product_efficiency={"bfloat16": 0.7},
        levels=(Level(8, 4e11, 1e-6),),
        launch_seconds=3e-6,
    )
    (tmp_path / "found.json").write_text(json.dumps(calibration(found)))
    machine = h100.calibrated(tmp_path / "found.json")
    assert machine.peak_flops == {**h100.peak_flops, "bfloat16": 1e15}
    assert machine.levels == (Level(8, 4e11, 1e-6), h100.levels[-1])
    assert (machine.launch_seconds, machine.source) == (3e-6, "measured by fourfold bench")
    assert machine.interference == h100.interference, "that was not measured"
    alone = calibration(replace(found, levels=()))
    assert "levels" not in alone
    assert Machine.from_json(alone).levels == ()


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing is measured once: what comes out is tested, not how exact it is."""
    monkeypatch.setattr(timing, "FEWEST", 1)
    monkeypatch.setattr(timing, "MOST", 1)


@pytest.mark.usefixtures("once")
def test_every_block_is_measured_as_each_layout_computes_it() -> None:
    shapes = Shapes.of(TINY, dtype="float32", sequence=8, ranks=2, rows=[1])
    assert shapes.parts == ((1, 1), (2, 1), (1, 2))
    found = list(measured_blocks(shapes, CPU))
    keys = {(row.block, row.kind, row.shape, row.sequence) for row in found}
    assert keys == {
        (block, kind, shape_of_block(TINY, block, tp=tp), 8 // cp)
        for block in ("embed", "layer", "head")
        for kind in "FBIW"
        for cp, tp in shapes.parts
    }
    assert all(row.seconds > 0 for row in found)
    table = BlockTable(found)
    shape = shape_of_block(TINY, "layer", tp=2)
    known = table.block_seconds("layer", "F", shape, rows=1, sequence=8, dtype="float32")
    assert known is not None
    assert known > 0
    assert table.block_seconds("layer", "F", (1,), rows=1, sequence=8, dtype="float32") is None


@pytest.mark.usefixtures("once")
def test_products_attention_and_updates_are_of_the_models_shapes() -> None:
    shapes = Shapes.of(TINY, dtype="float32", sequence=8, ranks=1, rows=[1, 2])
    hidden, heads, kv_heads, head_dim, inner = shape_of_block(TINY, "layer")
    products = {(row.m, row.n, row.k) for row in measured_products(shapes, CPU)}
    assert {(8, inner, hidden), (16, hidden, inner), (8, TINY.vocab_size, hidden)} <= products
    attentions = list(measured_attentions(shapes, CPU))
    assert {(row.rows, row.sequence, row.heads, row.kv_heads, row.head_dim) for row in attentions} == {
        (rows, 8, heads, kv_heads, head_dim) for rows in (1, 2)
    }
    assert all(row.forward_seconds > 0 and row.backward_seconds > 0 for row in attentions)
    (update,) = measured_updates(shapes, CPU)
    assert update.elements > 2 * TINY.vocab_size * TINY.hidden_size


def collectives_on_rank() -> list[MeasuredCollective]:
    network.SIZES, network.CALLS, network.SECONDS, network.PRODUCT = (4096,), 1, 0.0, 8
    return list(measured_collectives(CPU, near=4))


def test_collectives_are_measured_on_groups_of_every_size_and_ranks_agree(ranks: RankPool) -> None:
    found = ranks(4, collectives_on_rank)
    assert found[0] == found[3]
    keys = [(row.op, row.ranks, row.bytes) for row in found[0]]
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    assert keys == [(op, count, nbytes) for count in (2, 4) for op in ops for nbytes in (4096,)]
    assert all(row.seconds > 0 and row.busy >= 0 for row in found[0])


def test_mistakes_of_bench_are_told_at_once() -> None:
    options = ["--rows", "1,x", "--dtype", "float12", "--sequence", "0", "--json", "found.txt"]
    found = CliRunner().invoke(app, ["bench", *options])
    assert found.exit_code == 2
    told = ("--rows 1,x: write numbers", "--dtype float12 does not exist", "--sequence 0 is too small")
    for message in (*told, "must end in .json"):
        assert message in found.output


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """Of an all_reduce on 4 ranks the bus carries 2 x 3 / 4 of the message."""
    lines = collectives(cpu(collectives=(MeasuredCollective("all_reduce", 4, 4, 10**9, 0.5),)))
    assert lines[1].split() == ["all_reduce", "4", "1,000,000,000", "500,000.0", "2.000", "3.000"]
