import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fourfold.data import ByteTokenizer, load_tokenizer
from fourfold.errors import UserError


def save_tokenizer(path: Path, *, special: list[str], change=lambda tokenizer: None) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat. " * 9], trainer)
    change(tokenizer)
    tokenizer.save(str(path))
    return path


def test_bytes_round_trip() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "naïve 東京\n"
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert [batch.tolist() for batch in tokenizer.encode_batch(["a", "", "é"])] == [[97], [], [195, 169]]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)


def test_bytes_decode_never_fails() -> None:
    # A model may sample half a character, the end of text, or an id that only pads its vocabulary.
    assert ByteTokenizer().decode([104, 0xC3, 256, 105, 300]) == "h\ufffdi"


def test_hugging_face_file_round_trip(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json", special=["<|endoftext|>"])
    reference = Tokenizer.from_file(str(path))
    tokenizer = load_tokenizer(path)
    text = "the cat, naïve 東京\n"
    ids = tokenizer.encode(text)
    assert ids.tolist() == reference.encode(text, add_special_tokens=False).ids
    assert len(ids) < len(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert tokenizer.end_of_text == reference.token_to_id("<|endoftext|>")
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    assert tokenizer.name == str(path)


def test_truncation_and_padding_of_the_file_do_not_cut_documents(tmp_path: Path) -> None:
    def cut(tokenizer: Tokenizer) -> None:
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=4)

    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer.json", special=["</s>"], change=cut))
    long, short = tokenizer.encode_batch(["xyz " * 100, "x"])
    assert tokenizer.decode(long) == "xyz " * 100
    assert len(short) == 1


def test_vocabulary_size_covers_ids_with_gaps(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json", special=["<eos>"])
    content = json.loads(path.read_text())
    content["model"]["vocab"]["gap"] = 1000
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).vocab_size == 1001


@pytest.mark.parametrize(
    ("special", "declared", "expected"),
    [
        (["<eos>"], None, "<eos>"),
        (["<|im_end|>", "<|endoftext|>"], None, "<|endoftext|>"),
        (["<|im_end|>", "<|endoftext|>"], "<|im_end|>", "<|im_end|>"),
        (["<stop>"], {"content": "<stop>"}, "<stop>"),
        (["</s>"], None, "</s>"),
    ],
)
def test_end_of_text_is_the_declared_or_a_known_one(tmp_path: Path, special, declared, expected) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json", special=special)
    if declared:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
    assert load_tokenizer(path).end_of_text == special.index(expected)


def test_tokenizer_without_end_of_text(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json", special=["<stop>"])
    with pytest.raises(UserError, match=r"tokenizer.json has no end-of-text token.*<\|endoftext\|>"):
        load_tokenizer(path)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    first = load_tokenizer(save_tokenizer(tmp_path / "a.json", special=["</s>"]))
    second = load_tokenizer(save_tokenizer(tmp_path / "b.json", special=["</s>", "<pad>"]))
    assert len({first.fingerprint, second.fingerprint, ByteTokenizer().fingerprint}) == 3


def test_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"cannot read the tokenizer byte: No such file.*Did you mean 'bytes'\?"
    ):
        load_tokenizer("byte")
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*tokenizer.json: No such file"):
        load_tokenizer(tmp_path)
    for content in (b"{", b"\xff", b'{"model": {"type": "none"}}', b""):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer.json is not a Hugging Face tokenizer.json: "):
            load_tokenizer(tmp_path / "tokenizer.json")


def test_broken_tokenizer_config(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json", special=["</s>"])
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"cannot read .*tokenizer_config.json"):
        load_tokenizer(path)


def test_ids_fit_their_type(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json", special=["</s>"])
    assert load_tokenizer(path).encode("cat").dtype == np.uint32
    assert load_tokenizer(path).encode("").shape == (0,)
