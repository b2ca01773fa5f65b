"""Laying a model out: names, weights, precision, and that every number was written by somebody."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import fourfold.batch.units as batch_units
from fourfold.assembly import parallelize
from fourfold.batch.units import master_dtype
from fourfold.collectives import all_reduce_
from fourfold.data import SyntheticDataset
from fourfold.initialize import initialize_, whole
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.optimizer import Update, optimizers
from fourfold.parallel_model import ParallelModel
from fourfold.specs import Layout, ModelSpec, OptimizerSection, ShardingSection
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
def test_units_are_segments_in_the_models_order(name: str) -> None:
    spec = ModelSpec.preset(name)
    with patch("fourfold.batch.reduction.SEGMENT_BYTES", 16 * 2**10):  # of a model whose blocks are large
        parallel = parallelize(on_meta(name), mesh=Mesh(Layout()), microbatches=2)
    model_order = list(spec.parameter_shapes())
    owners = [{slot.name for slot in unit.slots} for unit in parallel.units]
    assert [sum(key in names for names in owners) for key in model_order] == [1] * len(model_order)
    indices = [next(i for i, names in enumerate(owners) if key in names) for key in model_order]
    assert indices == sorted(indices)
    assert len(parallel.units) > 1
    assert sum(unit.size.numel for unit in parallel.units) == spec.num_parameters
    last = parallel.program.num_segments - 1
    used = [segment for users in parallel.program.users for segment in users]
    assert sorted(used) == sorted([*range(last + 1), *([last] if spec.tie_word_embeddings else [])])
    assert (last in parallel.program.users[0]) == spec.tie_word_embeddings
    assert parallel.program.microbatches == 2


def logits_of_a_row(layout: str, vocab_size: int) -> tuple[Tensor, Tensor, int]:
    """The logits after a row of tokens, those that one whole model gives, the blocks joined with the head."""
    spec = ModelSpec.preset("tiny").replace({"vocab_size": vocab_size})
    mesh = Mesh(Layout.parse(layout))
    found = initialized(spec, mesh, microbatches=2, dtype="float64", seed=0, sequence_length=16)
    model = Decoder(spec).double()
    initialize_(whole(dict(model.named_parameters())), model, seed=0, std=spec.initializer_range)
    row = SyntheticDataset(vocab_size, sequence_length=16, seed=0).rows(0, 1, range(1))
    found.gather_()
    with torch.no_grad():
        expected = model.last_logits(model.residual(row))
    return found.last_logits(row), expected, len(found.stages.before_head)


@pytest.mark.parametrize("vocab_size", [67, 512])
@pytest.mark.parametrize("layout", ["dp1", "fsdp2", "pp2:interleaved2", "pp2:zbv", "pp2,dp2"])
def test_the_last_logits_are_those_of_the_whole_model(ranks: RankPool, layout: str, vocab_size: int) -> None:
    """Also where layers are joined with a small head to the last segment."""
    world_size = Layout.parse(layout).world_size
    for found, expected, joined in ranks(world_size, logits_of_a_row, layout, vocab_size):
        assert found.shape == (vocab_size,)
        assert torch.equal(found, expected)
        if vocab_size == 67:
            assert joined > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_masters_gradients_and_weights_have_their_precision(dtype: torch.dtype) -> None:
    """Computation in bfloat16 reads bfloat16, but updates, gradients and their sums are in float32."""
    # MP-05
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


FROZEN = (
    "model.layers.1.mlp.up_proj.weight",
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
)


def gradients_with_frozen(
    layout: str, frozen: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[str, bool]]]:
    """The gradients of a step, the weights after it, and the units with whether they are trained."""
    spec, mesh = ModelSpec.preset("tiny"), Mesh(Layout.parse(layout))
    model = on_meta("tiny")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    parallel = parallelize(model, mesh=mesh, microbatches=2, dtype=torch.float64)
    parallel.load_(
        dict(initialized(spec, Mesh(Layout()), microbatches=1, dtype="float64", seed=3).named_masters())
    )
    data = SyntheticDataset(spec.vocab_size, sequence_length=12, seed=0)
    update = Update(parallel, optimizers(parallel, OptimizerSection(learning_rate=1e-2)), clip_norm=0.0)
    update.learning_rate = 1e-2
    batches = rank_batches(data, mesh, step=0, batch=8, microbatches=2)
    parallel.step(batches, valid_tokens=data.valid_tokens(0, 8), update=update)
    gradients = {name: gradient.clone() for name, gradient in parallel.named_gradients()}
    weights = {name: weights.clone() for name, weights in parallel.named_masters()}
    return gradients, weights, [(unit.name, unit.is_trained) for unit in parallel.units]


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2"])
def test_frozen_parameters_keep_their_values_and_have_no_gradient(ranks: RankPool, layout: str) -> None:
    """In units of their own; the others' gradients and weights are those of a model that is trained whole."""
    expected, moved, _ = gradients_with_frozen("dp1", ())
    initial = initialized(ModelSpec.preset("tiny"), Mesh(Layout()), microbatches=1, dtype="float64", seed=3)
    start = dict(initial.named_masters())
    for gradients, weights, units in ranks(2, gradients_with_frozen, layout, FROZEN):
        assert {trained for _, trained in units} == {True, False}
        assert set(gradients) == set(expected) - set(FROZEN)
        for name, weight in weights.items():
            if name in FROZEN:
                assert torch.equal(weight, start[name]), name
            else:
                largest = float(expected[name].abs().max())
                torch.testing.assert_close(gradients[name], expected[name], rtol=0, atol=1e-12 * largest)
                assert not torch.equal(weight, start[name]), name
                torch.testing.assert_close(weight, moved[name], rtol=1e-6, atol=1e-9)


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
    update = Update(parallel, optimizers(parallel, OptimizerSection(learning_rate=1e-2)), clip_norm=1.0)
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
    masters = {key: master.clone() for key, master in parallel.named_masters()}
    for key, master in sorted(masters.items()):  # units have orders of their own
        digest.update(key.encode() + master.contiguous().numpy().tobytes())
    return digest.hexdigest()


def hashes(layout: str, steps: int) -> tuple[str, str]:
    """Of the initial weights, and of those after some steps."""
    spec, mesh = ModelSpec.preset("tiny-qwen3"), Mesh(Layout.parse(layout))
    parallel = initialized(spec, mesh, microbatches=1, dtype="float32", seed=7)
    first = weights_hash(parallel)
    data = SyntheticDataset(spec.vocab_size, sequence_length=8, seed=0)
    update = Update(parallel, optimizers(parallel, OptimizerSection(learning_rate=1e-2)), clip_norm=1.0)
    update.learning_rate = 1e-2
    for step in range(steps):
        batches = rank_batches(data, mesh, step=step, batch=12, microbatches=1)
        parallel.step(batches, valid_tokens=data.valid_tokens(step, 12), update=update)
    return first, weights_hash(parallel)


def test_weights_are_the_same_bits_on_all_ranks_and_layouts(ranks: RankPool) -> None:
    """The initial weights on 1 to 4 ranks; and after 10 steps, the weights on all ranks of one layout."""
    # RNG-03
    alone = hashes("dp1", 0)[0]
    for layout in ("dp2", "dp4", "fsdp3", "fsdp4:zero1", "fsdp2:zero2", "dp2,fsdp2"):
        found = ranks(Layout.parse(layout).world_size, hashes, layout, 10)
        assert {first for first, _ in found} == {alone}
        assert len({last for _, last in found}) == 1
        assert found[0][1] != alone


SHARDED = ["fsdp3", "fsdp2:zero1", "fsdp2:zero2", "dp2,fsdp2"]


def loaded_by_a_rank(layout: str, name: str, pieces: str, dtype: torch.dtype) -> None:
    """Weights go to their owners, come whole for every use, and what is kept between uses is the piece."""
    mesh, weights = Mesh(Layout.parse(layout)), numbered_weights(name)
    parallel = parallelize(on_meta(name), mesh=mesh, dtype=dtype, sharding=ShardingSection(pieces=pieces))
    objects = {key: id(parameter) for key, parameter in parallel.model.named_parameters()}
    parallel.load_(weights)
    masters = {key: master.clone() for key, master in parallel.named_masters()}
    assert set(masters) == set(weights)
    assert all(torch.equal(masters[key], weights[key]) for key in weights)
    owned = sum(len(unit.master) for unit in parallel.units)
    total = sum(weight.numel() for weight in weights.values())
    assert owned < 0.8 * total
    parallel.gather_()
    for key, parameter in parallel.model.named_parameters():
        assert id(parameter) == objects[key]
        assert torch.equal(parameter.data, weights[key].to(dtype))
    assert all(unit.is_present for unit in parallel.units)
    data = SyntheticDataset(parallel.model.spec.vocab_size, sequence_length=8, seed=0)
    batches = rank_batches(data, mesh, step=0, batch=12, microbatches=1)
    parallel.step(batches, valid_tokens=data.valid_tokens(0, 12), update=nothing)
    cut_weights = mesh.layout.placement.weights
    assert [unit.is_present for unit in parallel.units] == [not cut_weights] * len(parallel.units)
    with pytest.raises(KeyError):
        parallel.load_({})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", SHARDED)
def test_weights_are_loaded_into_pieces_and_gathered(
    ranks: RankPool, layout: str, dtype: torch.dtype
) -> None:
    for name, pieces in (("tiny-qwen3", "auto"), ("tiny", "flat")):
        ranks(Layout.parse(layout).world_size, loaded_by_a_rank, layout, name, pieces, dtype)


def evaluations_of_a_rank(layout: str) -> list[float]:
    """The loss on the same rows before and after each of two updates: never that of older weights."""
    spec, mesh = ModelSpec.preset("tiny"), Mesh(Layout.parse(layout))
    parallel = initialized(spec, mesh, microbatches=1, dtype="float64", seed=0)
    data = SyntheticDataset(spec.vocab_size, sequence_length=16, seed=1)
    update = Update(parallel, optimizers(parallel, OptimizerSection(learning_rate=1e-2)), clip_norm=1.0)
    update.learning_rate = 1e-2
    batches = rank_batches(data, mesh, step=0, batch=12, microbatches=1)
    losses = []
    for _ in range(2):
        for _ in range(2):
            total = parallel.evaluate(batches)
            all_reduce_(total, mesh.batch)
            losses.append(float(total))
        parallel.gather_()  # somebody looks at the weights before they change
        losses.append(float(parallel.step(batches, valid_tokens=data.valid_tokens(0, 12), update=update)))
    return losses


def test_every_use_reads_the_weights_of_the_last_update(ranks: RankPool) -> None:
    # FS-10
    expected = evaluations_of_a_rank("dp1")
    assert expected[0] == expected[1] == expected[2]
    assert expected[3] == expected[4] == expected[5] < expected[0]
    for layout in ("dp2", *SHARDED):
        for losses in ranks(Layout.parse(layout).world_size, evaluations_of_a_rank, layout):
            assert losses == pytest.approx(expected, rel=1e-12)


def numbers_from_nowhere(layout: str, name: str, pieces: str) -> None:
    """A step where all memory that comes back holds NaN until somebody writes it, beside one without."""
    spec, mesh = ModelSpec.preset(name), Mesh(Layout.parse(layout))
    data = SyntheticDataset(spec.vocab_size, sequence_length=12, seed=0)
    batches = rank_batches(data, mesh, step=0, batch=12, microbatches=2)
    results = []
    sharding = ShardingSection(pieces=pieces)
    plain_resize, resized = batch_units._resize, 0

    def poisoned(flat: Tensor) -> None:
        nonlocal resized
        was_free = flat.untyped_storage().nbytes() == 0
        plain_resize(flat)
        if was_free and len(flat):
            flat.fill_(torch.nan)
            resized += 1

    for resize in (plain_resize, poisoned):
        parallel = initialized(spec, mesh, microbatches=2, dtype="float32", seed=4, sharding=sharding)
        with patch.object(batch_units, "_resize", resize):
            results.append(a_step(parallel, batches))
    assert resized >= (3 if mesh.layout.placement.weights else 1) * len(parallel.units)
    assert results[0][0] == results[1][0]
    for expected, found in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("pieces", ["rows", "flat"])
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp3:zero2"])
def test_no_number_comes_from_memory_that_was_free(ranks: RankPool, layout: str, pieces: str) -> None:
    # MP-07
    for name in MODELS:
        ranks(Layout.parse(layout).world_size, numbers_from_nowhere, layout, name, pieces)
