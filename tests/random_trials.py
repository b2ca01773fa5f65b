"""Random trials of small models on layouts of up to 8 ranks, and a choice of them that meets every pair."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import combinations, count
from random import Random

from fourfold.outline import Step
from fourfold.specs import AXES, Layout, ModelSpec, ShardingSection
from fourfold.specs.layouts import every_degrees, options_of
from fourfold.specs.recompute_name import RecomputeName
from fourfold.trial import Trial

MOST_RANKS = 8
DRAWS = 20
"""Of shapes for a layout, until they fit it: else layouts that ask for much would be rare."""
SUBJECTS = 16
"""Models with their data, which the trials of `covering` have in common."""
POLICIES = ("none", "full", "every:2", "sqrt", "slots:2", "min", "budget:0.0001", "selective")


def random_trial(
    random: Random,
    *,
    most_ranks: int = MOST_RANKS,
    subjects: Sequence[Trial] = (),
    problems: Callable[[Trial], list[str]] = Trial.problems,
) -> Trial:
    """Draw a trial that breaks no rule: layout, shapes, batches, precision float64.

    Where ``subjects`` are given, what one process computes is one of theirs: model, batch, data and seed.
    """
    layout = _layout(random, most_ranks)
    for draw in count(1):
        if draw % DRAWS == 0:
            layout = _layout(random, most_ranks)
        microbatches = random.choice([1, 2, 3, 4, 5, 8] if layout.pp > 1 else [1, 2, 3])
        trial = Trial(
            spec=_model(random),
            layout=layout,
            batch=layout.size("dp", "fsdp") * microbatches * random.choice([1, 1, 2]),
            microbatches=microbatches,
            sequence_length=random.choice([3, 7, 12, 16, 17, 24]),
            steps=3,
            seed=random.randrange(1000),
            sharding=ShardingSection(
                pieces=random.choice(["auto", "blocks", "matrices", "rows", "flat"]),
                prefetch=random.choice([0, 1, 1, 3]),
                accumulate=random.choice(["auto", "pieces", "whole"]),
            ),
            recompute=RecomputeName.parse(random.choice(POLICIES)),
        )
        if subjects:
            one = random.choice(subjects)
            trial = replace(
                trial, spec=one.spec, batch=one.batch, sequence_length=one.sequence_length, seed=one.seed
            )
        if not problems(trial):
            return trial
    raise AssertionError("unreachable")


def _layout(random: Random, most_ranks: int) -> Layout:
    # Most numbers up to 8 are prime or have few factors; 4 and 8 let axes meet.
    world_size = random.choice([*range(1, most_ranks + 1), *(n for n in (4, 4, 8, 8) if n <= most_ranks)])
    degrees = random.choice(list(every_degrees(world_size)))
    options = {axis: random.choice(options_of(axis, degrees[axis])) for axis in AXES if degrees[axis] > 1}
    return Layout(**degrees, options={axis: option for axis, option in options.items() if option is not None})


def _model(random: Random) -> ModelSpec:
    kv_heads = random.choice([1, 2, 4])
    return ModelSpec(
        vocab_size=random.choice([31, 64, 101]),
        hidden_size=random.choice([8, 20, 32]),
        intermediate_size=random.choice([24, 48]),
        num_hidden_layers=random.choice([1, 2, 3, 4, 5, 8]),
        num_attention_heads=kv_heads * random.choice([1, 2, 4]),
        num_key_value_heads=kv_heads,
        head_dim=random.choice([4, 6]),
        tie_word_embeddings=random.random() < 0.4,
        attention_bias=random.random() < 0.4,
        qk_norm=random.random() < 0.4,
        sliding_window=random.choice([None, None, 1, 5]),
    )


def features(trial: Trial) -> frozenset[str]:
    """What is special about a trial, in words of which each pair should be met."""
    layout, model = trial.layout, trial.spec
    options = dict(layout.options)
    if "pp" in options:
        options["pp"] = layout.schedule.name
    if "cp" in options:
        options["cp"] = options["cp"].rstrip("0123456789")
    found = [f"{axis}:{options.get(axis, 'default')}" for axis in AXES if layout.size(axis) > 1]
    kv_heads = model.num_key_value_heads
    special = {
        "tied": model.tie_word_embeddings,
        "biases": model.attention_bias,
        "q and k normed": model.qk_norm,
        "window": model.sliding_window is not None,
        "grouped heads": kv_heads < model.num_attention_heads,
        "copies of key/value heads": kv_heads % layout.tp > 0,
        "microbatches": trial.microbatches > 1,
        "fewer microbatches than stages": trial.microbatches < layout.pp,
        "tokens that ranks do not divide": trial.sequence_length % layout.size("cp", "tp") > 0,
        "fewer tokens than ranks": trial.sequence_length < layout.size("cp", "tp"),
        "a piece for each matrix": layout.fsdp > 1 and trial.sharding.pieces in ("blocks", "matrices"),
    }
    found += [word for word, holds in special.items() if holds]
    found.append(f"recompute {trial.recompute.name}")
    return frozenset(found)


def seconds(trial: Trial) -> float:
    """Roughly what a trial takes without its oracle, fitted to what 144 of them took on two cores."""
    ranks, layers = trial.layout.world_size, trial.spec.num_hidden_layers
    # Of each microbatch on each rank a block costs calls into torch, and messages where its input is cut.
    blocks = ranks // trial.layout.pp * trial.microbatches * layers
    messages = blocks if trial.layout.size("cp", "tp") > 1 else 0
    return 0.03 * blocks + 0.017 * messages + 0.011 * ranks * layers + 0.01 * ranks**2


def covering(seed: int, *, drawn: int, most_ranks: int = MOST_RANKS) -> list[Trial]:
    """Of ``drawn`` random trials, few and quick ones that meet every pair that all of them meet.

    Greedy: each time the trial with the most pairs a second that none before had. Sorted by ranks. Many
    layouts share a subject, so that its oracle is computed once.
    """
    random = Random(seed)
    subjects = [
        replace(random_trial(random, most_ranks=1), batch=random.choice([4, 6, 8, 12]))
        for _ in range(SUBJECTS)
    ]
    trials = [
        # Whether a budget of memory is enough takes a whole program to see: that is asked of the taken ones.
        random_trial(random, most_ranks=most_ranks, subjects=subjects, problems=Step.problems)
        for _ in range(drawn)
    ]
    left = [set(combinations(sorted(features(trial)), 2)) for trial in trials]
    queue = [(-len(pairs) / seconds(trials[index]), index) for index, pairs in enumerate(left)]
    heapify(queue)
    met: set[tuple[str, str]] = set()
    taken: list[Trial] = []
    while queue:
        promised, index = heappop(queue)
        left[index] -= met
        rate = -len(left[index]) / seconds(trials[index])
        if left[index] and rate <= promised:
            if trials[index].problems():
                continue
            taken.append(trials[index])
            met |= left[index]
        elif left[index]:  # others were taken since; it may be the best still
            heappush(queue, (rate, index))
    return sorted(taken, key=lambda trial: trial.layout.world_size)


def endless(seed: int, *, least_ranks: int = 1) -> Iterator[Trial]:
    """Random trials, the same for the same seed."""
    random = Random(seed)
    while True:
        trial = random_trial(random)
        if trial.layout.world_size >= least_ranks:
            yield trial
