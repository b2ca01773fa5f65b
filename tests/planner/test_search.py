"""What the search finds is allowed, fits, and is the best there is."""

from dataclasses import replace

import pytest

from fourfold.errors import UserError
from fourfold.explain import Explanation, explain
from fourfold.outline import Step, outline
from fourfold.planner.catalogue import machine
from fourfold.planner.fits import USABLE
from fourfold.planner.plans import TIE, Found, Question, simplest_first
from fourfold.planner.search import LEAST_TOKENS, MOST_ROWS, POLICIES, Search
from fourfold.planner.step_time import StepTimes
from fourfold.rehearsal.run import rehearse
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.layouts import every_layout
from fourfold.specs.recompute_name import RecomputeName
from fourfold.specs.spec import divisors

ASKED = Question(
    ModelSpec.preset("qwen3-4b").replace({"num_hidden_layers": 12}), machine("A100-40GB"), 8, 4096, 32
)


@pytest.fixture(scope="module")
def found() -> Found:
    return Search(ASKED).run()


def test_every_plan_is_allowed_and_fits(found: Found) -> None:
    assert len(found.plans) == 50
    for plan in found.plans:
        assert not plan.step.problems(world_size=8)
        assert plan.memory.reserved <= USABLE * ASKED.machine.memory_bytes
        assert plan.tokens_per_second == pytest.approx(32 * 4096 / plan.time.total / 8)


def test_the_walk_over_the_program_says_that_it_fits(found: Found) -> None:
    for plan in (found.plans[0], found.without_pipeline, found.by_hand):
        assert plan is not None
        assert max(held.peak for held in explain(plan.step).memory) < ASKED.machine.memory_bytes


def test_plans_pass_a_rehearsal_at_a_proxy_size(found: Found) -> None:
    """What is printed by default: the same layouts and policies do with a small model what is predicted."""
    small = ASKED.spec.replace({"hidden_size": 64, "intermediate_size": 64, "head_dim": 2, "vocab_size": 512})
    for plan in [*found.plans[:5], found.without_pipeline, found.by_hand]:
        assert plan is not None
        proxy, rank = replace(plan.step, spec=small, sequence_length=64), ASKED.ranks - 1
        at = proxy.layout.coordinates(rank)
        explained = Explanation(proxy, outline(proxy, tp_rank=at["tp"]))
        predicted = explained.events(at["pp"], shard=at["fsdp"])
        assert list(rehearse(proxy, rank=rank).events) == predicted


def test_no_layout_is_faster_than_the_first(found: Found) -> None:
    """All layouts, by another way to enumerate them."""
    times, best = StepTimes(ASKED.machine), float("inf")
    search = Search(ASKED)
    for microbatches in divisors(ASKED.batch):
        layouts = every_layout(8, ASKED.spec, batch=32, microbatches=microbatches, sequence_length=4096)
        for layout in layouts:
            if layout.pp > 1 or "tp" in layout.options:
                continue
            for policy in POLICIES:
                step = Step(
                    ASKED.spec, layout, 32, 4096, microbatches, "bfloat16", recompute=RecomputeName(policy)
                )
                if step.rows <= MOST_ROWS and 4096 // layout.size("cp", "tp") >= LEAST_TOKENS:
                    plan = search.plan(step)
                    if search.fits(plan):
                        best = min(best, times.quick(step).total)
    flat = found.without_pipeline
    assert flat is not None
    assert flat.time.total == pytest.approx(best)
    assert found.plans[0].time.total <= best * (1 + TIE)


def test_of_two_that_cannot_be_told_apart_the_simpler_is_first(found: Found) -> None:
    quick = min(found.plans, key=lambda plan: plan.time.total)
    assert found.plans[0].time.total <= quick.time.total * (1 + TIE)
    assert found.without_pipeline is not None
    alone = replace(quick, step=found.without_pipeline.step)
    cut = replace(quick, step=replace(alone.step, layout=Layout(pp=2, fsdp=2, tp=2)))
    for slower, first in ((0.02, alone), (0.05, cut)):
        late = quick.time.optimizer + slower * quick.time.total
        plans = [cut, replace(alone, time=replace(quick.time, optimizer=late))]
        assert simplest_first(plans)[0].step == first.step


def test_everything_is_counted(found: Found) -> None:
    assert found.tried > 1000
    assert found.dropped["does not fit into memory"] > 50


def test_nothing_that_fits_is_an_answer_too() -> None:
    alone = replace(ASKED, ranks=1, machine=machine("L4"), batch=1)
    with pytest.raises(
        UserError, match=r"no layout of 1 device is possible: .* does not fit into memory"
    ) as no:
        Search(alone).run()
    step = Step(ASKED.spec, Layout(), 1, 4096, 1, "bfloat16", recompute=RecomputeName("full"))
    needed = Search(alone).plan(step).memory.reserved / 1e9
    assert f"the layout that takes least needs {needed:.1f} GB of" in str(no.value)


def test_every_way_to_cut_a_sequence_is_looked_at() -> None:
    """32 query and 8 key/value heads on 8 ranks: a ring, Ulysses in pairs, in fours, over all."""
    long = replace(ASKED, sequence_length=65536, batch=2)
    options = {shape.context for shape in Search(long)._shapes() if (shape.cp, shape.tp) == (8, 1)}
    assert options == {"ring", "ulysses2", "ulysses4", "ulysses8"}
