"""Reading parts of tensors from a checkpoint, with every byte that is read counted into a digest."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
import torch

from fourfold.checkpoint.digest import MODULUS, digest
from fourfold.checkpoint.files import problem_of, read_into
from fourfold.checkpoint.manifest import Damaged, Manifest, Stored
from fourfold.checkpoint.state import Held
from fourfold.checkpoint.stripes import Runs, overlap


class Reader:
    """The files of one checkpoint, open for reading: a context manager.

    Args:
        folder: of the checkpoint.
        manifest: of it.

    Attributes:
        sums: of each piece, by its number in the manifest, the digest of what was read of it.
        bytes_read: of tensors.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self._folder = folder
        self._manifest = manifest
        self._pieces: dict[str, list[int]] = {}
        for number, piece in enumerate(manifest.pieces):
            self._pieces.setdefault(piece.tensor, []).append(number)
        self._runs: dict[int, Runs] = {}
        self._open: dict[str, int] = {}
        self._files = ExitStack()
        self.sums = [0] * len(manifest.pieces)
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, part: Held) -> None:
        """Fill a part of a tensor. Raises Damaged with what keeps it from being read."""
        stored = self._manifest.tensors.get(part.tensor.name)
        if stored != part.tensor:
            raise Damaged(_differs(self._folder, part.tensor, stored))
        content = np.empty(part.values.numel() * part.values.itemsize, np.uint8)
        wanted, found = Runs.of(part.stripes), 0
        for number in self._pieces.get(part.tensor.name, ()):
            found += self._copy(number, wanted, content, part.values.itemsize)
        if found != len(content):
            raise Damaged(
                f"{self._folder}: the manifest lacks pieces of {part.tensor.name}, or has some twice: "
                f"{found} of {len(content)} bytes are there"
            )
        values = torch.from_numpy(content).view(part.values.dtype)
        with torch.no_grad():
            part.values.copy_(values)

    def _copy(self, number: int, wanted: Runs, content: np.ndarray, itemsize: int) -> int:
        """Read what is wanted of a piece, and return how many bytes that were."""
        piece = self._manifest.pieces[number]
        if number not in self._runs:
            self._runs[number] = Runs.of(piece.stripes)
        there = self._runs[number]
        copies = [numbers * itemsize for numbers in overlap(wanted, there)]
        read = 0
        for to, source, count in zip(*(numbers.tolist() for numbers in copies), strict=True):
            target = content[to : to + count]
            path = self._folder / piece.file
            try:
                read_into(self._descriptor(piece.file), target, piece.offset + source)
            except OSError as error:
                raise Damaged(f"{path} cannot be read: {error.strerror or error}") from None
            self.sums[number] = (self.sums[number] + digest(target, source)) % MODULUS
            read += count
        self.bytes_read += read
        return read

    def _descriptor(self, name: str) -> int:
        """Open a file at its first use, when its size and its header are checked."""
        if name not in self._open:
            path, entry = self._folder / name, self._manifest.files.get(name)
            if entry is None:
                raise Damaged(f"{self._folder}: the manifest does not list {name}, where pieces should be")
            if problem := problem_of(path, entry):
                raise Damaged(problem)
            self._open[name] = os.open(path, os.O_RDONLY)
            self._files.callback(os.close, self._open[name])
        return self._open[name]


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


def _differs(folder: Path, wanted: Stored, stored: Stored | None) -> str:
    if stored is None:
        return f"{folder} has no {wanted.name}"
    return (
        f"{folder} has {wanted.name} of shape {stored.shape} in {stored.dtype}, the run needs {wanted.shape} "
        f"in {wanted.dtype}"
    )
