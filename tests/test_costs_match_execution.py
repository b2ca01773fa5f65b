"""What floor 0 predicts is what the running code does: the same events, in the same order, exactly."""

import pytest
from torch import Tensor

from fourfold.batch.reduction import reduction_events
from fourfold.collectives import record
from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.specs import Layout, ModelSpec
from fourfold.traffic import Event, sent_bytes
from fourfold.training import initialized, rank_batches
from tests.ranks import RankPool

BATCH = 24


def events_of_a_step(
    layout: str, model: str, microbatches: int, dtype: str
) -> tuple[list[Event], list[Event]]:
    """Those recorded, those predicted."""
    spec, mesh = ModelSpec.preset(model), Mesh(Layout.parse(layout))
    parallel = initialized(spec, mesh, microbatches=microbatches, dtype=dtype, seed=0)
    data = SyntheticDataset(spec.vocab_size, sequence_length=16, seed=0)
    batches = rank_batches(data, mesh, step=0, batch=BATCH, microbatches=microbatches)

    def update(loss_sum: Tensor) -> None:
        pass

    with record() as events:
        parallel.step(batches, valid_tokens=data.valid_tokens(0, BATCH), update=update)
    reduce_dtype, itemsize = ("float64", 8) if dtype == "float64" else ("float32", 4)
    predicted = reduction_events(
        parallel.program.ranks[0],
        layout=mesh.layout,
        unit_numels=parallel.unit_numels,
        dtype=reduce_dtype,
        itemsize=itemsize,
    )
    return list(events), predicted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("layout", "microbatches"), [("dp1", 2), ("dp2", 1), ("dp3", 2), ("dp4", 3)])
def test_the_events_of_a_step_are_those_predicted(
    ranks: RankPool, layout: str, microbatches: int, dtype: str
) -> None:
    world_size = Layout.parse(layout).world_size
    for recorded, predicted in ranks(world_size, events_of_a_step, layout, "tiny", microbatches, dtype):
        assert recorded == predicted
        assert len(recorded) == 0 if world_size == 1 else len(recorded) > 2


def test_accumulation_sends_no_more(ranks: RankPool) -> None:
    """Gradients are reduced once a step, whatever the number of microbatches."""
    one, four = (
        ranks(2, events_of_a_step, "dp2", "tiny", microbatches, "float32")[0][0] for microbatches in (1, 4)
    )
    assert one == four


def test_the_gradients_sent_are_those_of_the_model(ranks: RankPool) -> None:
    """2(W-1)/W x 4 bytes a parameter, plus the loss; a tied head is sent once."""
    for model in ("tiny", "tiny-qwen3"):
        recorded, _ = ranks(4, events_of_a_step, "dp4", model, 1, "float32")[0]
        total = sum(sent_bytes(event, 4) for event in recorded)
        assert total == 1.5 * (4 * ModelSpec.preset(model).num_parameters + 8)
