"""Every layout gives the numbers of one process: `verify` on real ranks, in float64 to 1e-10.

The product of all features is large. Here every pair of them is met, by random models on random layouts of up
to 4 ranks, and some of the rest on up to 8; ``make fuzz`` goes on from there.
"""

import functools
from itertools import combinations, islice, product
from typing import Any

import pytest

from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.oracle import Oracle
from fourfold.specs import SCHEDULE_RULES, Layout, ModelSpec, ShardingSection
from fourfold.trial import Trial
from fourfold.verify import Verification, oracle_of, verify, verify_trial
from tests.random_trials import POLICIES, covering, endless, features
from tests.ranks import RankPool


@functools.cache
def oracle(model: str, batch: int, steps: int) -> Oracle:
    """One for all layouts that are held against it: rank 0 computes it once, and stays."""
    spec = ModelSpec.preset(model)
    return Oracle(spec, SyntheticDataset(spec.vocab_size, 24, 3), batch=batch, steps=steps, seed=0)


def on_a_rank(layout: str, model: str, options: dict[str, Any]) -> Verification:
    one_process = oracle(model, options.pop("batch"), options.pop("steps", 3))
    return verify(one_process, Mesh(Layout.parse(layout)), **options)


def compare(ranks: RankPool, layout: str, model: str, **options: Any) -> Verification:
    results = ranks(Layout.parse(layout).world_size, on_a_rank, layout, model, options)
    assert all(result == results[0] for result in results), "ranks disagree about the outcome"
    return results[0]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("layout", ["dp1", "dp2", "dp3", "dp4"])
def test_float64_equals_one_process(ranks: RankPool, layout: str, microbatches: int) -> None:
    outcome = compare(ranks, layout, "tiny", batch=24, microbatches=microbatches, dtype="float64")
    assert outcome.passes, outcome.to_json()
    assert max(outcome.loss.error, outcome.norm.error, outcome.weights[0].error) < 1e-12
    assert len(outcome.gradients) == len(ModelSpec.preset("tiny").parameter_shapes())


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_biases_norms_and_a_tied_head(ranks: RankPool, model: str) -> None:
    outcome = compare(ranks, "dp4", model, batch=12, dtype="float64")
    assert outcome.passes, outcome.to_json()


def test_ranks_with_uneven_and_with_no_valid_tokens(ranks: RankPool) -> None:
    """One row a rank: nearly all labels count, none, and some. Nobody is skipped and nobody averages."""
    outcome = compare(ranks, "dp3", "tiny", batch=3, dtype="float64")
    assert outcome.valid_tokens[1] == 0
    assert len(set(outcome.valid_tokens)) == 3
    assert outcome.passes, outcome.to_json()


def test_accumulation_does_not_change_the_numbers(ranks: RankPool) -> None:
    """The same 24 rows as 1, 3 and 12 microbatches a rank."""
    # DP-13
    for microbatches in (1, 3, 12):
        outcome = compare(ranks, "dp2", "tiny", batch=24, microbatches=microbatches, dtype="float64")
        assert outcome.passes, outcome.to_json()


SHARDED = ["fsdp2", "fsdp3", "fsdp4", "fsdp4:zero1", "fsdp4:zero2", "dp2,fsdp2"]


PIECES = ["auto", "matrices", "rows", "flat"]
KINDS = [("tiny", 1), ("tiny-qwen3", 4), ("tiny", 4), ("tiny-qwen3", 1)]


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("layout", SHARDED)
def test_sharded_equals_one_process(ranks: RankPool, layout: str, pieces: str) -> None:
    """Every placement and granularity; each layout untied and tied, with 1 and 4 microbatches."""
    model, microbatches = KINDS[(SHARDED.index(layout) + PIECES.index(pieces)) % 4]
    batch = 12 if Layout.parse(layout).world_size == 3 else 16
    options = {"batch": batch, "microbatches": microbatches, "dtype": "float64", "steps": 2}
    outcome = compare(ranks, layout, model, **options, sharding=ShardingSection(pieces=pieces))
    assert outcome.passes, outcome.to_json()
    assert max(outcome.loss.error, outcome.norm.error, outcome.weights[0].error) < 1e-12
    assert len(outcome.gradients) == len(ModelSpec.preset(model).parameter_shapes())


@pytest.mark.parametrize(
    ("layout", "accumulate", "prefetch"),
    [
        ("fsdp2", "pieces", 0), ("fsdp2", "pieces", 3), ("fsdp2", "whole", 1), ("fsdp2", "whole", 99),
        ("fsdp2:zero2", "whole", 0), ("dp2,fsdp2", "whole", 1), ("dp2,fsdp2", "pieces", 99),
    ],
)  # fmt: skip
def test_when_weights_and_gradients_move_does_not_matter(
    ranks: RankPool, layout: str, accumulate: str, prefetch: int
) -> None:
    sharding = ShardingSection(prefetch=prefetch, accumulate=accumulate)
    options = {"batch": 12, "microbatches": 3, "dtype": "float64", "steps": 2}
    outcome = compare(ranks, layout, "tiny", **options, sharding=sharding)
    assert outcome.passes, outcome.to_json()


def test_a_sharded_rank_without_valid_tokens(ranks: RankPool) -> None:
    outcome = compare(ranks, "fsdp3", "tiny", batch=3, dtype="float64")
    assert outcome.valid_tokens[1] == 0
    assert outcome.passes, outcome.to_json()


@pytest.mark.parametrize(
    ("layout", "dtype"), [("fsdp4", "bfloat16"), ("fsdp4:zero1", "float32"), ("dp2,fsdp2", "bfloat16")]
)
def test_sharded_in_lower_precision(ranks: RankPool, layout: str, dtype: str) -> None:
    outcome = compare(ranks, layout, "tiny", batch=24, microbatches=2, dtype=dtype)
    assert outcome.passes, outcome.to_json()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_within_its_tolerance(ranks: RankPool, dtype: str) -> None:
    outcome = compare(ranks, "dp4", "tiny", batch=12, microbatches=3, dtype=dtype)
    assert outcome.passes, outcome.to_json()


@functools.cache
def oracle_of_subject(subject: Trial) -> Oracle:
    return oracle_of(subject)


def on_a_rank_of(trial: Trial) -> Verification:
    subject = Trial(
        trial.spec,
        Layout(),
        batch=trial.batch,
        sequence_length=trial.sequence_length,
        steps=trial.steps,
        seed=trial.seed,
    )
    return verify_trial(trial, oracle_of_subject(subject))


TRIALS = covering(0, drawn=2500, most_ranks=4)
SAMPLE = list(islice(endless(0, least_ranks=5), 4))


@pytest.mark.parametrize("trial", TRIALS + SAMPLE, ids=lambda trial: f"{trial.layout}-{trial.seed}")
def test_every_pair_of_features_and_a_sample_on_more_ranks(ranks: RankPool, trial: Trial) -> None:
    outcomes = ranks(trial.layout.world_size, on_a_rank_of, trial)
    assert all(outcome == outcomes[0] for outcome in outcomes), "ranks disagree about the outcome"
    [outcome, *_] = outcomes
    assert outcome.passes, f"{outcome.where}\n{trial.command()}\n{outcome.to_json()}"
    assert len(outcome.gradients) == len(outcome.weights) == len(trial.spec.parameter_shapes())


def test_the_pairs_are_met() -> None:
    """Of what random trials can meet, and each axis with each other, each schedule and each policy."""
    met = {pair for trial in TRIALS for pair in combinations(sorted(features(trial)), 2)}
    words = {word for pair in met for word in pair}
    schedules = {word for word in words if word.startswith("pp:")}
    policies = {word for word in words if word.startswith("recompute ")}
    assert len(schedules) == len(SCHEDULE_RULES)
    assert len(policies) == len(POLICIES)
    wanted = {tuple(sorted(pair)) for pair in product(schedules, policies)}
    wanted |= {
        tuple(sorted(pair)) for pair in product(schedules, ("tied", "window", "tp:default", "cp:ring"))
    }
    assert wanted <= met
