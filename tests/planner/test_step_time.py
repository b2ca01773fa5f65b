"""Where the time of a step goes, on machines whose numbers are easy."""

from dataclasses import replace

import pytest

from fourfold.outline import Step
from fourfold.planner.catalogue import machine
from fourfold.planner.compute import collective
from fourfold.planner.machine import Machine
from fourfold.planner.practice import Practice
from fourfold.planner.step_time import StepTime, StepTimes, step_time, waits
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.step_flops import StepWork
from fourfold.traffic import Event

SPEC = ModelSpec.preset("llama3-8b")
H100 = machine("H100-80GB")


def of(layout: str, *, on: Machine = H100, microbatches: int = 8, recompute: str = "none",
       practice: Practice | None = None) -> StepTime:  # fmt: skip
    return step_time(step(layout, microbatches, recompute), on, practice or Practice())


def step(layout: str, microbatches: int = 8, recompute: str = "none") -> Step:
    return Step(
        SPEC,
        Layout.parse(layout),
        batch=64,
        sequence_length=8192,
        microbatches=microbatches,
        dtype="bfloat16",
        recompute=RecomputeName.parse(recompute),
    )


def test_with_nothing_but_arithmetic_it_is_flops_by_rate() -> None:
    """A machine without a limit of memory, tiles, latency or host computes what the model needs."""
    ideal = replace(
        H100,
        product_efficiency={"bfloat16": 1.0},
        attention_efficiency=1.0,
        attention_backward_efficiency=1.0,
        memory_bytes_per_second=1e30,
        tile=(1, 1),
        launch_seconds=0.0,
    )
    found = of("dp1", on=ideal, microbatches=64).compute
    runs = StepWork(SPEC, Layout(), [["layer.0"]], [((8192,),)], 2)
    from fourfold.program.actions import Kind

    layers, head = (
        runs.of_runs({(kind, block, 0): count for kind in (Kind.FORWARD, Kind.BACKWARD)}).executed
        for block, count in (("layer", 32), ("head", 1))
    )
    flops = 64 * (layers + head)
    # Products with a short inner dimension take up to 256 / k more, attention 512 / s.
    assert 1.0 < found * ideal.peak_flops["bfloat16"] / flops < 1.09


def test_recomputation_costs_a_forward() -> None:
    none, full, selective = (
        of("fsdp8", recompute=policy).compute for policy in ("none", "full", "selective")
    )
    assert 1.25 < full / none < 1.34
    assert none < selective < none + 0.2 * (full - none)


def test_small_products_of_one_kernel_fill_a_device_together() -> None:
    """27 of 2 x 2 tiles are one wave of 108 processors, as one of them is."""
    a100 = replace(machine("A100-80GB"), memory_bytes_per_second=1e30)
    one, many = (a100.product_seconds(256, 512, 4096, "bfloat16", count=count) for count in (1, 27))
    assert many == pytest.approx(one, rel=1e-12)


def test_messages_that_ranks_wait_for() -> None:
    """Each of 8 microbatches stands still once before its forward and once before its backward."""
    asked = step("pp2")
    message = collective(Event("send", "pp", asked.sizes.stream, "bfloat16"), asked, H100)
    waiting = of("pp2", practice=Practice(sends_wait=True)).total - of("pp2").total
    assert waiting == pytest.approx(16 * message, rel=0.01)


def test_what_cannot_hide_is_longer_than_what_computes() -> None:
    assert waits(3.0, 2.0, 0.0) == 1.0
    assert waits(1.0, 2.0, 0.1) == pytest.approx(0.1)


def test_a_slow_network_shows_on_the_batch_axis() -> None:
    slow = machine("H100-80GB", network_bytes_per_second=1e9)
    fast, behind = of("fsdp64", microbatches=1), of("fsdp64", on=slow, microbatches=1)
    assert behind.data > 10 * fast.data
    assert behind.compute == fast.compute
    # With a replica in each node only the sums of pieces cross, once a step, not with each microbatch.
    assert of("dp4,fsdp8", on=slow, microbatches=2).data < of("fsdp32", on=slow, microbatches=2).data / 1.5


def test_parts_add_up_and_stand_where_they_belong() -> None:
    found = of("pp4,fsdp2,tp2", microbatches=32)
    assert found.total == pytest.approx(
        found.compute + found.launch + found.tp + found.cp + found.data + found.bubble + found.optimizer
    )
    assert found.tp > 0
    assert found.bubble > 0
    assert of("fsdp8,cp2", microbatches=4).tp == of("fsdp16", microbatches=4).bubble == 0


def test_float8_and_compiling_make_it_faster() -> None:
    plain = of("fsdp8").total
    assert of("fsdp8", practice=Practice(products="float8")).total < 0.85 * plain
    assert 0.8 * plain < of("fsdp8", practice=Practice(compiled=True)).total < plain


def test_small_layers_wait_for_the_host() -> None:
    slow_host = replace(H100, launch_seconds=1e-3)
    found = of("fsdp8", on=slow_host)
    assert found.launch > found.compute


@pytest.mark.parametrize(
    "layout",
    ["pp4,fsdp2", "pp4:interleaved4,fsdp2", "pp4:interleaved8,fsdp2", "pp8", "pp8:zb-h1", "pp4:gpipe,dp2"],
)
def test_the_closed_form_is_near_the_clock(layout: str) -> None:
    times = StepTimes(H100)
    for microbatches in (8, 32):
        one = step(layout, microbatches)
        assert times.quick(one).total == pytest.approx(times.exact([one])[0].total, rel=0.03)


def test_the_exchange_of_ulysses_is_of_its_own_ranks_alone() -> None:
    exchange = Event("all_to_all", "cp", 1 << 24, "bfloat16")
    of_two, of_four = (H100.collective_seconds(exchange, ranks, stride=1) for ranks in (2, 4))
    assert collective(exchange, step("cp4:ulysses2,dp8"), H100) == of_two < of_four
    assert collective(exchange, step("cp4:ulysses,dp8"), H100) == of_four
