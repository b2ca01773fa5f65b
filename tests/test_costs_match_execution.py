"""What floor 0 predicts is what the running code does: events and bytes, exactly."""

from collections import Counter
from itertools import cycle

import pytest
from torch import Tensor

from fourfold.batch.costs import Held, held_bytes
from fourfold.batch.reduction import blocks_of_segments
from fourfold.channel.costs import ChannelCosts
from fourfold.collectives import record
from fourfold.data import SyntheticDataset
from fourfold.events import SCALAR_BYTES, SegmentCosts, step_events
from fourfold.mesh import Mesh
from fourfold.optimizer import gradient_norm
from fourfold.parallel_model import ParallelModel
from fourfold.program.actions import Action
from fourfold.sequence.costs import SequenceCosts
from fourfold.sequence.partition import tokens_of_ranks
from fourfold.specs import Layout, ModelSpec, ShardingSection
from fourfold.specs.recompute_name import RecomputeName
from fourfold.traffic import Event, sent_bytes
from fourfold.training import initialized, rank_batches
from tests.ranks import RankPool

BATCH = 24
LENGTH = 16


def on_a_rank(
    layout: str,
    model: str | ModelSpec,
    microbatches: int,
    dtype: str,
    sharding: ShardingSection,
    recompute: str = "none",
) -> ParallelModel:
    return initialized(
        ModelSpec.preset(model) if isinstance(model, str) else model,
        Mesh(Layout.parse(layout)),
        microbatches=microbatches,
        dtype=dtype,
        seed=0,
        sharding=sharding,
        sequence_length=LENGTH,
        batch=BATCH,
        recompute=RecomputeName.parse(recompute),
    )


def run_step(parallel: ParallelModel) -> None:
    data = SyntheticDataset(parallel.model.spec.vocab_size, sequence_length=LENGTH, seed=0)
    batches = rank_batches(
        data, parallel.mesh, step=0, batch=BATCH, microbatches=parallel.program.microbatches
    )

    def update(_: Tensor) -> None:
        gradient_norm(parallel.counted_units, parallel.norm_axis)

    parallel.step(batches, valid_tokens=data.valid_tokens(0, BATCH), update=update)


def events_of_a_step(
    layout: str,
    model: str | ModelSpec,
    microbatches: int,
    dtype: str,
    sharding: ShardingSection,
    recompute: str = "none",
) -> tuple[list[Event], list[Event]]:
    """Those recorded, those predicted."""
    parallel = on_a_rank(layout, model, microbatches, dtype, sharding, recompute)
    with record() as events:
        run_step(parallel)
    mesh, program = parallel.mesh, parallel.program
    rows = BATCH // (mesh.data.size * microbatches)
    itemsize = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    spec, tp, cp = parallel.model.spec, mesh.tp.size, mesh.cp.size
    is_cut = mesh.layout.sequence_parallel(LENGTH)
    tokens = rows * tokens_of_ranks(LENGTH, cp)[mesh.cp.rank]
    batches = rank_batches(
        SyntheticDataset(spec.vocab_size, sequence_length=LENGTH, seed=0),
        mesh,
        step=0,
        batch=BATCH,
        microbatches=microbatches,
    )
    channel = ChannelCosts(
        tokens=[tokens] * microbatches,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        dtype=dtype,
        itemsize=itemsize,
        statistics_dtype="float64" if dtype == "float64" else "float32",
        statistics_itemsize=max(itemsize, 4),
        ranks=tp,
        sequence_parallel=is_cut,
        regather=mesh.layout.options.get("tp") == "regather",
    )
    sequence = SequenceCosts(
        documents=[batch.documents for batch in batches],
        heads=spec.num_attention_heads // tp,
        kv_heads=max(1, spec.num_key_value_heads // tp),
        head_dim=spec.head_dim,
        window=spec.sliding_window,
        dtype=dtype,
        itemsize=itemsize,
        ring=cp // mesh.layout.ulysses(spec),
        ulysses=mesh.layout.ulysses(spec),
        rank=mesh.cp.rank,
    )
    predicted = step_events(
        program,
        rank=mesh.pp.rank,
        layout=mesh.layout,
        units={number: unit.size for number, unit in parallel.units_by_number.items()},
        activation_bytes=[tokens * spec.hidden_size * itemsize // (tp if is_cut else 1)] * microbatches,
        inside=SegmentCosts(
            [piece.blocks for piece in parallel.stages.segments],
            channel=channel if tp > 1 else None,
            sequence=sequence if cp > 1 else None,
            keeps=RecomputeName.parse(recompute).keeps(tp=tp),
        ),
    )
    return list(events), predicted


LAYOUTS = [
    ("dp1", 2), ("dp2", 1), ("dp3", 2), ("dp4", 3),
    ("fsdp2", 1), ("fsdp3", 2), ("fsdp4", 3), ("fsdp4:zero1", 2), ("fsdp4:zero2", 2), ("dp2,fsdp2", 3),
    ("pp2", 3), ("pp4", 2), ("pp2:interleaved2", 3), ("pp2,dp2", 2), ("pp2,fsdp2", 3), ("pp2:bfs2,fsdp2", 2),
    ("pp2,fsdp2:zero1", 3),
    ("tp2", 1), ("tp4:allreduce", 2), ("tp8", 1), ("dp2,tp2", 2), ("fsdp2,tp2", 3), ("pp2,tp2", 3),
    ("pp2:interleaved2,tp2:allreduce", 2), ("tp2:regather", 2), ("pp2:zb-h1,tp4:regather", 2),
    ("cp2:ring", 1), ("cp3:ring", 2), ("cp4:ring", 1),
    ("cp2:ulysses", 1), ("cp4:ulysses2", 2), ("cp4:ulysses", 1),
    ("fsdp2,cp2", 2), ("cp2:ring,tp2", 1), ("pp2,cp2:ring", 2), ("dp2,cp2:ring,tp2", 1),
    ("pp2,fsdp2:zero2,tp2", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "microbatches", "dtype"),
    [(*case, dtype) for case, dtype in zip(LAYOUTS, cycle(("bfloat16", "float64")), strict=False)],
)
def test_the_events_of_a_step_are_those_predicted(
    ranks: RankPool, layout: str, microbatches: int, dtype: str
) -> None:
    """Every layout once, the dtypes in turn."""
    world_size = Layout.parse(layout).world_size
    for pieces in ("auto", "flat") if "fsdp" in layout else ("auto",):
        sharding = ShardingSection(pieces=pieces)
        for recorded, predicted in ranks(
            world_size, events_of_a_step, layout, "tiny-qwen3", microbatches, dtype, sharding
        ):
            assert recorded == predicted
            assert len(recorded) == 0 if world_size == 1 else len(recorded) > 2


RECOMPUTED = [
    (layout, policy)
    for layout in ("fsdp2", "pp2", "pp2:zb-h1", "tp2", "tp2:allreduce", "cp2:ring", "cp2:ulysses")
    for policy in ("full", "min", "selective")
] + [
    ("tp2", "selective:gather+sum"), ("tp2:allreduce", "selective:gather"), ("cp2:ring", "selective:q_proj"),
    ("fsdp2", "budget:0.0004"), ("pp2", "budget:0.0006"),
]  # fmt: skip


MESSAGES = ("send", "recv", "all_to_all")
"""What attention over ranks sends, and stages of a pipeline."""


@pytest.mark.parametrize(("layout", "policy"), RECOMPUTED)
def test_the_events_with_recomputation_are_those_predicted(ranks: RankPool, layout: str, policy: str) -> None:
    """Those of attention are never sent twice where its result is kept."""
    arguments = layout, "tiny", 3, "float32", ShardingSection()
    plain = ranks(2, events_of_a_step, *arguments)
    for (recorded, predicted), (before, _) in zip(
        ranks(2, events_of_a_step, *arguments, policy), plain, strict=True
    ):
        assert recorded == predicted
        messages, before = (Counter(e for e in events if e.op in MESSAGES) for events in (recorded, before))
        again = layout.startswith("cp2") and policy in ("full", "min", "selective:q_proj")
        assert messages.total() > before.total() if again else messages == before


def test_accumulation_sends_no_more(ranks: RankPool) -> None:
    """Gradients are reduced once a step, whatever the number of microbatches, where they are replicated."""
    for layout, accumulate in (("dp2", "pieces"), ("fsdp2:zero1", "pieces"), ("fsdp2", "whole")):
        sharding = ShardingSection(accumulate=accumulate)
        one, four = (
            ranks(2, events_of_a_step, layout, "tiny", microbatches, "float32", sharding)[0][0]
            for microbatches in (1, 4)
        )
        if layout == "fsdp2":  # and weights are gathered once, not for the backward again
            one = ranks(2, events_of_a_step, layout, "tiny", 2, "float32", sharding)[0][0]
        assert one == four


def test_the_gradients_sent_are_those_of_the_model(ranks: RankPool) -> None:
    """2(W-1)/W x 4 bytes a parameter, plus the loss; a tied head is sent once."""
    for model in ("tiny", "tiny-qwen3"):
        recorded, _ = ranks(4, events_of_a_step, "dp4", model, 1, "float32", ShardingSection())[0]
        total = sum(sent_bytes(event, 4) for event in recorded)
        assert total == 1.5 * (4 * ModelSpec.preset(model).num_parameters + 2 * SCALAR_BYTES)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("vocab_size", [67, 512])
@pytest.mark.parametrize("layout", ["fsdp4", "fsdp4:zero1", "fsdp4:zero2"])
def test_what_sharding_sends(ranks: RankPool, layout: str, vocab_size: int, microbatches: int) -> None:
    """ZeRO-1 and 2: all weights once. FSDP: for every forward and backward, less what is kept.

    The textbook's FSDP gathers all weights twice. Ours leaves out the embedding in the backward, which reads
    no weights, and at the turn the last two segments: the head and the layer before it or, where the head is
    so small that it is joined to the last layer, two layers and the head. Between two microbatches the
    embedding is needed again, and the first layer is kept.
    """
    spec = ModelSpec.preset("tiny").replace({"vocab_size": vocab_size})
    sharding = ShardingSection(pieces="rows")
    recorded, _ = ranks(4, events_of_a_step, layout, spec, microbatches, "float32", sharding)[0]
    total = spec.num_parameters
    embedding = spec.vocab_size * spec.hidden_size
    head = embedding + spec.hidden_size
    layer = (total - embedding - head) // spec.num_hidden_layers
    blocks = [embedding, *[layer] * spec.num_hidden_layers, head]
    *_, before, last = blocks_of_segments([4 * block for block in blocks], Layout(fsdp=4))
    assert [list(before), list(last)] == ([[3], [4, 5]] if vocab_size == 67 else [[4], [5]])
    gathered = sum(event.bytes for event in recorded if event.op == "all_gather") // 4
    if "zero" in layout:
        assert gathered == total
    else:
        twice = 2 * microbatches * total
        kept = sum(blocks[block] for segment in (before, last) for block in segment)
        at_turns = microbatches * (embedding + kept)
        assert gathered == twice - at_turns - (microbatches - 1) * layer
    reduced = sum(event.bytes for event in recorded if event.op == "reduce_scatter") // 4
    assert reduced == total * (1 if layout == "fsdp4:zero1" else microbatches)


def test_replicas_are_summed_once_a_step(ranks: RankPool) -> None:
    for microbatches in (1, 4):
        recorded, _ = ranks(
            4, events_of_a_step, "dp2,fsdp2", "tiny", microbatches, "float32", ShardingSection(pieces="rows")
        )[0]
        over_replicas = [event for event in recorded if event.axis == "dp"]
        assert all(event.op == "all_reduce" for event in over_replicas)
        assert sum(event.bytes for event in over_replicas) == pytest.approx(
            2 * ModelSpec.preset("tiny").num_parameters, rel=0.02
        )


def held_in_a_step(
    layout: str, microbatches: int, dtype: str, sharding: ShardingSection
) -> tuple[int, int, Held]:
    """Bytes at rest and at most, as counted, and as predicted. Temporary buffers are not counted."""
    parallel = on_a_rank(layout, "tiny", microbatches, dtype, sharding)
    seen: list[int] = []
    executor = parallel.executor

    def watched(run):  # type: ignore[no-untyped-def]
        def wrapped(state: object, action: Action) -> None:
            run(state, action)
            seen.append(sum(unit.held_bytes for unit in parallel.units))

        return wrapped

    rest = sum(unit.held_bytes for unit in parallel.units)
    executor._run = {kind: watched(run) for kind, run in executor._run.items()}
    run_step(parallel)
    assert sum(unit.held_bytes for unit in parallel.units) == rest, "a step left something behind"
    predicted = held_bytes(
        parallel.program,
        rank=parallel.mesh.pp.rank,
        units={number: unit.size for number, unit in parallel.units_by_number.items()},
        temporary=False,
    )
    return rest, max(seen), predicted


@pytest.mark.parametrize(
    ("prefetch", "dtype", "pieces", "microbatches"),
    [(0, "bfloat16", "auto", 2), (1, "float32", "auto", 1), (2, "bfloat16", "flat", 2)],
)
@pytest.mark.parametrize(
    "layout",
    ["dp2", "fsdp2", "fsdp3", "fsdp2:zero1", "fsdp2:zero2", "dp2,fsdp2", "pp2,fsdp2", "pp2:bfs2,fsdp2"],
)
def test_bytes_held_are_those_predicted(
    ranks: RankPool, layout: str, prefetch: int, dtype: str, pieces: str, microbatches: int
) -> None:
    sharding = ShardingSection(pieces=pieces, prefetch=prefetch)
    for rest, peak, predicted in ranks(
        Layout.parse(layout).world_size, held_in_a_step, layout, microbatches, dtype, sharding
    ):
        assert rest == predicted.rest
        assert peak == pytest.approx(predicted.peak, rel=0.05)
