import collections

import pytest
import torch

from fourfold.errors import UserError
from fourfold.initialize import initialize_, whole
from fourfold.models import IGNORE, Decoder, Microbatch
from fourfold.models.attention import attention
from fourfold.sampling import _choose, generate
from fourfold.specs import ModelSpec, RopeScaling

TINY = ModelSpec.preset("tiny-qwen3")


def decoder(**fields):
    spec = TINY.replace(fields)
    model = Decoder(spec).double()
    initialize_(whole(dict(model.named_parameters())), model, seed=0, std=0.3)
    return model


def logits_after(model, ids):
    """The next token's logits, all of the text read at once."""
    inputs = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    with torch.no_grad():
        return model(Microbatch(inputs, torch.full_like(inputs, IGNORE), positions, ((len(ids),),)))[0, -1]


LONG = RopeScaling(
    rope_type="longrope",
    factor=2.0,
    original_max_position_embeddings=8,
    short_factor=(1.0,) * 8,
    long_factor=(3.0,) * 8,
)


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 4}, {"rope_scaling": LONG}])
def test_the_likeliest_token_each_time(fields):
    model, text = decoder(**fields), [5, 1, 60]
    found = generate(model, text, tokens=12, temperature=0)
    for token in found:
        assert token == logits_after(model, text).argmax()
        text.append(token)
    assert len(found) == 12
    assert len(set(found)) > 2


def test_a_text_longer_than_the_context_is_read_again_from_its_latest_half():
    model = decoder(max_position_embeddings=8)
    found = generate(model, [5, 1, 60], tokens=20, temperature=0)
    assert len(found) == 20
    text, start = [5, 1, 60], 0
    for token in found:
        if len(text) - start > 8:
            start = len(text) - 4
        assert token == logits_after(model, text[start:]).argmax()
        text.append(token)
    prompt = list(range(30))
    assert generate(model, prompt, tokens=1, temperature=0) == [logits_after(model, prompt[-4:]).argmax()]


def test_the_seed_decides():
    model = decoder()
    runs = [generate(model, [3], tokens=20, temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert generate(model, [3], tokens=20, temperature=2.0, seed=0) == runs[0]
    assert torch.equal(torch.get_rng_state(), state)


def test_frequencies_are_the_softmax_over_the_temperature():
    logits = torch.tensor([1.0, 3.0, -2.0, 0.0])
    generator, draws = torch.Generator().manual_seed(0), 4000
    for temperature, top_k, candidates in (
        (1.0, None, [0, 1, 2, 3]),
        (2.5, None, [0, 1, 2, 3]),
        (2.5, 2, [0, 1]),
    ):
        right = (logits[candidates] / temperature).softmax(0).tolist()
        counts = collections.Counter(_choose(logits, temperature, top_k, generator) for _ in range(draws))
        assert set(counts) == set(candidates)
        for token, share in zip(candidates, right, strict=True):
            assert abs(counts[token] / draws - share) < 5 * (share / draws) ** 0.5


def test_top_k_leaves_the_likeliest():
    model = decoder()
    best = logits_after(model, [3]).topk(3).indices.tolist()
    found = {generate(model, [3], tokens=1, temperature=50.0, top_k=3, seed=seed)[0] for seed in range(60)}
    assert found == set(best)
    greedy = generate(model, [3], tokens=9, temperature=0)
    assert generate(model, [3], tokens=9, temperature=50.0, top_k=1) == greedy


def test_generation_ends_before_the_stop_token():
    model = decoder()
    whole = generate(model, [3], tokens=12, temperature=0)
    stop = whole[5]
    assert generate(model, [3], tokens=12, temperature=0, stop=stop) == whole[: whole.index(stop)]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = decoder().train(training)
    generate(model, [3], tokens=3)
    assert model.training is training
    assert all(layer.self_attn.attend is attention for layer in model.model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_generate():
    assert generate(decoder(), [3], tokens=0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"prompt_ids": [3, 67]}, "token 67 of the prompt is outside the vocabulary: use 0 to 66"),
        ({"prompt_ids": [-1]}, "token -1 of the prompt"),
        ({"tokens": -1}, "tokens=-1: use 0 or more"),
        ({"temperature": -0.5}, "temperature=-0.5: use 0"),
        ({"temperature": float("nan")}, "temperature=nan: use 0"),
        ({"top_k": 0}, "top_k=0: use 1 or more"),
    ],
)
def test_impossible_requests(arguments, message):
    with pytest.raises(UserError, match=message):
        generate(decoder(), **{"prompt_ids": [3], "tokens": 1, **arguments})


def test_all_problems_at_once():
    with pytest.raises(UserError) as raised:
        generate(decoder(), [], tokens=-1, temperature=-1, top_k=0)
    assert len(raised.value.messages) == 4
