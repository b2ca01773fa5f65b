"""The files of a checkpoint: safetensors, written and read in place."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fourfold.checkpoint.digest import digest
from fourfold.checkpoint.manifest import WEIGHT, FileEntry, Piece, Stored
from fourfold.checkpoint.state import Held
from fourfold.checkpoint.stripes import numel
from fourfold.errors import RunStopped

DTYPES = {"float32": "F32", "float64": "F64"}
"""Of weights and moments, and what safetensors calls them."""
CHUNK_BYTES = 2**24
"""So much is checked and written at a time."""


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
            "dtype": DTYPES[part.tensor.dtype],
            "shape": list(part.tensor.shape) if whole else [count],
            "data_offsets": [start, end],
        }
    header = header_of(tensors)
    pieces, offset = [], len(header)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as checking:
        _write(file.fileno(), memoryview(header))
        for part in parts:
            content, total = content_of(part.values), 0
            for start in range(0, len(content), CHUNK_BYTES):
                chunk = content[start : start + CHUNK_BYTES]
                # Neither numpy nor the system holds the interpreter: both go on at once.
                checked = checking.submit(_checked, chunk, start, part.tensor)
                _write(file.fileno(), chunk.data)
                _hurry(file.fileno(), offset + start, len(chunk))
                total += checked.result()
                wrote(len(chunk))
            pieces.append(Piece(part.tensor.name, path.name, offset, part.stripes, total % 2**64))
            offset += len(content)
        os.fsync(file.fileno())
    return FileEntry(offset, len(header), hashlib.sha256(header).hexdigest()), pieces


def header_of(tensors: Mapping[str, Mapping[str, object]]) -> bytes:
    """Return the head of a safetensors file: its length and, as JSON, where each tensor lies."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Write a small file onto the disk, and return what the manifest says of it."""
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(content))
        os.fsync(file.fileno())
    return FileEntry(len(content), len(content), hashlib.sha256(content).hexdigest())


def _write(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _hurry(descriptor: int, offset: int, count: int) -> None:
    """Let the disk begin with what was just written, while the next is checked, and keep it out of memory.

    Else all of it waits in memory for the fsync at the end. Where the system has no such advice, it does.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def _checked(content: NDArray[np.uint8], first_byte: int, tensor: Stored) -> int:
    """Return the digest of a chunk. Raises RunStopped at a weight that is not finite."""
    if tensor.state == WEIGHT:
        numbers = content.view(tensor.dtype)
        if not np.isfinite([numbers.max(), numbers.min()]).all():  # either is nan where one is
            raise RunStopped(f"weights are not finite, first in {tensor.name}")
    return digest(content, first_byte)


def problem_of(path: Path, entry: FileEntry) -> str | None:
    """Return what is wrong with a file's size or its head, None where nothing is."""
    try:
        size = path.stat().st_size
        if size != entry.size_bytes:
            return f"{path} has {size} bytes, the manifest says {entry.size_bytes}"
        with path.open("rb", buffering=0) as file:
            head = file.read(entry.head_bytes)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if hashlib.sha256(head).hexdigest() != entry.sha256:
        part = "its header" if entry.head_bytes < entry.size_bytes else "it"
        return f"{path} is damaged or another file: {part} has another checksum than the manifest says"
    return None


def piece_bytes(piece: Piece, itemsize: int) -> int:
    """The size of a piece in its file."""
    return numel(piece.stripes) * itemsize


def read_into(descriptor: int, target: NDArray[np.uint8], offset: int) -> None:
    """Fill ``target`` with the bytes of a file from ``offset`` on. Raises OSError where it ends before."""
    view = target.data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError(f"the file ends at byte {offset}")
        view, offset = view[count:], offset + count
