"""Text to token ids and back: bytes, or any Hugging Face tokenizer.json."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import UserError, nearest

END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<end_of_text>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<|im_end|>",
    "<|eot_id|>",
    "<EOS>",
    "[EOS]",
)
"""Names that tokenizers give to the token that ends a document."""

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
CARRIED = (TOKENIZER, SETTINGS, "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""Files of a tokenizer, and what a model of Hugging Face has about its tokens."""


class Tokenizer(Protocol):
    """What preparing a corpus and sampling need of a tokenizer.

    Ids are below `vocab_size`. `end_of_text` is the id that ends a document; `encode` does not add it, and
    `decode` gives no text for it. `fingerprint` changes whenever the ids of a text could.
    """

    name: str
    vocab_size: int
    end_of_text: int
    fingerprint: str

    def encode(self, text: str) -> NDArray[np.integer]:
        """Return the token ids of a text, without any special token added."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the token ids of several texts."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of token ids."""

    def files(self) -> dict[str, bytes]:
        """Return what Hugging Face's transformers needs to make the same ids, files by name."""


class ByteTokenizer:
    """The bytes of the UTF-8 text: ids 0 to 255, and 256 for the end of a text."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    fingerprint = "bytes 257"

    def encode(self, text: str) -> NDArray[np.integer]:
        """Return the bytes of the text, as uint8."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the bytes of each text, as uint8."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text; ids that stand for no byte are left out, broken UTF-8 becomes U+FFFD."""
        return bytes(int(token) for token in ids if token < 256).decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        """Return a tokenizer.json whose tokens are single bytes, and its settings."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
        made = HuggingFaceTokenizer(models.BPE(vocabulary, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(END_OF_TEXT_NAMES[0], special=True)])
        return {TOKENIZER: made.to_str(pretty=True).encode(), SETTINGS: _settings(END_OF_TEXT_NAMES[0])}


class FileTokenizer:
    """A Hugging Face tokenizer.json.

    The ids are those of `transformers` with `add_special_tokens=False`: a special token that is spelled out
    in the text becomes its id. Truncation and padding set in the file are switched off.
    """

    def __init__(self, path: Path):
        """Read the file (or the one in the folder `path`). Raises UserError where it cannot be used."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer  # here: bytes need no such library

        try:
            self.path = path / TOKENIZER if path.is_dir() else path
            content = self.path.read_bytes()
        except OSError as error:
            hint = nearest(path.name, ["bytes"])
            raise UserError(
                f"cannot read the tokenizer {error.filename}: {error.strerror}: "
                f"give 'bytes' or the path of a tokenizer.json.{hint}"
            ) from error
        try:
            self._tokenizer = HuggingFaceTokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{self.path} is not a Hugging Face tokenizer.json: {error}") from error
        # A truncation left in the file would cut every document without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(self.path)
        # Ids may have gaps, so the number of tokens would be too small.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_text = _end_of_text(self.path, vocabulary)
        self.fingerprint = f"{hashlib.sha256(content).hexdigest()} {self.end_of_text}"

    def encode(self, text: str) -> NDArray[np.integer]:
        """Return the token ids of a text, as uint32."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the token ids of several texts, as uint32, encoded by several threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text; the end of text and ids unknown to the tokenizer are left out."""
        kept = [int(token) for token in ids if token != self.end_of_text]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def files(self) -> dict[str, bytes]:
        """Return the file and those beside it that belong to it. Raises UserError for one it cannot read."""
        there = (self.path.with_name(name) for name in CARRIED[1:])
        try:
            found = {path.name: path.read_bytes() for path in there if path.exists()}
            found[TOKENIZER] = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {error.filename}: {error.strerror}") from error
        name = self._tokenizer.id_to_token(self.end_of_text)
        assert name is not None
        return {SETTINGS: _settings(name), **found}


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Return the tokenizer `bytes`, or that of a tokenizer.json (or of a folder with one).

    Raises UserError for a missing or broken file, or one without an end-of-text token.
    """
    if name == "bytes":
        return ByteTokenizer()
    return FileTokenizer(Path(name).expanduser())


def _end_of_text(path: Path, vocabulary: dict[str, int]) -> int:
    """Return the id that ends a document: the one the tokenizer names, else one of a known name."""
    names = [*_declared_end_of_text(path.with_name(SETTINGS)), *END_OF_TEXT_NAMES]
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    raise UserError(
        f"{path} has no end-of-text token, which separates documents: add one of the special tokens "
        f"{', '.join(END_OF_TEXT_NAMES)}, or name yours as eos_token in a tokenizer_config.json beside it"
    )


def _declared_end_of_text(path: Path) -> list[str]:
    """Return the `eos_token` of a tokenizer_config.json, if there is one."""
    if not path.exists():
        return []
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if isinstance(token, dict):
        token = token.get("content")
    return [token] if isinstance(token, str) else []


def _settings(end_of_text: str) -> bytes:
    """Return a tokenizer_config.json for a tokenizer.json that has none."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_of_text}
    return json.dumps(settings, indent=2).encode() + b"\n"


def _characters_of_bytes() -> list[str]:
    """Return the character that stands for each byte in byte-level tokenizers (GPT-2's table).

    Printable ones stand for themselves, the others take the characters from 256 on in their order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
