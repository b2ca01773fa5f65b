"""Training with cut sequences equals one process: gradients, what counts in the loss, what is reported."""

import functools
from itertools import accumulate, product
from typing import Any

import pytest
import torch

from fourfold.mesh import Mesh
from fourfold.models import IGNORE
from fourfold.models.decoder import DecoderLayer
from fourfold.oracle import Oracle
from fourfold.sequence.partition import partition_of
from fourfold.sequence.ulysses import copied, summed_copies
from fourfold.specs import Layout, ModelSpec, RunSpec
from fourfold.training import Trainer, rank_batches
from fourfold.verify import Verification, verify
from tests.ranks import RankPool
from tests.sequence.rows import WrittenRows

SMALL = ModelSpec(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
)
MODELS = [
    SMALL.replace({"num_key_value_heads": kv_heads, "sliding_window": window})
    for kv_heads, window in product((1, 2, 4), (None, 5))
]
# 23 tokens: no number of ranks divides them. One document; two; some; documents of one token.
ROWS = ((23,), (11, 12), (12, 11), (10, 13), (5, 8, 10), (3, 4, 9, 7), (4, 19), (*(1,) * 7, 16))
LAYOUTS = [
    "cp2:ring", "cp3:ring", "cp4:ring", "cp2:ulysses", "cp4:ulysses", "cp4:ulysses2", "fsdp2,cp2", "cp2,tp2",
    "pp2,cp2",
]  # fmt: skip


@functools.cache
def oracle(spec: ModelSpec, data: WrittenRows) -> Oracle:
    """One for all layouts that are held against it: rank 0 computes it once, and stays."""
    return Oracle(spec, data, batch=len(data.documents), steps=1, seed=0)


def verified(layout: str, models: list[ModelSpec], data: WrittenRows) -> list[Verification]:
    mesh = Mesh(Layout.parse(layout))
    return [verify(oracle(spec, data), mesh, microbatches=mesh.pp.size, dtype="float64") for spec in models]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_windows_and_grouped_heads(ranks: RankPool, layout: str) -> None:
    """With 1, 2 and 4 key/value heads, with and without a window, in float64."""
    # DP-14
    found = ranks(Layout.parse(layout).world_size, verified, layout, MODELS, WrittenRows(ROWS))
    assert all(of_rank == found[0] for of_rank in found)
    for outcome in found[0]:
        assert outcome.passes, outcome.to_json()
        assert sum(outcome.valid_tokens) == sum(sum(row) - len(row) for row in ROWS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_end_on_before_and_after_the_edges_of_parts(layout: str) -> None:
    """That is, the rows have what they are for, whichever way the heads have a layout exchange."""
    parsed = Layout.parse(layout)
    for ulysses in {parsed.ulysses(spec) for spec in MODELS}:
        found = set()
        for documents in ROWS:
            runs = partition_of(documents, parsed.cp // ulysses, ulysses).runs
            edges = {edge for of_rank in runs for run in of_rank for edge in run} - {0, sum(documents)}
            for end in set(accumulate(documents)) - {sum(documents)}:
                found |= {0} if end in edges else {apart for apart in (-1, 1) if end + apart in edges}
        assert found == {-1, 0, 1}, ulysses


def trained(layout: str, data: WrittenRows) -> dict[str, Any]:
    """What a rank reports of a step, how many of its labels count, and how long its layers' inputs are."""
    mesh, batch = Mesh(Layout.parse(layout)), len(data.documents)
    values = {
        "layout": layout,
        "model": SMALL.model_dump(exclude_none=True),
        "data": {"sequence_length": data.sequence_length},
        "training": {"steps": 1, "batch": batch, "dtype": "float64"},
        "optimizer": {"learning_rate": 1e-3},
    }
    trainer = Trainer(RunSpec.model_validate(values), SMALL, mesh, data=data)
    lengths: list[int] = []
    for module in trainer.parallel.model.modules():
        if isinstance(module, DecoderLayer):
            module.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    report = trainer.step(0)
    own = trainer.parallel.own(rank_batches(data, mesh, step=0, batch=batch, microbatches=1))
    counted = sum(int((part.labels_BS != IGNORE).sum()) for part in own)
    return {
        "loss": report.loss,
        "norm": report.grad_norm,
        "counts": report.valid_tokens,
        "own": counted,
        "lengths": lengths,
    }


@pytest.mark.parametrize("layout", ["cp2", "cp4:ring", "cp4:ulysses", "cp2,tp2", "tp4"])
def test_what_is_reported_does_not_depend_on_the_cut(ranks: RankPool, layout: str) -> None:
    """One document of 64 tokens has 63 labels, on any ranks. All of them report one process's loss."""
    # CP-03, CP-08, CP-17
    data = WrittenRows(((64,),))
    alone, parsed = trained("dp1", data), Layout.parse(layout)
    assert (alone["counts"], alone["own"], alone["lengths"]) == (63, 63, [64, 64])
    found = ranks(4 if layout != "cp2" else 2, trained, layout, data)
    for rank in found:
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-10)
        assert rank["counts"] == 63
        # With tp the stream between the branches of a layer is cut once more.
        assert rank["lengths"] == [64 // parsed.size("cp", "tp")] * 2
    assert sum(rank["own"] for rank in found) == 63 * parsed.tp


def test_packed_labels_stay_with_their_tokens() -> None:
    """Documents [0, 1, 2] and [A, B, C]: 4 labels count, however many ranks cut the row."""
    # CP-02
    data = WrittenRows(((3, 3),))
    whole = data.rows(0, 1, range(1))
    tokens, labels = whole.input_ids_BS[0].tolist(), whole.labels_BS[0].tolist()
    assert labels == [tokens[1], tokens[2], IGNORE, tokens[4], tokens[5], IGNORE]
    for ring, ulysses in product((1, 2, 3, 4), (1, 2)):
        partition = partition_of((3, 3), ring, ulysses)
        parts = [whole.take((partition.columns(rank),)) for rank in range(ring * ulysses)]
        assert sum(int((part.labels_BS != IGNORE).sum()) for part in parts) == 4
        for rank, part in enumerate(parts):
            places = [i for run in partition.columns(rank) for i in run]
            assert part.labels_BS[0].tolist() == [labels[i] for i in places]


# Of 24 tokens 5, 0, 17 and 10 labels count, and none of those that rank 1 of a ring of 4 has.
COUNTED = (
    (0, 1, 2, 7, 21),
    (),
    (0, 1, 2, *range(6, 18), 21, 22),
    (2, *range(6, 15)),
)


@pytest.mark.parametrize("layout", ["dp4", "dp2,cp2", "cp4:ring"])
def test_ranks_weigh_what_their_labels_are(ranks: RankPool, layout: str) -> None:
    """The loss and every gradient are one process's, with rows and ranks that have no label at all."""
    # CP-06
    left_out = tuple(tuple(set(range(24)) - set(counted)) for counted in COUNTED)
    data = WrittenRows(((24,),) * 4, left_out)
    parts = [data.rows(0, 4, range(4)).take((partition_of((24,), 4).columns(r),) * 4) for r in range(4)]
    assert int((parts[1].labels_BS != IGNORE).sum()) == 0
    for [outcome] in ranks(4, verified, layout, [SMALL], data):
        assert outcome.passes, outcome.to_json()
        assert len(outcome.gradients) == len(SMALL.parameter_shapes())
        expected = {"dp4": (5, 0, 17, 10), "dp2,cp2": (5, 27), "cp4:ring": (32,)}
        assert outcome.valid_tokens == expected[layout]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "fitting"),
    [(28, 7, 2, "cp2:ring"), (6, 3, 2, "cp2:ring"), (40, 8, 6, "cp6:ulysses2 or cp6:ring")],
)
def test_heads_that_cannot_be_dealt_equally_are_refused(
    heads: int, kv_heads: int, cp: int, fitting: str
) -> None:
    """None is padded: queries would meet others' keys. What fits is named, and is what the default takes."""
    # CP-14, CP-15
    spec = SMALL.replace(
        {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    )
    shape: dict[str, Any] = {"batch": 1, "microbatches": 1, "sequence_length": 64, "world_size": None}
    [problem] = Layout.parse(f"cp{cp}:ulysses").problems(spec, **shape)
    assert f"divides the {kv_heads} key/value heads of a rank nor is a multiple" in problem
    assert problem.endswith(f"(Sequence axis): use {fitting}")
    assert Layout.parse(f"cp{cp}").problems(spec, **shape) == []
    published = spec.replace({"num_key_value_heads": 1})
    assert Layout.parse(f"cp{heads}:ulysses").problems(published, **shape) == []


@pytest.mark.parametrize(("kv_heads", "ranks_of_ulysses"), [(2, 4), (1, 8), (8, 40)])
def test_each_rank_gets_the_keys_that_its_queries_read(kv_heads: int, ranks_of_ulysses: int) -> None:
    """Rank r of 40 reads key/value head r // 5 of 8; the gradients of copies are added up."""
    # CP-15
    keys = torch.arange(float(kv_heads)).view(1, 1, kv_heads, 1)
    copies = ranks_of_ulysses // kv_heads
    dealt = copied(keys, ranks_of_ulysses)
    assert dealt.flatten().tolist() == [rank // copies for rank in range(ranks_of_ulysses)]
    assert torch.equal(summed_copies(dealt, kv_heads), copies * keys)
