"""Laying a model out: names, weights, precision, and that every number was written by somebody."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fourfold.data import SyntheticDataset
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.optimizer import Update, adamw
from fourfold.parallel_model import ParallelModel, master_dtype, parallelize
from fourfold.specs import Layout, ModelSpec, OptimizerSection
from fourfold.training import initialized, rank_batches
from tests.ranks import RankPool

MODELS = ["tiny", "tiny-qwen2", "tiny-qwen3"]


def on_meta(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelSpec.preset(name))


def numbered_weights(name: str) -> dict[str, Tensor]:
    """Weights whose values say which element they are."""
    return {
        key: torch.arange(torch.Size(shape).numel()).view(shape) / 64 + index
        for index, (key, shape) in enumerate(ModelSpec.preset(name).parameter_shapes().items())
    }


def nothing(_: Tensor) -> None:
    pass


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_stay(name: str) -> None:
    shapes = ModelSpec.preset(name).parameter_shapes()
    parallel = parallelize(on_meta(name), mesh=Mesh(Layout()))
    assert {key: tuple(p.shape) for key, p in parallel.model.named_parameters()} == shapes
    for named in (parallel.named_masters(), parallel.named_gradients()):
        found = [(key, tuple(tensor.shape)) for key, tensor in named]
        assert dict(found) == shapes
        assert len(found) == len(shapes)
    assert not any(parameter.is_meta for parameter in parallel.model.parameters())
    tied = parallel.model.lm_head.weight is parallel.model.model.embed_tokens.weight
    assert tied == ModelSpec.preset(name).tie_word_embeddings


@pytest.mark.parametrize("name", MODELS)
def test_units_are_neighbouring_segments_in_the_models_order(name: str) -> None:
    spec = ModelSpec.preset(name)
    parallel = parallelize(on_meta(name), mesh=Mesh(Layout()), microbatches=2)
    model_order = list(spec.parameter_shapes())
    owners = [{slot.name for slot in unit.slots} for unit in parallel.units]
    assert [sum(key in names for names in owners) for key in model_order] == [1] * len(model_order)
    indices = [next(i for i, names in enumerate(owners) if key in names) for key in model_order]
    assert indices == sorted(indices)
    assert len(parallel.units) > 2, "reductions have nothing to hide behind"
    assert sum(parallel.unit_numels) == spec.num_parameters
    last = parallel.program.num_segments - 1
    used = [segment for users in parallel.program.users for segment in users]
    assert sorted(used) == sorted([*range(last + 1), *([last] if spec.tie_word_embeddings else [])])
    assert (last in parallel.program.users[0]) == spec.tie_word_embeddings
    assert parallel.program.microbatches == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_masters_gradients_and_weights_have_their_precision(dtype: torch.dtype) -> None:
    """Computation in bfloat16 reads bfloat16, but updates, gradients and their sums are in float32."""
    parallel = parallelize(on_meta("tiny-qwen2"), mesh=Mesh(Layout()), dtype=dtype)
    high = torch.float32 if dtype is torch.bfloat16 else dtype
    assert master_dtype(dtype) is high
    for unit in parallel.units:
        assert (unit.weights.dtype, unit.master.dtype, unit.gradient.dtype) == (dtype, high, high)
    for parameter in parallel.model.parameters():
        assert parameter.dtype is dtype
        assert parameter.grad is not None
        assert parameter.grad.dtype is high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_reach_masters_and_computation(dtype: torch.dtype) -> None:
    weights = numbered_weights("tiny-qwen3")
    parallel = parallelize(on_meta("tiny-qwen3"), mesh=Mesh(Layout()), dtype=dtype)
    pointers = {key: parameter.data_ptr() for key, parameter in parallel.model.named_parameters()}
    parallel.load_(weights)
    masters = dict(parallel.named_masters())
    for key, parameter in parallel.model.named_parameters():
        assert torch.equal(masters[key], weights[key])
        assert torch.equal(parameter.data, weights[key].to(dtype))
        assert parameter.data_ptr() == pointers[key]
    with pytest.raises(KeyError, match=r"model\.embed_tokens\.weight"):
        parallel.load_({})


def test_published_weights_are_the_rounded_masters() -> None:
    """A master weight grows by 2^-12 a step, 1/32 of what bfloat16 tells apart at 1: steps 1 to 16 round to
    1, the next 32 to 1 + 2^-7. Computation sees it when it is published, not before.
    """
    parallel = parallelize(on_meta("tiny"), mesh=Mesh(Layout()), dtype=torch.bfloat16)
    masters, weights = dict(parallel.named_masters()), dict(parallel.model.named_parameters())
    norm = "model.norm.weight"
    masters[norm].fill_(1.0)
    parallel.publish_()
    for step in range(1, 41):
        before = weights[norm].detach().clone()
        masters[norm] += 2.0**-12
        assert torch.equal(weights[norm], before)
        parallel.publish_()
        assert weights[norm].detach().unique().tolist() == [1.0 if step <= 16 else 1.0078125]


def test_a_frozen_parameter_is_refused() -> None:
    model = on_meta("tiny")
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is frozen"):
        parallelize(model, mesh=Mesh(Layout()))


def refused(layout: str) -> str:
    with pytest.raises(UserError) as caught:
        parallelize(on_meta("tiny"), mesh=Mesh(Layout.parse(layout)))
    return str(caught.value)


@contextmanager
def fresh_memory_is_not_a_number() -> Iterator[None]:
    """Let torch fill what it allocates without values with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def a_step(parallel: ParallelModel, batches: list[Microbatch]) -> tuple[float, list[Tensor]]:
    optimizer = adamw(parallel.units, OptimizerSection(learning_rate=1e-2))
    update = Update(parallel.units, optimizer, clip_norm=1.0)
    update.learning_rate = 1e-2
    loss_sum = parallel.step(batches, valid_tokens=23, update=update)
    return float(loss_sum), [unit.master.clone() for unit in parallel.units]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_no_number_comes_from_memory_that_nobody_wrote(name: str, dtype: str) -> None:
    """Fresh memory is NaN, and so are weights and gradients before the initial weights: nothing changes."""
    # MP-07
    spec, mesh = ModelSpec.preset(name), Mesh(Layout())
    data = SyntheticDataset(spec.vocab_size, sequence_length=12, seed=0)
    batches = [data.rows(0, 4, range(2)), data.rows(0, 4, range(2, 4))]
    plain = initialized(spec, mesh, microbatches=2, dtype=dtype, seed=4)
    expected = a_step(plain, batches)
    with fresh_memory_is_not_a_number():
        parallel = parallelize(on_meta(name), mesh=mesh, microbatches=2, dtype=getattr(torch, dtype))
        for unit in parallel.units:
            for buffer in (unit.weights, unit.master, unit.gradient):
                buffer.fill_(torch.nan)
        clean = initialized(spec, mesh, microbatches=2, dtype=dtype, seed=4)
        parallel.load_(dict(clean.named_masters()))
        found = a_step(parallel, batches)
    assert found[0] == expected[0]
    for unit, master, other in zip(parallel.units, found[1], expected[1], strict=True):
        assert torch.equal(master, other), unit.name


def weights_hash(parallel: ParallelModel) -> str:
    digest = hashlib.sha256()
    for key, master in parallel.named_masters():
        digest.update(key.encode() + master.contiguous().numpy().tobytes())
    return digest.hexdigest()


def hashes(layout: str, steps: int) -> tuple[str, str]:
    """Of the initial weights, and of those after some steps."""
    spec, mesh = ModelSpec.preset("tiny-qwen3"), Mesh(Layout.parse(layout))
    parallel = initialized(spec, mesh, microbatches=1, dtype="float32", seed=7)
    first = weights_hash(parallel)
    data = SyntheticDataset(spec.vocab_size, sequence_length=8, seed=0)
    optimizer = adamw(parallel.units, OptimizerSection(learning_rate=1e-2))
    update = Update(parallel.units, optimizer, clip_norm=1.0)
    update.learning_rate = 1e-2
    for step in range(steps):
        batches = rank_batches(data, mesh, step=step, batch=4, microbatches=1)
        parallel.step(batches, valid_tokens=data.valid_tokens(step, 4), update=update)
    return first, weights_hash(parallel)


def test_weights_are_the_same_bits_on_all_ranks_and_layouts(ranks: RankPool) -> None:
    """The initial weights on 1, 2 and 4 ranks; and after 10 steps, the weights on all ranks of one layout."""
    # RNG-03
    alone = hashes("dp1", 0)[0]
    for layout in ("dp2", "dp4"):
        found = ranks(Layout.parse(layout).world_size, hashes, layout, 10)
        assert {first for first, _ in found} == {alone}
        assert len({last for _, last in found}) == 1
        assert found[0][1] != alone


def test_a_layout_that_cannot_be_trained_yet_is_refused(ranks: RankPool) -> None:
    for layout in ("tp2,dp2", "cp4", "fsdp4", "pp2,dp2"):
        for message in ranks(4, refused, str(Layout.parse(layout))):
            assert layout[:2] in message
