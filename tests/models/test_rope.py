import copy
import pickle

import pytest
import torch

from fourfold.models.rope import Rotary, attention_factor, cos_sin, inverse_frequencies, rotate
from fourfold.specs import ModelSpec, RopeScaling
from tests.models.packing import pack

TINY = ModelSpec.preset("tiny")
LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def with_scaling(scaling, **fields):
    return TINY.replace({"rope_scaling": scaling, **fields})


def test_llama3_ratios():
    # HF-05
    fields = {"head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    plain = inverse_frequencies(TINY.replace(fields), torch.float64)
    ratio = inverse_frequencies(with_scaling(LLAMA3, **fields), torch.float64) / plain
    assert torch.equal(ratio[:29], torch.ones(29, dtype=torch.float64))
    expected = torch.tensor([0.8282, 0.6437, 0.4935, 0.3711], dtype=torch.float64)
    torch.testing.assert_close(ratio[29:33], expected, rtol=0, atol=5e-5)
    assert torch.equal(ratio[35:], torch.full((29,), 0.125, dtype=torch.float64))


def test_plain_frequencies_and_angles():
    frequencies = inverse_frequencies(TINY, torch.float64)
    assert frequencies.tolist() == pytest.approx([10000.0 ** (-2 * i / 16) for i in range(8)], rel=1e-15)
    cos, sin = cos_sin(TINY, pack(((3, 5),), 7), torch.float64)
    assert cos.shape == (1, 8, 1, 16)
    assert sin.shape == (1, 8, 1, 8)
    torch.testing.assert_close(sin[0, 7, 0], (4 * frequencies).sin(), rtol=0, atol=1e-15)
    torch.testing.assert_close(cos[0, 7, 0, 8:], (4 * frequencies).cos(), rtol=0, atol=1e-15)


def test_a_low_precision_model_rounds_only_the_result():
    batch = pack(((128,),), 7)
    exact = cos_sin(TINY, batch, torch.float64)
    for found, right in zip(cos_sin(TINY, batch, torch.bfloat16), exact, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-5)


def test_scores_depend_on_the_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 16, dtype=torch.float64).expand(1, 40, 2, 16).unbind(2)
    cos, sin = cos_sin(TINY, pack(((40,),), 7), torch.float64)
    q, k = rotate(q[:, :, None], cos, sin)[0, :, 0], rotate(k[:, :, None], cos, sin)[0, :, 0]
    scores = q @ k.T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert (scores[0, 0] - scores[1, 0]).abs() > 1e-3


def test_gradient_of_the_rotation():
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64, requires_grad=True)
    cos, sin = cos_sin(TINY, pack(((5,), (2, 3)), 7), torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_follow_the_document_and_not_its_neighbours(kind):
    scaling = {
        "dynamic": RopeScaling(rope_type="dynamic", factor=2.0),
        "longrope": RopeScaling(
            rope_type="longrope",
            factor=4.0,
            original_max_position_embeddings=8,
            short_factor=(1.0,) * 8,
            long_factor=tuple(float(i + 2) for i in range(8)),
        ),
    }[kind]
    spec = with_scaling(scaling, max_position_embeddings=8)
    alone, _ = cos_sin(spec, pack(((12,),), 7), torch.float64)
    short, _ = cos_sin(spec, pack(((8,),), 7), torch.float64)
    packed, _ = cos_sin(spec, pack(((8, 12), (20,)), 7), torch.float64)
    assert torch.equal(packed[0, 8:], alone[0])
    assert torch.equal(packed[0, :8], short[0])
    assert not torch.allclose(packed[1, :8], short[0])


def test_angles_are_computed_once_for_a_microbatch_and_kept_with_it():
    rotary, batch = Rotary(TINY), pack(((8,),), 7)
    first = rotary(batch, torch.float32)
    assert rotary(batch, torch.float32)[0] is first[0]
    assert rotary(batch, torch.float64)[0].dtype == torch.float64
    assert len(rotary._cache) == 1
    del batch
    assert len(rotary._cache) == 0


def test_copies_and_pickles():
    batch = pack(((8,),), 7)
    rotary = Rotary(with_scaling(LLAMA3))
    cos, sin = rotary(batch, torch.float32)
    for other in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert torch.equal(other(batch, torch.float32)[0], cos)
        assert torch.equal(other(batch, torch.float32)[1], sin)


def test_angles_first_made_in_inference_can_be_trained_with():
    rotary, batch = Rotary(TINY), pack(((8,),), 7)
    with torch.inference_mode():
        rotary(batch, torch.float32)
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    rotate(x, *rotary(batch, torch.float32)).sum().backward()
    assert x.grad is not None


def test_attention_factor():
    assert attention_factor(TINY) == 1
    assert attention_factor(with_scaling(LLAMA3)) == 1
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
    assert attention_factor(with_scaling(RopeScaling(**yarn))) == pytest.approx(1.2772588722, abs=1e-9)
    assert attention_factor(with_scaling(RopeScaling(**yarn, attention_factor=0.5))) == 0.5
