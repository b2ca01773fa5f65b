"""The learning rate is a function of the optimizer step and nothing else."""

import inspect
import math

import pytest

from fourfold.learning_rate import learning_rate
from fourfold.specs import OptimizerSection


def rates(total: int = 100, **values: object) -> list[float]:
    """The rates of steps 1 to total + 1, the highest being 1e-3."""
    spec = OptimizerSection(**{"learning_rate": 1e-3, "final_fraction": 0.1, **values})
    return [learning_rate(step, spec=spec, total_steps=total) for step in range(1, total + 2)]


def test_warm_up_counts_optimizer_steps():
    spec = OptimizerSection(learning_rate=1e-3, warmup_steps=100)
    assert learning_rate(25, spec=spec, total_steps=1000) == 2.5e-4
    assert learning_rate(100, spec=spec, total_steps=1000) == 1e-3
    # Nothing that depends on the number of ranks or microbatches can be passed.
    assert list(inspect.signature(learning_rate).parameters) == ["step", "spec", "total_steps"]


def test_cosine():
    found = rates(schedule="cosine", warmup_steps=20)
    assert found[0] == pytest.approx(1e-3 / 20)
    assert found[19] == 1e-3
    assert found[59] == pytest.approx(0.55e-3)  # half way from 20 to 100
    assert found[39] == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))))
    assert found[99] == pytest.approx(1e-4)
    assert found[100] == found[99]
    assert found[19:100] == sorted(found[19:100], reverse=True)


def test_warm_up_stable_decay():
    found = rates(schedule="wsd", warmup_steps=10, decay_fraction=0.2)
    assert found[9:80] == [1e-3] * 71
    assert found[89] == pytest.approx(0.55e-3)
    assert found[99] == pytest.approx(1e-4)
    assert found[100] == found[99]


def test_decay_waits_for_the_end_of_warm_up():
    found = rates(schedule="wsd", warmup_steps=90, decay_fraction=0.5)
    assert found[89] == 1e-3
    assert found[94] == pytest.approx(0.55e-3)


def test_constant():
    assert rates(schedule="constant", warmup_steps=4)[:5] == [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3]
    assert set(rates(schedule="constant")) == {1e-3}


def test_warm_up_as_long_as_the_run():
    for schedule in ("cosine", "wsd"):
        assert rates(total=4, schedule=schedule, warmup_steps=4)[:4] == [2.5e-4, 5e-4, 7.5e-4, 1e-3]
    assert rates(total=1, schedule="cosine")[0] == pytest.approx(1e-4)
