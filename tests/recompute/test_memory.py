"""What a step holds of activations, counted in storages, against what floor 0 predicts."""

import pytest
import torch

from fourfold.block_memory import BlockSizes
from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.program.actions import Action
from fourfold.program.liveness import Block, peak_bytes
from fourfold.recompute.costs import decoder_blocks
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.training import initialized
from tests.memory import LiveBytes
from tests.ranks import RankPool

ROWS, LENGTH, MICROBATCHES = 2, 32, 3
SPEC = ModelSpec.preset("tiny").replace({"num_hidden_layers": 4, "vocab_size": 61})
STREAM = ROWS * LENGTH * SPEC.hidden_size * 4


def joined(blocks: list[Block]) -> Block:
    """Blocks that are one segment."""
    tape, deferred = (sum(getattr(b, name) for b in blocks) for name in ("tape_bytes", "deferred_bytes"))
    return Block(1.0, blocks[0].input_bytes, tape, deferred)


def held(layout: str, policy: str) -> tuple[int, int]:
    """The most bytes that live between two actions of a step, and what is predicted."""
    batch = ROWS * MICROBATCHES
    parallel = initialized(
        SPEC,
        Mesh(Layout.parse(layout)),
        microbatches=MICROBATCHES,
        dtype="float32",
        seed=0,
        sequence_length=LENGTH,
        batch=batch,
        recompute=RecomputeName.parse(policy),
    )
    rows = SyntheticDataset(SPEC.vocab_size, LENGTH, 0).rows(0, batch, range(batch))
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    batches = [
        Microbatch(ids, labels, positions, ((LENGTH,),) * ROWS)
        for ids, labels in zip(rows.input_ids_BS.split(ROWS), rows.labels_BS.split(ROWS), strict=True)
    ]
    for one in batches:
        parallel.model.rotary(one, torch.float32)  # its angles live as long as the microbatch
    live, seen = LiveBytes(), []

    def watched(run):  # type: ignore[no-untyped-def]
        def wrapped(state: object, action: Action) -> None:
            run(state, action)
            seen.append(live.now_bytes)

        return wrapped

    executor = parallel.executor
    executor._run = {kind: watched(run) for kind, run in executor._run.items()}
    with live:
        parallel.step(batches, valid_tokens=batch * LENGTH, update=lambda _: None)
    names = ["embed", *(f"layer.{i}" for i in range(SPEC.num_hidden_layers)), "head"]
    sizes = dict(zip(names, decoder_blocks(BlockSizes(SPEC, ROWS, LENGTH, itemsize=4)), strict=True))
    blocks = [
        joined([sizes[name] for name in segment])
        for segment in (piece.blocks for piece in parallel.stages.segments)
    ]
    return max(seen), peak_bytes(parallel.program, blocks)[parallel.mesh.pp.rank]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipeline_holds_what_is_predicted(ranks: RankPool, schedule: str) -> None:
    """Beside it there is a gradient at each end of a block, what is on its way in messages, and losses."""
    full = ranks(2, held, f"pp2:{schedule}", "full")
    none = ranks(2, held, f"pp2:{schedule}", "none")
    for measured, predicted in full + none:
        assert 0 <= measured - predicted <= (3 if schedule == "1f1b" else 7) * STREAM + 8 * MICROBATCHES
    if schedule == "1f1b":
        assert full[0][0] < 0.35 * none[0][0], "two microbatches on their way"
        assert full[1][0] < 0.55 * none[1][0]
