import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from fourfold.data import TokenFile, TokenWriter, tokens
from fourfold.errors import UserError


def write(path: Path, *documents: list[int], vocab_size: int = 257, end_of_text: int = 256) -> TokenFile:
    with TokenWriter(path, vocab_size=vocab_size, end_of_text=end_of_text, source="a test") as writer:
        for document in documents:
            writer.append([np.array(document, dtype=np.int64)])
    return TokenFile(path)


def test_round_trip(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tokens", [1, 2, 3], [], [255])
    assert file.tokens.tolist() == [1, 2, 3, 256, 256, 255, 256]
    assert file.tokens.dtype == np.uint16
    assert file.document_starts.tolist() == [0, 4, 5]
    assert (file.num_tokens, file.num_documents) == (7, 3)
    assert (file.vocab_size, file.end_of_text, file.source) == (257, 256, "a test")
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 5


def test_one_call_or_many_write_the_same_file(tmp_path: Path) -> None:
    documents = [np.arange(length) for length in (3, 0, 5)]
    with TokenWriter(tmp_path / "b", vocab_size=257, end_of_text=256, source="a test") as writer:
        writer.append(documents)
        writer.append([])
    write(tmp_path / "a", *[document.tolist() for document in documents])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_empty_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tokens")
    assert (file.num_tokens, file.tokens.tolist(), file.document_starts.tolist()) == (0, [], [])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_type_of_the_ids_holds_the_last_one(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    file = write(tmp_path / "a", [vocab_size - 1], vocab_size=vocab_size, end_of_text=0)
    assert (file.tokens.tolist(), file.tokens.dtype) == ([vocab_size - 1, 0], dtype)


def test_wide_ids_do_not_wrap_around(tmp_path: Path) -> None:
    # DATA-13
    file = write(tmp_path / "a", [70000], vocab_size=119547, end_of_text=2)
    assert file.tokens.tolist() == [70000, 2]
    header = json.loads((tmp_path / "a").read_bytes()[: tokens.HEADER_BYTES])
    assert (header["dtype"], header["vocab_size"]) == ("uint32", 119547)


@pytest.mark.parametrize("wrong", [257, 70000, -1])
def test_writing_an_id_outside_the_vocabulary(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(
        UserError, match=rf"a: token id {wrong} at position 5 is outside the vocabulary of 257"
    ):
        write(tmp_path / "a", [1, 2, 3], [4, wrong])
    assert os.listdir(tmp_path) == []


def test_reading_an_id_outside_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path / "a", [1, 2, 3])
    content = (tmp_path / "a").read_bytes()
    place = tokens.HEADER_BYTES + 2 * 2
    (tmp_path / "a").write_bytes(content[:place] + b"\xff\xff" + content[place + 2 :])
    with pytest.raises(UserError, match=r"a: token id 65535 at position 2 is outside the vocabulary of 257"):
        TokenFile(tmp_path / "a").read(np.arange(4).reshape(2, 2))


def test_reading_gives_the_shape_of_the_places(tmp_path: Path) -> None:
    ids = write(tmp_path / "a", [1, 2, 3]).read(np.array([[0, 3], [2, 2]]))
    assert (ids.tolist(), ids.dtype) == ([[1, 256], [3, 3]], np.int64)


@pytest.mark.parametrize("cut", [1, 8, 30, 4095])
def test_truncated_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.tokens"
    write(path, list(range(100)))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UserError, match=r"a\.tokens (is damaged|is not a token file)"):
        TokenFile(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02 pickle", b'{"a": 1}', b"[]", b"text\n" * 2000])
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match="a is not a token file of fourfold"):
        TokenFile(tmp_path / "a")


def test_other_version_and_missing_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tokens, "VERSION", 9)
    with pytest.raises(UserError, match=r"cannot read the token file .*: No such file"):
        TokenFile(tmp_path / "a")
    write(tmp_path / "a", [1])
    monkeypatch.undo()
    with pytest.raises(UserError, match="format version 9, this program reads 1: prepare it again"):
        TokenFile(tmp_path / "a")


class FullDisk:
    """A file on a disk with room for so many bytes."""

    def __init__(self, path: Path, room_bytes: int):
        self.stream = path.open("wb")
        self.room_bytes = room_bytes

    def write(self, content: bytes) -> None:
        self.room_bytes -= len(memoryview(content).cast("B"))
        if self.room_bytes < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.stream.write(content)

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


@pytest.mark.parametrize("room_bytes", [4096 + 100, 4096 + 205])
def test_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch, room_bytes: int) -> None:
    write(tmp_path / "a", [1, 2, 3])
    monkeypatch.setattr(tokens, "open", lambda path, mode: FullDisk(path, room_bytes), raising=False)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", list(range(100)))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a"]
    assert TokenFile(tmp_path / "a").tokens.tolist() == [1, 2, 3, 256]


def test_disk_that_is_full_at_the_last_moment(tmp_path: Path, monkeypatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tokens.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", [1])
    assert os.listdir(tmp_path) == []


def test_error_while_writing_leaves_no_file(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "a", vocab_size=257, end_of_text=256, source="a test")
    with pytest.raises(KeyboardInterrupt), writer:  # noqa: PT012
        writer.append([np.arange(3)])
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_a_fingerprint_follows_the_content_and_not_the_path(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, size=100_000) for _ in range(30)]

    def written(name: str, documents: list[np.ndarray]) -> str:
        path = tmp_path / name
        with TokenWriter(path, vocab_size=257, end_of_text=256, source=name) as writer:
            writer.append(documents)
        return TokenFile(path).fingerprint()

    found = written("a", documents)
    assert written("b", documents) == found
    other_ends = [np.concatenate(documents[:2]), *documents[2:], documents[0][:0]]
    assert written("c", other_ends) != found
    # Of small files every token counts; of large ones the first, the last and a sample in between.
    for place in (0, -1):
        changed = [document.copy() for document in documents]
        changed[place][place] = 255 - changed[place][place]
        assert written("d", changed) != found
    small = documents[:5]
    changed = [document.copy() for document in small]
    changed[3][1234] = 255 - changed[3][1234]
    assert written("e", small) != written("f", changed)
