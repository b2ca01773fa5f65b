"""The files of a checkpoint: safetensors, written and read in place."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fourfold.checkpoint.digest import MODULUS, digest
from fourfold.checkpoint.manifest import WEIGHT, FileEntry, Piece, Stored
from fourfold.checkpoint.state import Held
from fourfold.checkpoint.stripes import numel
from fourfold.errors import RunStopped
from fourfold.run_folder import reading

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""Of weights and moments, by the name that safetensors has for it."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK_BYTES = 2**24
"""So much is checked and written at a time."""
MOST_OPEN = 128
"""Of so many files at a time a reader holds a handle: systems give a process 256 and more."""
MOST_CHUNKS = 512
"""The most that are written with one call: systems take 1024 and more."""


def content_of(values: Tensor) -> NDArray[np.uint8]:
    """Return a flat tensor's bytes: of its own memory on the CPU, else of a copy."""
    return values.detach().cpu().contiguous().view(torch.uint8).numpy()


def write_tensors(
    path: Path, parts: Sequence[Held], wrote: Callable[[int], None] = lambda _: None
) -> tuple[FileEntry, list[Piece]]:
    """Write parts of tensors to a safetensors file, onto the disk, and return what the manifest says of it.

    A tensor that is there whole keeps its shape, a part is flat. ``wrote`` is told how many bytes of tensors
    each write was. Raises RunStopped at a weight that is not finite.
    """
    tensors, end = {}, 0
    for part in parts:
        count, start = part.values.numel(), end
        end += count * part.values.itemsize
        whole = count == np.prod(part.tensor.shape, dtype=np.int64)
        tensors[part.tensor.name] = {
            "dtype": NAMES[getattr(torch, part.tensor.dtype)],
            "shape": list(part.tensor.shape) if whole else [count],
            "data_offsets": [start, end],
        }
    header = header_of(tensors)
    sums, offset = [0] * len(parts), len(header)

    def check(batch: Sequence[_Chunk]) -> None:
        for chunk in batch:
            sums[chunk.part] += _checked(chunk, parts[chunk.part].tensor)

    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as checking:
        write_all(file.fileno(), header)
        before = checking.submit(check, [])
        for batch in _batches(parts):
            # Neither numpy nor the system holds the interpreter: both go on at once, at most a batch apart.
            checked = checking.submit(check, batch)
            write_all(file.fileno(), *(chunk.content.data for chunk in batch))
            count = sum(len(chunk.content) for chunk in batch)
            _hurry(file.fileno(), offset, count)
            offset += count
            before.result()
            before = checked
            wrote(count)
        os.fsync(file.fileno())
        before.result()
    pieces, place = [], len(header)
    for part, total in zip(parts, sums, strict=True):
        pieces.append(Piece(part.tensor.name, path.name, place, part.stripes, total % MODULUS))
        place += part.values.numel() * part.values.itemsize
    return FileEntry(offset, len(header), hashlib.sha256(header).hexdigest()), pieces


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes of a part: its number, the place of the first of them in it, and themselves."""

    part: int
    first_byte: int
    content: NDArray[np.uint8]


def _batches(parts: Sequence[Held]) -> Iterator[list[_Chunk]]:
    """Yield the bytes of all parts, in order, so many at a time as are written and checked in one go."""
    batch: list[_Chunk] = []
    filled = 0
    for number, part in enumerate(parts):
        content = content_of(part.values)
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = _Chunk(number, start, content[start : start + CHUNK_BYTES])
            if batch and (filled + len(chunk.content) > CHUNK_BYTES or len(batch) == MOST_CHUNKS):
                yield batch
                batch, filled = [], 0
            batch.append(chunk)
            filled += len(chunk.content)
    if batch:
        yield batch


def header_of(tensors: Mapping[str, Mapping[str, object]]) -> bytes:
    """Return the head of a safetensors file: its length and, as JSON, where each tensor lies."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Write a small file onto the disk, and return what the manifest says of it."""
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), content)
        os.fsync(file.fileno())
    return FileEntry(len(content), len(content), hashlib.sha256(content).hexdigest())


def write_all(descriptor: int, *contents: bytes | memoryview) -> None:
    """Write all of some bytes, one after another: the system may take a part at a time."""
    left = deque(memoryview(content) for content in contents)
    while left:
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]


def _hurry(descriptor: int, offset: int, count: int) -> None:
    """Let the disk begin with what was just written, while the next is checked, and keep it out of memory.

    Else all of it waits in memory for the fsync at the end. Where the system has no such advice, it does.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def _checked(chunk: _Chunk, tensor: Stored) -> int:
    """Return the digest of a chunk. Raises RunStopped at a weight that is not finite."""
    if tensor.state == WEIGHT:
        numbers = chunk.content.view(tensor.dtype)
        if not np.isfinite([numbers.max(), numbers.min()]).all():  # either is nan where one is
            raise RunStopped(f"weights are not finite, first in {tensor.name}")
    return digest(chunk.content, chunk.first_byte)


def problem_of(path: Path, entry: FileEntry) -> str | None:
    """Return what is wrong with a file's size or its head, None where nothing is.

    Raises Unreadable where the system does not let us look.
    """
    try:
        with reading(path):
            size = path.stat().st_size
            if size != entry.size_bytes:
                return f"{path} has {size} bytes, the manifest says {entry.size_bytes}"
            with path.open("rb", buffering=0) as file:
                head = file.read(entry.head_bytes)
    except OSError:
        return f"{path} is missing"
    if hashlib.sha256(head).hexdigest() != entry.sha256:
        part = "its header" if entry.head_bytes < entry.size_bytes else "it"
        return f"{path} is damaged or another file: {part} has another checksum than the manifest says"
    return None


def piece_bytes(piece: Piece, itemsize: int) -> int:
    """The size of a piece in its file."""
    return numel(piece.stripes) * itemsize


class OpenFiles:
    """Files that are opened at their first use and stay open for reading, until `close` or many later ones.

    What a thousand ranks wrote is more files than a process may have open.
    """

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def close(self) -> None:
        """Close all of them."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read_into(self, path: str, target: NDArray[np.uint8], offset: int) -> None:
        """Fill ``target`` with the bytes of a file from ``offset`` on.

        Raises OSError where it cannot be read, EOFError where it ends before.
        """
        if path not in self._descriptors:
            if len(self._descriptors) == MOST_OPEN:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))  # the one opened first
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        view = target.data
        while view:
            count = os.preadv(self._descriptors[path], [view], offset)
            if count == 0:
                raise EOFError(f"it ends at byte {offset}")
            view, offset = view[count:], offset + count
