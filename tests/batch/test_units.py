import pytest
import torch
from torch import nn

from fourfold.batch.pieces import cut
from fourfold.batch.units import Unit
from fourfold.mesh import Axis, Mesh
from fourfold.models import Decoder
from fourfold.models.parameters import parameter_sites, parameter_users
from fourfold.specs import PLACEMENTS, REPLICATED, Layout, ModelSpec, Placement
from tests.ranks import RankPool

CPU = torch.device("cpu")


def decoder(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelSpec.preset(name))


def unit_of(
    module: nn.Module,
    names: list[str] | None = None,
    *,
    placement: Placement = REPLICATED,
    how: str = "rows",
    mesh: Mesh | None = None,
    shards: Axis | None = None,
    dtype: torch.dtype = torch.float32,
) -> Unit:
    """Some parameters of a module, or all, on a mesh, or as seen from a rank of an axis without a group."""
    mesh = mesh or Mesh(Layout())
    shards = shards or mesh.fsdp
    named = dict(module.named_parameters())
    parameters = {name: named[name] for name in names or named}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    return Unit(
        "unit",
        parameters,
        parameter_sites(module),
        pieces=cut([shapes], ranks=shards.size, how=how)[0],
        placement=placement,
        shards=shards,
        replicas=mesh.joint("dp", "cp"),
        dtype=dtype,
        master_dtype=torch.float32,
        device=CPU,
    )


def units_of(model: Decoder, dtype: torch.dtype = torch.float32) -> list[Unit]:
    owned = parameter_users(model, [piece.modules for piece in model.pieces()])
    return [unit_of(model, list(users), dtype=dtype) for users in owned]


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2", "tiny-qwen3"])
def test_every_parameter_lies_in_one_unit_and_keeps_its_name(name: str) -> None:
    model = decoder(name)
    before = {key: parameter.shape for key, parameter in model.named_parameters()}
    units = units_of(model)
    slots = [slot for unit in units for slot in unit.slots]
    assert {slot.name: slot.shape for slot in slots} == before
    assert len(slots) == len(before)
    assert {key: parameter.shape for key, parameter in model.named_parameters()} == before


def test_parameters_and_gradients_are_views_for_ever() -> None:
    model = decoder("tiny-qwen2")
    units = units_of(model)
    for unit in units:
        unit.weights.copy_(torch.arange(unit.weights.numel()))
        unit.gradient.copy_(-torch.arange(unit.gradient.numel()))
    named = dict(model.named_parameters())
    for unit in units:
        for slot in unit.slots:
            expected = torch.arange(slot.offset, slot.offset + slot.shape.numel()).view(slot.shape).float()
            assert torch.equal(named[slot.name].data, expected)
            gradient = named[slot.name].grad
            assert gradient is not None
            assert torch.equal(gradient, -expected)
    ids = torch.tensor([[1, 2, 3]])
    pointers = {name: p.grad.data_ptr() for name, p in named.items() if p.grad is not None}
    model.model.embed_tokens(ids).sum().backward()
    assert pointers == {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}


def test_matrices_lie_before_vectors() -> None:
    for unit in units_of(decoder("tiny-qwen2")):
        dims = [len(slot.shape) for slot in unit.slots]
        assert dims == sorted(dims, reverse=True)
        assert unit.num_decayed == sum(slot.shape.numel() for slot in unit.slots if len(slot.shape) == 2)


def test_a_tied_head_is_one_parameter_with_two_users() -> None:
    model = decoder("tiny-qwen3")
    users = parameter_users(model, [piece.modules for piece in model.pieces()])
    last = len(users) - 1
    assert users[0] == {"model.embed_tokens.weight": (0, last)}
    assert set(users[last]) == {"model.norm.weight"}
    units_of(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_bfloat16_weights_follow_their_float32_masters() -> None:
    model = decoder("tiny")
    unit = units_of(model, torch.bfloat16)[1]
    unit.master.fill_(1 + 2**-9)  # between two bfloat16 numbers
    assert unit.weights.abs().sum() == 0
    unit.publish_()
    assert unit.weights.dtype == torch.bfloat16
    assert torch.equal(unit.weights, torch.ones_like(unit.weights))
    assert unit.gradient.dtype == torch.float32
    for parameter in unit.parameters:
        assert parameter.dtype == torch.bfloat16
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_float32_weights_are_the_masters() -> None:
    for unit in units_of(decoder("tiny")):
        assert unit.weights.data_ptr() == unit.master.data_ptr()
        assert unit.weights.shape == unit.master.shape
        assert unit.gradient.data_ptr() == unit.summed.data_ptr()


def seen_from(rank: int, size: int) -> Axis:
    """A place on the fsdp axis that nobody talks to."""
    return Axis("fsdp", size, rank, tuple(range(size)), None)


class Small(nn.Module):
    """14 elements: 9 of a matrix between vectors of 2 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2, bias=False)
        self.linear = nn.Linear(3, 3)


def test_a_rank_owns_parts_of_parameters() -> None:
    """Buffer: the matrix (9), the norm (2), the bias (3); by rows on 3 ranks that is 6, 3, 5."""
    seen = []
    for rank in range(3):
        unit = unit_of(Small(), placement=PLACEMENTS[None], shards=seen_from(rank, 3))
        assert unit.counts == (6, 3, 5)
        assert len(unit.master) == len(unit.summed) == unit.counts[rank]
        assert len(unit.weights) == len(unit.gradient) == 14
        seen.append([(o.name, o.first, (o.part.start, o.part.stop), o.is_whole) for o in unit.owned])
        assert unit.num_decayed == (6, 3, 0)[rank]
    assert seen == [
        [("linear.weight", 0, (0, 6), False)],
        [("linear.weight", 6, (0, 3), False)],
        [("norm.weight", 0, (0, 2), True), ("linear.bias", 0, (2, 5), True)],
    ]


@pytest.mark.parametrize("how", ["matrices", "rows", "flat", "auto"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
def test_every_element_is_owned_once(size: int, how: str) -> None:
    found: dict[str, list[int]] = {}
    for rank in range(size):
        unit = unit_of(Small(), how=how, placement=PLACEMENTS[None], shards=seen_from(rank, size))
        for owned in unit.owned:
            length = owned.part.stop - owned.part.start
            found.setdefault(owned.name, []).extend(range(owned.first, owned.first + length))
        vectors = [len(owned.shape) < 2 for owned in unit.owned]
        assert vectors == sorted(vectors), "matrices come first in a piece"
    expected = {name: list(range(p.numel())) for name, p in Small().named_parameters()}
    assert {name: sorted(indices) for name, indices in found.items()} == expected


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_held_between_uses_follows_the_placement(dtype: torch.dtype) -> None:
    """Rank 1 of 3 owns 3 of 14 elements; buffers of other dtype or size than the owner's are apart."""
    item = dtype.itemsize
    held = {}
    for name in (None, "zero1", "zero2"):
        unit = unit_of(Small(), placement=PLACEMENTS[name], shards=seen_from(1, 3), dtype=dtype)
        assert unit.is_present == (name is not None)
        masters_apart = name is None or item == 2
        assert (nbytes(unit.master) == 3 * 4) == masters_apart
        assert nbytes(unit.gradient) == (14 * 4 if name == "zero1" else 0)
        held[name] = unit.held_bytes
    masters = 3 * 4 if item == 2 else 0
    assert held == {
        None: 3 * 4 + 3 * 4,
        "zero2": 14 * item + masters + 3 * 4,
        "zero1": 14 * item + masters + 14 * 4,
    }


def test_a_gradient_starts_anew_once_a_reduction() -> None:
    for placement in (REPLICATED, PLACEMENTS[None]):
        unit = unit_of(Small(), placement=placement)
        assert unit.take_gradient_()
        assert not unit.take_gradient_()
        unit.finish_reduce_(unit.reduce().wait())
        assert unit.take_gradient_()
        unit.begin_step_()
        assert unit.take_gradient_()


def test_a_frozen_unit_has_no_gradient() -> None:
    for placement in (REPLICATED, PLACEMENTS[None]):
        unit = unit_of(Small().requires_grad_(False), placement=placement, shards=seen_from(0, 3))
        assert not unit.is_trained
        assert not unit.take_gradient_()
        assert (len(unit.gradient), len(unit.summed)) == (0, 0)
        for parameter in unit.parameters:
            assert parameter.grad is None
            assert not parameter.requires_grad


def test_elements_that_no_parameter_uses_are_not_in_the_gradient() -> None:
    """14 elements in flat pieces of 3: one is left over, and what its memory held must not reach the norm."""
    unit = unit_of(Small(), how="flat", placement=PLACEMENTS["zero1"], shards=seen_from(4, 5))
    assert unit.counts == (3, 3, 3, 3, 3)
    unit.gradient.fill_(torch.nan)
    unit.take_gradient_()
    assert unit.gradient.isnan().tolist() == [True] * 14 + [False]
    assert unit.gradient[14] == 0


def test_replicas_of_whole_weights_publish_where_there_is_something_to_copy() -> None:
    """Where optimizer state is sharded a rank's masters are a piece: weights come with the next gather."""
    unit = unit_of(Small(), placement=PLACEMENTS["zero1"], shards=seen_from(1, 3), dtype=torch.bfloat16)
    unit.master.fill_(1.0)
    unit.publish_()
    assert not unit.weights.any()


def reduced_by_a_rank() -> list[float]:
    mesh = Mesh(Layout(dp=4))
    layer = nn.Linear(2, 3)
    unit = unit_of(layer, mesh=mesh)
    unit.gradient.copy_(torch.arange(9.0) + 100 * 2**mesh.rank)
    unit.finish_reduce_(unit.reduce().wait())
    assert layer.bias.grad is not None
    return layer.bias.grad.tolist()


def test_reduce_sums_over_ranks_in_place(ranks: RankPool) -> None:
    for result in ranks(4, reduced_by_a_rank):
        assert result == [4 * index + 1500.0 for index in (6, 7, 8)]


def gathered_by_a_rank(option: str | None, how: str, dtype: torch.dtype) -> None:
    """Weights come from their owners, go, and come again with what the owners have written meanwhile."""
    mesh, module = Mesh(Layout(fsdp=3, options={"fsdp": option} if option else {})), Small()
    unit = unit_of(module, mesh=mesh, placement=PLACEMENTS[option], how=how, dtype=dtype)
    objects = {name: id(parameter) for name, parameter in module.named_parameters()}
    start = sum(unit.counts[: mesh.rank])
    own = torch.arange(start, start + unit.counts[mesh.rank], dtype=torch.float32)
    for offset in (1.0, 100.0):
        unit.master.copy_(own + offset)
        unit.gather().wait()
        assert unit.is_present
        expected = torch.arange(14, dtype=torch.float32) + offset
        assert torch.equal(unit.weights[:14].float(), expected)
        for slot, parameter in zip(unit.slots, unit.parameters, strict=True):
            assert torch.equal(parameter.data.float(), slot.view(expected))
        assert {name: id(parameter) for name, parameter in module.named_parameters()} == objects
        assert torch.equal(unit.whole(unit.master)[:14], expected)
        unit.free_()
        assert unit.is_present == (option is not None)
        assert torch.equal(unit.master, own + offset)


@pytest.mark.parametrize("how", ["matrices", "rows", "flat"])
@pytest.mark.parametrize("option", [None, "zero1", "zero2"])
def test_weights_are_gathered_from_their_owners(ranks: RankPool, option: str | None, how: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ranks(3, gathered_by_a_rank, option, how, dtype)


def scattered_by_a_rank(option: str | None, how: str) -> list[float]:
    """Two microbatches: rank r has (r + 1) x (index + 1), then ten times as much."""
    mesh = Mesh(Layout(fsdp=3, options={"fsdp": option} if option else {}))
    unit = unit_of(Small(), mesh=mesh, placement=PLACEMENTS[option], how=how)
    unit.begin_step_()
    indices = torch.arange(1.0, 15.0)
    for factor in (1.0, 10.0):
        is_new = unit.take_gradient_()
        assert is_new == (unit.placement.gradients or factor == 1.0)
        if is_new:
            unit.gradient[:14] = 0.0
        unit.gradient[:14] += (mesh.rank + 1) * factor * indices
        if unit.placement.gradients:
            unit.finish_reduce_(unit.reduce().wait())
            assert nbytes(unit.gradient) == 0, "only the piece stays"
    if not unit.placement.gradients:
        unit.finish_reduce_(unit.reduce().wait())
    assert len(unit.summed) == unit.counts[mesh.rank]
    return unit.whole(unit.summed)[:14].tolist()


@pytest.mark.parametrize("how", ["matrices", "rows", "flat"])
@pytest.mark.parametrize("option", [None, "zero1", "zero2"])
def test_gradients_are_summed_to_their_owners(ranks: RankPool, option: str | None, how: str) -> None:
    """1 + 2 + 3 ranks times 1 + 10: 66 x (index + 1)."""
    for result in ranks(3, scattered_by_a_rank, option, how):
        assert result == [66.0 * (index + 1) for index in range(14)]


def summed_over_replicas() -> list[float]:
    mesh = Mesh(Layout(dp=2, fsdp=2))
    unit = unit_of(nn.Linear(2, 1, bias=False), mesh=mesh, placement=PLACEMENTS[None], how="flat")
    unit.begin_step_()
    for value in (mesh.rank + 1.0, mesh.rank + 5.0):
        unit.take_gradient_()
        unit.gradient.fill_(value)
        unit.finish_reduce_(unit.reduce().wait())
    unit.all_reduce().wait()
    return unit.summed.tolist()


def test_earlier_microbatches_reach_the_other_replicas_too(ranks: RankPool) -> None:
    """Gradients 1, 2, 3, 4 and then 5, 6, 7, 8 on 2 x 2 ranks: 36 everywhere, 9 a rank; not 8 and 10."""
    # FS-08
    assert ranks(4, summed_over_replicas) == [[36.0]] * 4
