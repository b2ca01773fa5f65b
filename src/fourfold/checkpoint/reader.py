"""Reading parts of tensors from a checkpoint, with every byte that is read counted into a digest."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from fourfold.checkpoint.digest import MODULUS, digest
from fourfold.checkpoint.files import CHUNK_BYTES, NAMES, OpenFiles, content_of, piece_bytes, problem_of
from fourfold.checkpoint.manifest import Damaged, Manifest, Piece, Stored
from fourfold.checkpoint.state import Held
from fourfold.checkpoint.stripes import Runs, Stripes, numel, overlap
from fourfold.run_folder import reading


def problems_there(folder: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> list[str]:
    """Return what is wrong with a checkpoint before any tensor is read: sizes, heads, counts.

    All files are there, as long as the manifest says and with the heads that they had; all elements of all
    tensors are in a piece, once; all pieces are within their files. Of several who ask each looks at a share.
    Raises Unreadable where a file is not given to us.
    """
    files = sorted(manifest.files.items())[share::shares]
    problems = [problem for name, entry in files if (problem := problem_of(folder / name, entry))]
    pieces: dict[str, list[Piece]] = {}
    for piece in manifest.pieces:
        pieces.setdefault(piece.tensor, []).append(piece)
    for name, tensor in sorted(manifest.tensors.items())[share::shares]:
        own = pieces.get(name, [])
        if getattr(torch, tensor.dtype, None) not in NAMES:
            problems.append(f"{folder}: the manifest has {name} in {tensor.dtype}, which no checkpoint is in")
            continue
        if not _each_once([stripe for piece in own for stripe in piece.stripes], math.prod(tensor.shape)):
            problems.append(f"{folder}: the manifest lacks pieces of {name}, or has some twice")
        for piece in own:
            entry, size = manifest.files.get(piece.file), piece_bytes(piece, _itemsize(tensor))
            if entry is None:
                problems.append(
                    f"{folder}: the manifest does not list {piece.file}, where a piece of {name} is"
                )
            elif not entry.head_bytes <= piece.offset <= entry.size_bytes - size:
                problems.append(f"{folder}: a piece of {name} would not be within {piece.file}")
    return problems


def _each_once(pieces: Sequence[Stripes], count: int) -> bool:
    """Whether stripes are all ``count`` elements of a tensor, each once."""
    within = all(
        min(piece.start, piece.stride) >= 0
        and min(piece.length, piece.count) > 0
        and piece.start + piece.stride * (piece.count - 1) + piece.length <= count
        for piece in pieces
    )
    if not within or numel(pieces) != count:
        return False  # before runs are made: of what is written there they could be more than memory holds
    runs = Runs.of(pieces)
    return [0, *runs.stop.tolist()] == [*runs.start.tolist(), count]


def unlike(folder: Path, manifest: Manifest, parts: Iterable[Held]) -> list[str]:
    """Return a message for each part that a rank owns of a tensor that is not so in the checkpoint."""
    problems = []
    for wanted in dict.fromkeys(part.tensor for part in parts):
        stored = manifest.tensors.get(wanted.name)
        if stored is None:
            problems.append(f"{folder} has no {wanted.name}")
        elif stored != wanted:
            problems.append(
                f"{folder} has {wanted.name} of shape {stored.shape} in {stored.dtype}, the run needs "
                f"{wanted.shape} in {wanted.dtype}"
            )
    return problems


def _itemsize(tensor: Stored) -> int:
    return int(getattr(torch, tensor.dtype).itemsize)


_Chunk = tuple[int, NDArray[np.uint8], int]
"""Bytes that were read: the number of their piece, themselves, and the place of the first of them in it."""


class Reader:
    """The files of one checkpoint, open for reading: a context manager.

    Args:
        folder: of the checkpoint, in which there are no `problems_there`.
        manifest: of it.
        on_read: is given the number of bytes of each part of a tensor that was read.

    Attributes:
        sums: of each piece, by its number in the manifest, the digest of what was read of it; whole once the
            files are closed.
    """

    def __init__(self, folder: Path, manifest: Manifest, on_read: Callable[[int], None] = lambda _: None):
        self._folder = folder
        self._manifest = manifest
        self._pieces: dict[str, list[int]] = {}
        for number, piece in enumerate(manifest.pieces):
            self._pieces.setdefault(piece.tensor, []).append(number)
        self._paths = {name: str(folder / name) for name in manifest.files}
        self._files = OpenFiles()
        self._on_read = on_read
        self._unchecked: list[_Chunk] = []
        self._unchecked_bytes = 0
        self._checking = ThreadPoolExecutor(1)
        self._checked: Future[None] | None = None
        self.sums = [0] * len(manifest.pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self._checking.shutdown()
        self._add(self._unchecked)
        if self._checked is not None:
            self._checked.result()

    def read(self, part: Held) -> None:
        """Fill a part of a tensor.

        Raises Damaged where the file is not whole, Unreadable where it is not given to us.
        """
        on_host = part.values.device.type == "cpu"
        values = part.values.detach() if on_host else torch.empty_like(part.values, device="cpu")
        content = content_of(values)  # the same memory
        found = 0
        for number in self._pieces.get(part.tensor.name, ()):
            found += self._copy(number, part.stripes, content, values.itemsize)
        assert found == len(content), part.tensor.name
        if not on_host:
            part.values.detach().copy_(values)
        self._on_read(found)

    def _copy(
        self, number: int, wanted: tuple[Stripes, ...], content: NDArray[np.uint8], itemsize: int
    ) -> int:
        """Read what is wanted of a piece, and return how many bytes that were."""
        piece = self._manifest.pieces[number]
        path, read = self._paths[piece.file], 0
        for to, source, count in overlap(wanted, piece.stripes):
            target, first = content[to * itemsize : (to + count) * itemsize], source * itemsize
            try:
                with reading(path):
                    self._files.read_into(path, target, piece.offset + first)
            except (OSError, EOFError) as error:
                raise Damaged(f"{path} is not whole: {error}") from None
            self._unchecked.append((number, target, first))
            read += len(target)
        self._unchecked_bytes += read
        if self._unchecked_bytes >= CHUNK_BYTES:
            self._check()
        return read

    def _check(self) -> None:
        """Let a thread take the digests of what was read, while more is; first wait for those before."""
        if self._checked is not None:
            self._checked.result()
        self._checked = self._checking.submit(self._add, self._unchecked)
        self._unchecked, self._unchecked_bytes = [], 0

    def _add(self, chunks: Sequence[_Chunk]) -> None:
        for number, content, first_byte in chunks:
            self.sums[number] = (self.sums[number] + digest(content, first_byte)) % MODULUS


def damaged_pieces(
    folder: Path,
    manifest: Manifest,
    sums: Sequence[int],
    times: Mapping[str, int],
    states: Iterable[str] = (),
) -> list[str]:
    """Return a message for each piece that is not as it was written.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        sums: the digests of what all ranks read of each piece, added up.
        times: how often each parameter was read.
        states: those that were read; all where none is given.
    """
    only, problems = set(states), []
    for piece, total in zip(manifest.pieces, sums, strict=True):
        tensor = manifest.tensors[piece.tensor]
        if only and tensor.state not in only:
            continue
        if total % MODULUS != piece.digest * times[tensor.parameter] % MODULUS:
            problems.append(
                f"{folder / piece.file} is damaged: its part of {piece.tensor} has another checksum than the "
                "manifest says"
            )
    return problems
