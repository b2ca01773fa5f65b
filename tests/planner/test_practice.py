"""What other software does differently changes a step's time by as much as it should."""

import numpy as np
import pytest

from fourfold.outline import Step
from fourfold.planner.catalogue import machine
from fourfold.planner.compute import FORWARD_KERNELS, collective, numel_of_blocks
from fourfold.planner.pipeline import StageSeconds, pipeline
from fourfold.planner.practice import Practice
from fourfold.planner.stages import Stage, most_stages, stages_of
from fourfold.planner.step_time import StepTime, step_time
from fourfold.specs import Layout, ModelSpec
from fourfold.traffic import Event

SPEC = ModelSpec.preset("llama3-8b").replace({"num_hidden_layers": 6})
A100 = machine("A100-80GB")


def step(layout: str) -> Step:
    return Step(SPEC, Layout.parse(layout), 64, 2048, 8, "bfloat16")


def of(layout: str, **practice: object) -> StepTime:
    return step_time(step(layout), A100, Practice(**practice))  # type: ignore[arg-type]


def test_layers_come_to_stages_in_three_ways() -> None:
    assert most_stages(6, "blocks") == 8
    alone = stages_of(SPEC, 2048, 8, "blocks")
    assert alone == (Stage(0, True, False), *[Stage(1, False, False)] * 6, Stage(0, False, True))
    assert [stage.layers for stage in stages_of(SPEC, 2048, 4, "blocks")] == [1, 2, 2, 1]
    assert [stage.layers for stage in stages_of(SPEC, 2048, 4, "layers")] == [2, 2, 1, 1]
    assert of("pp8", dealt="blocks").bubble > 0  # of so many stages ours has no layer for each


def test_steps_that_overlap_have_no_bubble_where_all_halves_are_equal() -> None:
    """ZB-H2: every rank works from its first action to its last; the last begins 3 forwards late."""
    schedule = pipeline("zb-h2", 4, 12, 4)
    one = np.ones((4, 1))
    times, nothing = StageSeconds(one, 2 * one, one), np.zeros(1)
    assert schedule.seconds(times, nothing, steps_overlap=True) == 36
    assert schedule.seconds(times, nothing) == 39


def test_a_host_that_waits_for_each_kernel_adds_what_starting_takes() -> None:
    started = 6 * 3 * FORWARD_KERNELS["layer"] + 2 * FORWARD_KERNELS["embed"] + 3 * FORWARD_KERNELS["head"]
    waiting = of("dp1", launches_wait=True, launch_seconds=1e-5)
    assert waiting.launch == pytest.approx(8 * started * 1e-5)
    assert waiting.compute == of("dp1").compute


def test_sums_that_wait_hide_behind_nothing() -> None:
    behind, after = (of("fsdp8:zero1", sums_wait=wait).data for wait in (False, True))
    numel = numel_of_blocks(SPEC, 1, False)["layer"]
    sent = (Event("all_gather", "fsdp", 2 * numel, ""), Event("reduce_scatter", "fsdp", 4 * numel, ""))
    seconds = sum(collective(event, step("fsdp8:zero1"), A100) for event in sent)
    assert after - behind == pytest.approx(6 * (1 - A100.interference) * seconds)


def test_messages_in_pieces_are_gathered_behind() -> None:
    asked = step("pp2,tp4:allreduce")
    nbytes = asked.sizes.stream
    whole, piece, gather = (
        collective(Event(op, axis, size, "bfloat16"), asked, A100)
        for op, axis, size in (
            ("send", "pp", nbytes),
            ("send", "pp", nbytes // 4),
            ("all_gather", "tp", nbytes),
        )
    )
    waits = {cut: of("pp2,tp4:allreduce", sends_wait=True, messages_cut=cut) for cut in (False, True)}
    gained = waits[False].total - waits[True].total
    assert gained == pytest.approx(18 * (whole - piece - gather))  # of 8 microbatches, and of filling


def test_owners_that_broadcast_take_their_turns() -> None:
    """Eight broadcasts of an eighth each that nothing hides, in place of gathers that hide."""
    asked, numel = step("fsdp8:zero1"), numel_of_blocks(SPEC, 1, False)["layer"]
    each = collective(Event("broadcast", "fsdp", 6 * 2 * numel // 8, ""), asked, A100)
    gather = collective(Event("all_gather", "fsdp", 2 * numel, ""), asked, A100)
    turns = of("fsdp8:zero1", owners_broadcast=True).data - of("fsdp8:zero1").data
    assert turns == pytest.approx(8 * each - 6 * A100.interference * gather)
