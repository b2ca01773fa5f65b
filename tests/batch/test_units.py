import pytest
import torch
from torch import nn

from fourfold.batch.units import Unit, parameter_sites, parameter_users
from fourfold.models import Decoder
from fourfold.specs import ModelSpec


def decoder(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelSpec.preset(name))


def units_of(model: Decoder, dtype: torch.dtype = torch.float32) -> list[Unit]:
    named, sites = dict(model.named_parameters()), parameter_sites(model)
    pieces = model.pieces()
    owned = parameter_users(model, [piece.modules for piece in pieces])
    return [
        Unit(
            piece.name,
            {name: named[name] for name in users},
            sites,
            dtype=dtype,
            master_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for piece, users in zip(pieces, owned, strict=True)
    ]


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
        assert unit.weights is unit.master


def on_rank(rank_sizes: tuple[int, ...]) -> list[float]:
    import torch.distributed as dist

    from fourfold.mesh import Mesh
    from fourfold.specs import Layout

    mesh = Mesh(Layout.parse(f"dp{dist.get_world_size()}"))
    layer = nn.Linear(2, 3)
    unit = Unit(
        "layer",
        dict(layer.named_parameters()),
        parameter_sites(layer),
        dtype=torch.float32,
        master_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    unit.gradient.copy_(torch.arange(9.0) + 100 * 2**mesh.rank)
    unit.reduce(mesh.batch).wait()
    assert layer.bias.grad is not None
    return layer.bias.grad.tolist()


def test_reduce_sums_over_ranks_in_place(ranks) -> None:  # type: ignore[no-untyped-def]
    for result in ranks(4, on_rank, ()):
        assert result == [4 * index + 1500.0 for index in (6, 7, 8)]
