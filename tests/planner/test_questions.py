"""Deadlines, lengths, depths and knobs."""

from dataclasses import replace

import pytest

from fourfold.planner.catalogue import machine
from fourfold.planner.plans import Question
from fourfold.planner.questions import cost, deepest_model, fewest_devices, knobs, longest_sequence
from fourfold.planner.search import Search
from fourfold.specs import ModelSpec

ASKED = Question(ModelSpec.preset("qwen3-0.6b"), machine("A100-40GB"), 2, 1024, 8)


def test_a_budget_of_tokens_in_days_and_device_hours() -> None:
    plan = Search(ASKED).run().plans[0]
    found = cost(plan, 1e9)
    assert found.steps == -(-(10**9) // (8 * 1024))
    assert found.device_hours == pytest.approx(found.days * 24 * 2)
    assert cost(plan, 0.5).steps == 1


def test_the_fewest_devices_are_enough_and_half_are_not() -> None:
    found = fewest_devices(ASKED, 1e9, days=0.05)
    assert found is not None
    assert found.days <= 0.05
    ranks = found.plan.step.layout.world_size
    half = cost(Search(replace(ASKED, ranks=ranks // 2)).run().plans[0], 1e9)
    assert half.days > 0.05
    assert fewest_devices(replace(ASKED, batch=2), 1e15, days=0.01) is None


def test_the_longest_row_fits_and_the_next_does_not() -> None:
    asked = replace(ASKED, ranks=1, batch=1024)
    length = longest_sequence(asked)
    tokens = 1024 * 1024
    assert length > 2048
    assert not Search(
        replace(asked, sequence_length=2 * length, batch=max(1, tokens // (2 * length)))
    ).anything_fits()


def test_the_deepest_model() -> None:
    asked = replace(ASKED, machine=replace(ASKED.machine, memory_bytes=12e9))
    layers = deepest_model(asked)
    deeper = asked.spec.replace({"num_hidden_layers": layers + 1})
    assert 28 < layers < 200
    assert not Search(replace(asked, spec=deeper)).anything_fits()


def test_no_knob_makes_it_slower() -> None:
    before = Search(ASKED).run().plans[0].time.total
    for name, asked in knobs(ASKED):
        found = Search(asked).run().plans[0].time.total
        assert found > 2 * before if asked.dtype == "float32" else found <= before * 1.03, name
