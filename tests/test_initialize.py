import math

import pytest
import torch

from fourfold.initialize import CHUNK, Part, initialize_, normal, whole
from fourfold.models import Decoder
from fourfold.specs import ModelSpec


def initialized(spec, *, dtype=torch.float32, seed=0):
    model = Decoder(spec).to(dtype)
    initialize_(whole(dict(model.named_parameters())), model, seed=seed, std=0.02)
    return model


def test_the_numbers_never_change():
    """A run that was started years ago can be repeated."""
    first = [-1.9506198509900494, 1.438028464412811, -1.4981586408984824, 0.6318452754356149]
    assert normal(0, "model.norm.weight", 0, 4).tolist() == pytest.approx(first, abs=1e-12)
    far = [0.16313894490645667, 0.04783381659658572]
    assert normal(0, "model.norm.weight", 10**12 + 3, 2).tolist() == pytest.approx(far, abs=1e-12)


def test_any_part_is_bitwise_that_part_of_the_whole():
    whole = normal(7, "w", 0, 203)
    for start in range(0, 40):
        for count in (0, 1, 2, 3, 5, 8, 50, 163):
            assert torch.equal(normal(7, "w", start, count), whole[start : start + count]), (start, count)
    pieces = [normal(7, "w", start, 29) for start in reversed(range(0, 203, 29))]
    assert torch.equal(torch.cat(pieces[::-1]), whole)


def test_shards_differ():
    """Each rank that fills its own shard must not repeat the numbers of another."""
    # RNG-02
    first, second = normal(0, "w", 0, 16), normal(0, "w", 16, 16)
    assert not torch.isin(first, second).any()
    left, right = normal(0, "w", 0, 32).view(8, 4).split(2, 1)
    assert not torch.isin(left, right).any()


def test_names_and_seeds_differ():
    parts = [normal(seed, name, 0, 64) for seed, name in ((0, "a"), (0, "b"), (1, "a"), (-1, "a"), (10, "a"))]
    assert len(torch.unique(torch.cat(parts))) == 5 * 64


def test_the_distribution_is_normal():
    n = 1_000_000
    x = normal(3, "w", 5, n)
    # Each bound is five standard errors.
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    for distance in (1, 2, 3, 4, 256, CHUNK):
        assert abs((x[distance:] * x[:-distance]).mean()) < 5 / math.sqrt(n - distance), distance
        squares = x**2 - 1
        assert abs((squares[distance:] * squares[:-distance]).mean()) < 5 * 2 / math.sqrt(n - distance), (
            distance
        )
    for bound in (0.5, 1.0, 2.0, 3.0, 4.0):
        share = math.erfc(bound / math.sqrt(2))
        assert abs((x.abs() > bound).double().mean() - share) < 5 * math.sqrt(share / n)
    assert 4.5 < x.abs().max() < 6.5


def test_every_parameter_gets_its_kind_of_value():
    spec = ModelSpec.preset("tiny-qwen2").replace({"qk_norm": True})
    for name, parameter in initialized(spec).named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = normal(0, name, 0, parameter.numel()).view_as(parameter) * 0.02
            assert torch.equal(parameter, expected.float()), name


def test_models_of_every_precision_start_alike():
    spec = ModelSpec.preset("tiny")
    exact = initialized(spec, dtype=torch.float64).state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        for name, value in initialized(spec, dtype=dtype).state_dict().items():
            assert torch.equal(value, exact[name].to(dtype)), name


def test_a_matrix_larger_than_a_chunk():
    layer = torch.nn.Linear(CHUNK // 64, 100, bias=False)
    initialize_(whole(dict(layer.named_parameters())), layer, seed=0, std=1.0)
    assert torch.equal(layer.weight.flatten(), normal(0, "weight", 0, layer.weight.numel()).float())


def test_a_tied_weight_is_that_of_the_embedding():
    model = initialized(ModelSpec.preset("tiny-qwen3"))
    expected = normal(0, "model.embed_tokens.weight", 0, 10) * 0.02
    assert torch.equal(model.lm_head.weight.flatten()[:10], expected.float())


def test_targets_may_be_other_tensors_than_the_parameters():
    spec = ModelSpec.preset("tiny")
    with torch.device("meta"):
        model = Decoder(spec)
    masters = {name: torch.full(shape, torch.nan) for name, shape in spec.parameter_shapes().items()}
    initialize_(whole(masters), model, seed=0, std=0.02)
    for name, value in initialized(spec).state_dict().items():
        assert torch.equal(masters[name], value), name


def test_parts_are_those_of_the_whole():
    """Runs of a flattened parameter that begin anywhere, within a row, a group of four numbers or a chunk."""
    spec = ModelSpec.preset("tiny-qwen2")
    model = initialized(spec)
    with torch.device("meta"):
        shapes_only = Decoder(spec)
    for name, value in model.named_parameters():
        for first, count in ((0, 1), (3, 7), (5, 0), (value.numel() - 2, 2)):
            target = torch.full((count,), torch.nan)
            initialize_([Part(name, first, target)], shapes_only, seed=0, std=0.02)
            assert torch.equal(target, value.flatten()[first : first + count]), (name, first)


def test_parts_larger_than_a_chunk():
    layer = torch.nn.Linear(CHUNK // 64, 100, bias=False)
    target = torch.full((CHUNK + 1000,), torch.nan)
    initialize_([Part("weight", 123, target)], layer, seed=0, std=1.0)
    assert torch.equal(target, normal(0, "weight", 123, CHUNK + 1000).float())


def test_a_parameter_that_nobody_covers_is_an_error():
    layer = torch.nn.LayerNorm(4)
    with pytest.raises(TypeError, match=r"^weight has no initial value: LayerNorm is no Linear"):
        initialize_(whole(dict(layer.named_parameters())), layer, seed=0, std=1.0)
    with torch.device("meta"):
        model = Decoder(ModelSpec.preset("tiny"))
    with pytest.raises(TypeError, match=r"model.embed_tokens.weight is on the meta device"):
        initialize_(whole(dict(model.named_parameters())), model, seed=0, std=1.0)
