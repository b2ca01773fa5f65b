"""What a step executes, by formula, is what PyTorch's counter counts while it runs."""

import random
from typing import Any

import pytest

from fourfold.data import SyntheticDataset
from fourfold.flop_counter import FlopCounter
from fourfold.flops import Convention, model_flops_of_rows
from fourfold.mesh import Mesh
from fourfold.parallel_model import ParallelModel
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.step_flops import StepFlops, StepWork
from fourfold.training import initialized, rank_batches
from tests.ranks import RankPool

POLICIES = ["none", "full", "every:2", "sqrt", "slots:2", "min", "selective", "selective:attention+k_proj"]


def random_case(seed: int) -> dict[str, Any]:
    """A model, a batch and a policy."""
    draw = random.Random(seed)
    heads = draw.choice([(4, 4), (4, 2), (4, 1), (6, 3), (6, 2)])
    spec = ModelSpec(
        vocab_size=draw.choice([67, 131]),
        hidden_size=draw.choice([16, 24, 48]),
        intermediate_size=draw.choice([20, 32]),
        num_hidden_layers=draw.randint(1, 3),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=draw.choice([8, 16]),
        tie_word_embeddings=draw.random() < 0.5,
        attention_bias=draw.random() < 0.5,
        qk_norm=draw.random() < 0.5,
        sliding_window=draw.choice([None, None, 1, 3, 5, 16]),
    )
    return {
        "spec": spec,
        "microbatches": draw.randint(1, 2),
        "rows": draw.randint(1, 2),
        "length": draw.choice([6, 12, 17]),
        "policy": draw.choice(POLICIES),
        "dtype": draw.choice(["float32", "bfloat16"]),
        "seed": seed,
        "convention": draw.choice(["pairs", "square"]),
    }


def counted_and_by_formula(
    layout: str,
    *,
    spec: ModelSpec,
    microbatches: int,
    rows: int,
    length: int,
    policy: str,
    dtype: str,
    seed: int,
    convention: Convention = "pairs",
) -> tuple[int, StepFlops, int]:
    """Of one step: this rank's FLOPs as counted, all ranks' by formula, and what the model needs."""
    mesh = Mesh(Layout.parse(layout))
    batch = rows * microbatches * mesh.data.size
    parallel = initialized(
        spec, mesh, microbatches=microbatches, dtype=dtype, seed=0, sequence_length=length, batch=batch,
        recompute=RecomputeName.parse(policy),
    )  # fmt: skip
    data = SyntheticDataset(spec.vocab_size, sequence_length=length, seed=seed)
    batches = rank_batches(data, mesh, step=0, batch=batch, microbatches=microbatches)
    with FlopCounter(convention) as counter:
        parallel.step(batches, valid_tokens=data.valid_tokens(0, batch), update=lambda _: None)
    documents = data.rows(0, batch, range(batch)).documents
    return (
        counter.flops,
        work_of(parallel, documents, policy, dtype, convention).of_program(parallel.program),
        model_flops_of_rows(spec, documents),
    )


def work_of(
    parallel: ParallelModel,
    documents: tuple[tuple[int, ...], ...],
    policy: str,
    dtype: str,
    convention: Convention,
) -> StepWork:
    microbatches = parallel.program.microbatches
    rows = len(documents) // microbatches
    return StepWork(
        parallel.model.spec,
        parallel.mesh.layout,
        [piece.blocks for piece in parallel.stages.segments],
        [documents[m * rows : (m + 1) * rows] for m in range(microbatches)],
        itemsize={"bfloat16": 2, "float32": 4}[dtype],
        ranks_of_data=parallel.mesh.data.size,
        convention=convention,
        keeps=RecomputeName.parse(policy).not_again(tp=parallel.mesh.tp.size),
    )


@pytest.mark.parametrize("first", range(0, 54, 9))
def test_formula_is_what_is_counted(first: int) -> None:
    """54 models, batches and policies."""
    for seed in range(first, first + 9):
        case = random_case(seed)
        counted, formula, needed = counted_and_by_formula("dp1", **case)
        assert counted == formula.executed, case
        assert formula.model == needed, case


LAYOUTS = [
    ("dp2", "full"), ("fsdp2", "every:2"), ("pp2", "full"), ("pp2:zb-h1", "none"),
    ("pp2:interleaved2", "min"), ("tp2", "full"), ("tp2:allreduce", "none"), ("tp4", "none"),
    ("pp2,tp2", "slots:2"), ("cp2:ring", "full"), ("cp2:ulysses", "none"), ("cp4:ulysses2", "none"),
    ("cp3:ring", "sqrt"), ("dp2,cp2:ring", "none"), ("cp2:ring", "selective"), ("tp4", "selective:v_proj"),
]  # fmt: skip


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("layout", "policy"), LAYOUTS)
def test_the_ranks_of_a_layout_execute_what_the_formula_says(
    ranks: RankPool, layout: str, policy: str, window: int | None
) -> None:
    """tp4 holds copies of the two key/value heads; a window on cp is computed in bands."""
    spec = ModelSpec(
        vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=window, attention_bias=True,
    )  # fmt: skip
    case: dict[str, Any] = {
        "spec": spec,
        "microbatches": 2,
        "rows": 1,
        "length": 12,
        "dtype": "float32",
        "seed": 5,
    }
    found = ranks(Layout.parse(layout).world_size, counted_and_by_formula, layout, **case, policy=policy)
    formulas = {formula for _, formula, _ in found}
    assert len(formulas) == 1, "all ranks know the FLOPs of all"
    (formula,) = formulas
    assert sum(counted for counted, _, _ in found) == formula.executed
    assert {needed for _, _, needed in found} == {formula.model}
    assert (formula.recomputed > 0) == (policy not in ("none", "selective")), "by default all products stay"
    assert (formula.padding > 0) == (window is not None or layout == "tp4")


def test_logits_of_one_chunk_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens: of the 24 of a microbatch, all but the last 4 twice."""
    case = random_case(0) | {"rows": 2, "length": 12, "policy": "none", "dtype": "float32"}
    spec = case["spec"]
    monkeypatch.setattr("fourfold.memory.LOGITS_BYTES", 4 * 4 * spec.vocab_size)
    counted, formula, _ = counted_and_by_formula("dp1", **case)
    assert counted == formula.executed
    assert formula.recomputed == case["microbatches"] * 20 * 2 * spec.vocab_size * spec.hidden_size
