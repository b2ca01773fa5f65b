"""The token file: the token ids of a corpus and where its documents start, read through a memory map."""

import hashlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import UserError
from fourfold.run_folder import sync

# [Note: token file]
# A file is, all little-endian:
#   bytes 0 to 4095       one line of JSON (`Header`), filled up with spaces
#   from 4096             num_tokens ids, uint16 or uint32 by vocabulary: ids never wrap around
#   to a multiple of 8    zeros
#   to the end            num_documents int64: the place of the first token of each document
# The last token of each document is its end of text. A file appears under its name only when it is complete
# and on disk, so a crash or a full disk leaves no broken file; the sizes in the header show a truncated copy.
MAGIC = "fourfold tokens"
VERSION = 1
HEADER_BYTES = 4096
# A fingerprint reads this many blocks of so many elements.
SAMPLE_BLOCKS, SAMPLE_BLOCK = 256, 4096


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest of uint16 and uint32 that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class TokenWriter:
    """Writes a token file document by document; a context manager.

    The file appears under `path` when the block ends, and not at all when it ends with an error. Errors of
    the file system are OSError.
    """

    def __init__(self, path: Path, *, vocab_size: int, end_of_text: int, source: str):
        self.path = path
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self.source = source
        self.num_tokens = 0
        self._dtype = token_dtype(vocab_size)
        self._lengths: list[NDArray[np.int64]] = []
        # Named after the process: two writers of one path never share a file, and the last one wins.
        self._partial = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.partial")

    def __enter__(self) -> "TokenWriter":
        self._stream = open(self._partial, "wb")
        self._stream.write(b" " * HEADER_BYTES)
        return self

    def append(self, documents: Sequence[NDArray[np.integer]]) -> None:
        """Write documents and end each with the end of text.

        Raises UserError for an id outside the vocabulary.
        """
        if not documents:
            return
        ending = np.array([self.end_of_text], dtype=np.uint32)
        ids = np.concatenate([part for document in documents for part in (document, ending)])
        _check_ids(ids, self.vocab_size, self.path, self.num_tokens)
        self._stream.write(ids.astype(self._dtype).data)
        self._lengths.append(np.array([len(document) + 1 for document in documents], dtype=np.int64))
        self.num_tokens += len(ids)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._stream:
                if kind is None:
                    self._finish()
            if kind is None:
                os.replace(self._partial, self.path)
                sync(self.path.parent)
        finally:
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        """Write the document starts and the header, and wait until all is on disk."""
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *self._lengths])
        starts = np.cumsum(lengths, dtype="<i8") - lengths
        tokens_bytes = self.num_tokens * self._dtype.itemsize
        self._stream.write(b"\0" * (-tokens_bytes % 8))
        self._stream.write(starts.astype("<i8").data)
        header = {
            "magic": MAGIC,
            "version": VERSION,
            "dtype": self._dtype.name,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "num_tokens": self.num_tokens,
            "num_documents": len(starts),
            "source": self.source[:256],  # at most 12 bytes a character, so that the header has room
        }
        self._stream.seek(0)
        self._stream.write(json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())


class TokenFile:
    """A token file, mapped into memory and read-only.

    `tokens` are the ids in the order of the documents, each document ended by `end_of_text`;
    `document_starts` (int64, ascending, the first is 0) are the places of their first tokens. `source` says
    what was tokenized.
    """

    def __init__(self, path: str | Path):
        """Open a file. Raises UserError if it is missing, truncated or not a token file."""
        self.path = Path(path)
        try:
            with open(self.path, "rb") as stream:
                header = _read_header(self.path, stream.read(HEADER_BYTES))
            size_bytes = self.path.stat().st_size
        except OSError as error:
            raise UserError(f"cannot read the token file {self.path}: {error.strerror}") from error
        self.vocab_size: int = header["vocab_size"]
        self.end_of_text: int = header["end_of_text"]
        self.num_tokens: int = header["num_tokens"]
        self.num_documents: int = header["num_documents"]
        self.source: str = header["source"]
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        tokens_bytes = self.num_tokens * dtype.itemsize
        starts_at = HEADER_BYTES + tokens_bytes + -tokens_bytes % 8
        expected_bytes = starts_at + 8 * self.num_documents
        if size_bytes != expected_bytes:
            raise UserError(
                f"the token file {self.path} is damaged: it has {size_bytes} bytes instead of "
                f"{expected_bytes}: delete it and prepare it again"
            )
        self.tokens = self._map(dtype, HEADER_BYTES, self.num_tokens)
        self.document_starts = self._map(np.dtype("<i8"), starts_at, self.num_documents)

    def fingerprint(self) -> str:
        """Return a hash of the sizes and of a sample of the content, the same wherever the file lies.

        The sample is spread evenly over the file, and all of a small one: reading it takes milliseconds.
        """
        sizes = [self.vocab_size, self.end_of_text, self.num_tokens, self.num_documents]
        found = hashlib.sha256(json.dumps(sizes).encode())
        for array in (self.tokens, self.document_starts):
            last = max(len(array) - SAMPLE_BLOCK, 0)
            for start in np.unique(np.linspace(0, last, SAMPLE_BLOCKS).astype(np.int64)).tolist():
                found.update(array[start : start + SAMPLE_BLOCK].tobytes())
        return found.hexdigest()[:16]

    def _map(self, dtype: np.dtype[Any], offset_bytes: int, count: int) -> NDArray[Any]:
        """Return `count` elements of the file as a read-only array."""
        if count == 0:  # an empty memory map is an error
            return np.zeros(0, dtype)
        return np.memmap(self.path, dtype, mode="r", offset=offset_bytes, shape=(count,)).view(np.ndarray)

    def read(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids at any places, as int64 in the shape of `places`.

        Raises UserError for an id outside the vocabulary, naming the file and its place.
        """
        ids = self.tokens[places].astype(np.int64)
        if ids.size and ids.max() >= self.vocab_size:
            wrong = ids >= self.vocab_size
            raise _outside_vocabulary(self.path, int(ids[wrong][0]), int(places[wrong][0]), self.vocab_size)
        return ids


def _read_header(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the header at the start of a file."""
    try:
        header = json.loads(raw)
        magic, version = header["magic"], header["version"]
    except (ValueError, TypeError, KeyError):
        magic = version = None
    if magic != MAGIC:
        raise UserError(f"{path} is not a token file of fourfold, or its beginning is damaged")
    if version != VERSION:
        raise UserError(
            f"the token file {path} has format version {version}, this program reads {VERSION}: "
            "prepare it again"
        )
    return header


def _check_ids(ids: NDArray[np.integer], vocab_size: int, path: Path, first_place: int) -> None:
    """Refuse ids outside the vocabulary; `first_place` is the place in the file of the first one."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise _outside_vocabulary(path, int(ids[wrong]), first_place + wrong, vocab_size)


def _outside_vocabulary(path: Path, token: int, place: int, vocab_size: int) -> UserError:
    """Return the error for an id that the vocabulary does not have."""
    return UserError(
        f"{path}: token id {token} at position {place} is outside the vocabulary of {vocab_size} ids"
    )
