"""The manifest: what a checkpoint holds and where, as JSON."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.checkpoint.stripes import Stripes

FORMAT = "fourfold checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
WEIGHT = "weight"
"""The state of a parameter that is its value; the others have torch's names: exp_avg, exp_avg_sq, ..."""


class Damaged(Exception):
    """A checkpoint, or a part of it, that cannot be used; says what is wrong with which file."""

    def __init__(self, *messages: str):
        super().__init__("\n".join(messages))
        self.messages = messages


@dataclass(frozen=True)
class Stored:
    """A tensor as a whole: a parameter's weight or a moment of it."""

    parameter: str
    state: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        """What it is called in the files."""
        return self.parameter if self.state == WEIGHT else f"{self.parameter}.{self.state}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Stored":
        """Return a tensor from JSON values."""
        return cls(**{**values, "shape": tuple(values["shape"])})


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that lies in one file.

    Attributes:
        tensor: its name.
        file: where it is.
        offset: of its first byte in the file.
        stripes: the elements of the whole tensor that it holds, in order.
        digest: see `fourfold.checkpoint.digest`.
    """

    tensor: str
    file: str
    offset: int
    stripes: tuple[Stripes, ...]
    digest: int


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint.

    Attributes:
        size_bytes: of all of it.
        head_bytes: how many bytes from its start ``sha256`` is of: a header, or a small file whole.
        sha256: in hexadecimal.
    """

    size_bytes: int
    head_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: finished training steps.
        updates: updates of the optimizer.
        run: what a run that goes on from here must have alike, by key of the run file.
        about: what is good to know: the layout that saved, versions.
        tensors: by name.
        pieces: of all tensors: each element of each is in one of them.
        files: by name.
    """

    step: int
    updates: int
    run: Mapping[str, Any]
    about: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    pieces: Sequence[Piece]
    files: Mapping[str, FileEntry]

    def text(self) -> str:
        """Return it as JSON, with a checksum of itself."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "updates": self.updates,
            "run": dict(self.run),
            "about": dict(self.about),
            "tensors": {name: vars(tensor) for name, tensor in self.tensors.items()},
            "pieces": [piece_values(piece) for piece in self.pieces],
            "files": {name: vars(entry) for name, entry in self.files.items()},
        }
        return json.dumps({**content, "sha256": _sha256(content)}, separators=(",", ":"))


def piece_values(piece: Piece) -> dict[str, Any]:
    """Return a piece as JSON values."""
    stripes = [[s.start, s.length, s.count, s.stride] for s in piece.stripes]
    return {**vars(piece), "stripes": stripes, "digest": f"{piece.digest:016x}"}


def piece_of(values: Mapping[str, Any]) -> Piece:
    """Return a piece from JSON values."""
    stripes = tuple(Stripes(*numbers) for numbers in values["stripes"])
    return Piece(values["tensor"], values["file"], values["offset"], stripes, int(values["digest"], 16))


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises Damaged where it is missing or not as it was written."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Damaged(f"{path} is not the manifest of a checkpoint")
    if content.get("version") != VERSION:
        raise Damaged(
            f"{path} has version {content.get('version')} of the format, this fourfold reads {VERSION}"
        )
    if _sha256({key: value for key, value in content.items() if key != "sha256"}) != content.get("sha256"):
        raise Damaged(f"{path} is damaged or was edited: its checksum differs")
    return Manifest(
        content["step"],
        content["updates"],
        content["run"],
        content["about"],
        {name: Stored.of(values) for name, values in content["tensors"].items()},
        [piece_of(values) for values in content["pieces"]],
        {name: FileEntry(**values) for name, values in content["files"].items()},
    )
