"""What a rank holds at most, predicted, against every tensor that is alive in a step as it runs."""

from dataclasses import replace

import pytest
import torch

from fourfold.data import SyntheticDataset
from fourfold.explain import memory_of_rank
from fourfold.memory import Category
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.outline import Step
from fourfold.rehearsal.run import run_of
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.training import Trainer
from tests.ranks import RankPool

MODEL = ModelSpec(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
)


def step_of(layout: str, dtype: str, microbatches: int, recompute: str, model: ModelSpec = MODEL) -> Step:
    return Step(
        model,
        Layout.parse(layout),
        batch=2 * microbatches * Layout.parse(layout).size("dp", "fsdp"),
        sequence_length=128,
        microbatches=microbatches,
        dtype=dtype,
        recompute=RecomputeName.parse(recompute),
    )


def packed_rows(step: Step) -> SyntheticDataset:
    """Rows of several documents, of which no two rows have the same."""
    return SyntheticDataset(step.spec.vocab_size, step.sequence_length, seed=0)


class WholeRows:
    """Rows of one document each."""

    def __init__(self, step: Step):
        self._vocab_size, self._length = step.spec.vocab_size, step.sequence_length

    def valid_tokens(self, step: int, batch: int) -> int:
        return batch * self._length

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        shape = len(rows), self._length
        ids = torch.randint(0, self._vocab_size, shape)
        return Microbatch(
            ids, ids.clone(), torch.arange(self._length).repeat(shape[0], 1), ((self._length,),) * shape[0]
        )


Bytes = dict[Category, int]


def held(step: Step, *, packed: bool = False) -> tuple[Bytes, Bytes]:
    """By category when most is held: as counted, and as predicted."""
    mesh = Mesh(step.layout)
    data = packed_rows(step) if packed else WholeRows(step)
    trainer = Trainer(run_of(step), step.spec, mesh, data=data)
    counted = trainer.step(0, counts_memory=True).held
    assert counted is not None
    documents = step.documents_of(mesh.rank, data.documents(0, step.batch)) if packed else None
    predicted = memory_of_rank(step, mesh.rank, device_type="cpu", documents=documents)
    return dict(counted.at_peak), dict(predicted.at_peak)


CASES = [
    ("dp1", "float32", 1, "none"),
    ("dp1", "bfloat16", 2, "full"),
    ("dp1", "float32", 2, "min"),
    ("dp1", "bfloat16", 1, "every:2"),
    ("dp1", "float32", 1, "slots:2"),
    ("dp1", "bfloat16", 2, "selective"),
    ("dp2", "bfloat16", 2, "none"),
    ("fsdp2", "float32", 2, "none"),
    ("fsdp4", "bfloat16", 1, "full"),
    ("fsdp2:zero1", "float32", 2, "none"),
    ("fsdp2:zero2", "bfloat16", 2, "slots:2"),
    ("dp2,fsdp2", "float32", 1, "none"),
    ("pp2", "float32", 4, "none"),
    ("pp2", "bfloat16", 4, "full"),
    ("pp2:gpipe", "bfloat16", 4, "none"),
    ("pp2:interleaved2", "float32", 4, "none"),
    ("pp4:zb-h1", "float32", 4, "none"),
    ("pp2:zb-h1", "bfloat16", 4, "full"),
    ("pp2:zbv", "float32", 4, "none"),
    ("pp4", "float32", 8, "min"),
    ("pp2,fsdp2", "bfloat16", 4, "none"),
    ("tp2", "float32", 1, "none"),
    ("tp2", "bfloat16", 2, "full"),
    ("tp2:allreduce", "float32", 1, "none"),
    ("tp2:regather", "float32", 1, "none"),
    ("fsdp2,tp2", "bfloat16", 2, "selective"),
    ("pp2,tp2", "float32", 4, "none"),
    ("cp2:ring", "bfloat16", 1, "none"),
    ("cp2:ulysses", "bfloat16", 2, "full"),
    ("fsdp2,cp2:ring", "float32", 2, "none"),
    ("cp2:ring,tp2", "float32", 2, "none"),
]


@pytest.mark.parametrize(("layout", "dtype", "microbatches", "recompute"), CASES)
def test_the_peak_is_what_is_alive(
    ranks: RankPool, layout: str, dtype: str, microbatches: int, recompute: str
) -> None:
    """To 1 % on every rank. Weights and gradients are equal to the byte.

    With collectives inside of segments to 5 %: gloo's threads hold on to a buffer for a moment after the end.
    """
    step = step_of(layout, dtype, microbatches, recompute)
    tolerance = 0.05 if step.layout.tp * step.layout.cp > 1 else 0.01
    for counted, predicted in ranks(step.layout.world_size, held, step):
        assert sum(predicted.values()) == pytest.approx(sum(counted.values()), rel=tolerance)
        assert predicted[Category.WEIGHTS] == counted[Category.WEIGHTS]
        # AdamW counts its steps, in 4 bytes a run of parameters.
        assert 0 < counted[Category.OPTIMIZER] - predicted[Category.OPTIMIZER] < 100
        for category in (Category.GRADIENTS, Category.GATHERED):
            assert predicted[category] == counted[category]


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("dp1", "none"), ("dp1", "full"), ("dp1", "selective"), ("pp2", "none"), ("fsdp2", "none")],
)
def test_rows_of_several_documents(ranks: RankPool, layout: str, recompute: str) -> None:
    """Attention joins the parts of a row's documents; both are on the tape. To some numbers of 8 bytes."""
    step = step_of(layout, "float32", 2, recompute)
    assert any(len(row) > 1 for row in packed_rows(step).documents(0, step.batch))
    for counted, predicted in ranks(step.layout.world_size, held, step, packed=True):
        assert 0 <= sum(counted.values()) - sum(predicted.values()) <= 128


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": True, "tie_word_embeddings": True},
        {"attention_bias": True},
        {"sliding_window": 48},
        {"vocab_size": 4096},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["dp1", "pp2", "tp2"])
def test_every_kind_of_model(ranks: RankPool, layout: str, change: dict[str, object]) -> None:
    step = step_of(layout, "bfloat16", 2, "none", MODEL.replace(change))
    for counted, predicted in ranks(step.layout.world_size, held, step):
        assert sum(predicted.values()) == pytest.approx(sum(counted.values()), rel=0.05)


@pytest.mark.parametrize(
    ("name", "layout", "dtype", "recompute"),
    [
        ("tiny", "dp1", "float32", "selective"),
        ("tiny", "pp2:zb-h1", "float32", "full"),
        ("tiny-qwen3", "pp2:zb-h1", "bfloat16", "selective"),
    ],
)
def test_heads_wider_than_the_stream(
    ranks: RankPool, name: str, layout: str, dtype: str, recompute: str
) -> None:
    """Then most is held where attention, or the norm of its queries, goes back. To some numbers of a row."""
    step = step_of(layout, dtype, 4, recompute, ModelSpec.preset(name))
    assert step.spec.num_attention_heads * step.spec.head_dim == 4 * step.spec.hidden_size
    for counted, predicted in ranks(step.layout.world_size, held, step):
        assert 0 <= sum(counted.values()) - sum(predicted.values()) <= 256


def test_deferred_gradients_of_logits_are_logits(ranks: RankPool) -> None:
    step = step_of("pp2:zb-h1", "float32", 4, "full", ModelSpec.preset("tiny"))
    _, (counted, predicted) = ranks(2, held, step)
    assert counted[Category.LOGITS] == predicted[Category.LOGITS] > 0


def test_muon_keeps_one_moment_of_matrices(ranks: RankPool) -> None:
    step = replace(step_of("fsdp2", "float32", 1, "none"), optimizer="muon")
    for counted, predicted in ranks(2, held, step):
        assert sum(predicted.values()) == pytest.approx(sum(counted.values()), rel=0.02)
