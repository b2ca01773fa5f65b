"""The text of a sample, as it is printed."""

import pytest

from fourfold.cli.sample import sample_text
from fourfold.data import ByteTokenizer
from fourfold.models import Decoder
from fourfold.specs import ModelSpec, SampleSection


def test_a_terminal_has_nothing_to_obey(monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def generate(model: Decoder, prompt_ids: list[int], **settings: object) -> list[int]:
        asked.update(settings, prompt_ids=prompt_ids)
        assert callable(asked.pop("on_token"))
        return list(b"a\tb\r\n\x1b[2Jc")

    monkeypatch.setattr("fourfold.sampling.generate", generate)
    model = Decoder(ModelSpec.preset("tiny"))
    settings = SampleSection(prompt="def", tokens=9, temperature=0.5, top_k=0)
    assert sample_text(model, ByteTokenizer(), settings, seed=3) == "defa\tb\ufffd\n\ufffd[2Jc"
    expected = {"tokens": 9, "temperature": 0.5, "top_k": None, "seed": 3, "stop": 256, "last_logits": None}
    assert asked == {**expected, "prompt_ids": list(b"def")}


def test_without_a_prompt_the_text_follows_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fourfold.sampling.generate", lambda model, prompt_ids, **settings: [*prompt_ids, 65])
    assert sample_text(Decoder(ModelSpec.preset("tiny")), ByteTokenizer(), SampleSection(), seed=0) == "A"
