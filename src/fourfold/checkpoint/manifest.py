"""The manifest: what a checkpoint holds and where, as JSON."""

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fourfold.checkpoint.stripes import Stripes
from fourfold.run_folder import reading

Kind = TypeVar("Kind")
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
        shape = tuple(_typed(size, int) for size in values["shape"])
        parameter, state, dtype = (_typed(values[key], str) for key in ("parameter", "state", "dtype"))
        return cls(parameter, state, shape, dtype)


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
        text = _canonical(content)
        return f'{text[:-1]}, "sha256": "{_sha256(text)}"}}'


def piece_values(piece: Piece) -> dict[str, Any]:
    """Return a piece as JSON values."""
    stripes = [[s.start, s.length, s.count, s.stride] for s in piece.stripes]
    return {**vars(piece), "stripes": stripes, "digest": f"{piece.digest:016x}"}


def piece_of(values: Mapping[str, Any]) -> Piece:
    """Return a piece from JSON values."""
    stripes = tuple(Stripes(*(_typed(number, int) for number in row)) for row in values["stripes"])
    tensor, file, digest = (_typed(values[key], str) for key in ("tensor", "file", "digest"))
    return Piece(tensor, file, _typed(values["offset"], int), stripes, int(digest, 16))


def _entry_of(values: Mapping[str, Any]) -> FileEntry:
    size_bytes, head_bytes = (_typed(values[key], int) for key in ("size_bytes", "head_bytes"))
    if not 0 <= head_bytes <= size_bytes:
        raise ValueError(f"a file has {size_bytes} bytes, and {head_bytes} of them in its head")
    return FileEntry(size_bytes, head_bytes, _typed(values["sha256"], str))


def _manifest_of(content: Mapping[str, Any]) -> Manifest:
    """Return a manifest from JSON values. Raises what comes of values that are not of one."""
    manifest = Manifest(
        _typed(content["step"], int),
        _typed(content["updates"], int),
        _typed(content["run"], dict),
        _typed(content["about"], dict),
        {name: Stored.of(values) for name, values in content["tensors"].items()},
        [piece_of(values) for values in content["pieces"]],
        {name: _entry_of(values) for name, values in content["files"].items()},
    )
    for name in manifest.files:
        if Path(name).name != name or "\0" in name:
            raise ValueError(f"{name!r} is no name of a file in the folder")
    for name, tensor in manifest.tensors.items():
        if tensor.name != name:
            raise ValueError(f"{name} is called {tensor.name}")
    if strange := {piece.tensor for piece in manifest.pieces} - manifest.tensors.keys():
        raise ValueError(f"it has pieces of {min(strange)}, but no such tensor")
    return manifest


def _typed(value: Any, kind: type[Kind]) -> Kind:
    """Return the value. Raises TypeError where it is of another type."""
    if type(value) is not kind:  # a bool is no int here
        raise TypeError(f"{reprlib.repr(value)} is no {kind.__name__}")
    return value


def _canonical(content: Mapping[str, Any]) -> str:
    """Return the text that the checksum is of."""
    return json.dumps(content, sort_keys=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises Damaged where it is missing or not as it was written, Unreadable where it is not given to us.
    """
    path = folder / MANIFEST
    try:
        with reading(path):
            return _read(path)
    except OSError:
        raise Damaged(f"{path} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # Its checksum may be right all the same: that of a text which is no manifest.
        problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise Damaged(f"{path} cannot be read: {problem}") from None


def _read(path: Path) -> Manifest:
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Damaged(f"{path} is not the manifest of a checkpoint")
    if content.get("version") != VERSION:
        raise Damaged(
            f"{path} has version {content.get('version')} of the format, this fourfold reads {VERSION}"
        )
    rest = {key: value for key, value in content.items() if key != "sha256"}
    if _sha256(_canonical(rest)) != content.get("sha256"):
        raise Damaged(f"{path} is damaged or was edited: its checksum differs")
    return _manifest_of(content)
