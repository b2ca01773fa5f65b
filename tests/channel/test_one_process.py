"""Every layout with tp gives the numbers of one process: loss, gradient norm, gradients and weights."""

from typing import Any

import pytest

from fourfold.collectives import record
from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.oracle import Oracle
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.verify import Verification, verify
from tests.ranks import RankPool

ODD = {"vocab_size": 61, "attention_bias": True, "qk_norm": True, "tie_word_embeddings": True}
"""A vocabulary that no number of ranks divides, biases, norms on q and k, a tied head."""


def on_a_rank(layout: str, changes: dict[str, Any], options: dict[str, Any]) -> Verification:
    spec = ModelSpec.preset("tiny").replace({"num_hidden_layers": 2, **changes})
    data = SyntheticDataset(spec.vocab_size, sequence_length=16, seed=3)
    oracle = Oracle(spec, data, batch=4, steps=2, seed=0)
    return verify(oracle, Mesh(Layout.parse(layout)), dtype="float64", **options)


def compare(ranks: RankPool, layout: str, changes: dict[str, Any], **options: Any) -> None:
    found = ranks(Layout.parse(layout).world_size, on_a_rank, layout, changes, options)
    for outcome in found:
        assert outcome.passes, outcome.to_json()
        assert max(outcome.loss.error, outcome.norm.error, outcome.weights[0].error) < 1e-12


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("layout", ["tp2", "tp4:allreduce", "tp4:regather"])
def test_key_value_heads(ranks: RankPool, layout: str, kv_heads: int) -> None:
    """More of them than ranks, as many, and fewer: where they are copied, copies count once in the norm."""
    # TP-04, TP-11
    compare(ranks, layout, ODD | {"num_key_value_heads": kv_heads})


@pytest.mark.parametrize(
    "layout",
    [
        "dp2,tp2",
        "dp2,tp2:regather",
        "fsdp2,tp2:allreduce",
        "pp2,tp2:regather",
        "pp2,fsdp2,tp2",
        "pp2,fsdp2,tp2:allreduce",
    ],
)
def test_other_axes_beside(ranks: RankPool, layout: str) -> None:
    """Among them norms that every rank of tp holds, cut over fsdp or copied over dp."""
    # GC-02, AC-04
    compare(ranks, layout, ODD, microbatches=2)


@pytest.mark.parametrize("layout", ["tp8", "tp8:allreduce"])
def test_eight_ranks(ranks: RankPool, layout: str) -> None:
    compare(ranks, layout, ODD | {"num_key_value_heads": 2})


def in_chunks_on_a_rank(layout: str) -> tuple[Verification, list[int]]:
    """With logits of at most 5 tokens at a time on a rank, and the bytes of all small messages on tp."""
    with pytest.MonkeyPatch.context() as patch, record() as events:
        patch.setattr("fourfold.memory.LOGITS_BYTES", 5 * 31 * 8)
        outcome = on_a_rank(layout, ODD, {})
    return outcome, [event.bytes for event in events if event.axis == "tp" and event.op == "all_gather"]


def test_the_loss_in_chunks(ranks: RankPool) -> None:
    """Of 64 tokens 12 chunks of 5 are made again in the backward, with their exchange; the last has 4."""
    for outcome, sizes in ranks(2, in_chunks_on_a_rank, "tp2:allreduce"):
        assert outcome.passes, outcome.to_json()
        assert sizes.count(2 * 2 * 5 * 8) == 2 * (12 + 12)  # two steps
        assert sizes.count(2 * 2 * 4 * 8) == 2


@pytest.mark.parametrize("recompute", ["full", "every:2"])
@pytest.mark.parametrize("layout", ["tp2", "tp2:regather"])
def test_activation_checkpointing(ranks: RankPool, layout: str, recompute: str) -> None:
    compare(ranks, layout, {}, microbatches=2, recompute=RecomputeName.parse(recompute))


@pytest.mark.parametrize("option", ["", ":regather", ":allreduce"])
def test_halves_of_the_backward(ranks: RankPool, option: str) -> None:
    compare(ranks, f"pp2:zb-h1,tp2{option}", {}, microbatches=4)
