"""The folder of a model as Hugging Face writes it: where each weight lies, and reading it from there.

config.json                     the model
model.safetensors               the weights by name; or
model.safetensors.index.json    which of several files has which weight
tokenizer.json                  and what else belongs to the tokenizer

[Note: as transformers reads it] Where a folder has both, model.safetensors counts, not the index; files that
the index does not name are no part of the model. Unlike there a weight that is missing, too many or of
another shape is an error, never a random or a forgotten one.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fourfold.checkpoint.files import CHUNK_BYTES, DTYPES, OpenFiles
from fourfold.errors import UserError, choices
from fourfold.specs import ModelSpec

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LONGEST_HEADER_BYTES = 10**8
"""As the safetensors library has it; what claims more is damaged."""
MOST_PROBLEMS = 10


@dataclass(frozen=True)
class Located:
    """A weight in a file: row-major, from byte ``offset`` on."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class HuggingFaceWeights:
    """The weights of a model in a Hugging Face folder, checked and open for reading: a context manager.

    Args:
        folder: with the files.
        spec: what its config.json says, or what the weights are wanted for.
        tell: is given a line on files that lie there and are not read.

    Raises UserError with everything that is missing, damaged or does not fit together.

    Attributes:
        located: every parameter of the model, a tied head not again.
        bytes_read: of weights, so far.
        on_read: is given the number of bytes of each part of a weight that was read.
    """

    def __init__(self, folder: Path, spec: ModelSpec, tell: Callable[[str], None] = lambda _: None):
        self.folder = folder
        found = _found(folder, tell)
        self._head = found.pop(HEAD, None) if spec.tie_word_embeddings else None
        problems = _misfits(found, spec, folder)
        if problems:
            raise UserError(*problems[:MOST_PROBLEMS])
        self.located = found
        self.bytes_read = 0
        self.on_read: Callable[[int], None] = lambda _: None
        self._files = OpenFiles()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @torch.no_grad()
    def read_(self, name: str, first: int, target: Tensor) -> None:
        """Fill ``target``, flat, with a run of the flattened weight, from element ``first`` on.

        Raises UserError where the file cannot be read, or has a number there that is not finite.
        """
        weight = self.located[name]
        itemsize = weight.dtype.itemsize
        chunk = CHUNK_BYTES // itemsize
        for start in range(0, len(target), chunk):
            part = target[start : start + chunk]
            part.copy_(self._run(weight, first + start, len(part)))
            if not part.isfinite().all():
                raise UserError(f"{weight.file}: {name} has values that are not finite in {target.dtype}")
            self.on_read(len(part) * itemsize)

    def size_bytes(self, name: str) -> int:
        """How long a weight is in its file."""
        weight = self.located[name]
        return torch.Size(weight.shape).numel() * weight.dtype.itemsize

    def check_head(self) -> None:
        """Raise UserError where a tied model's file has a head that is not the embedding."""
        if self._head is None:
            return
        embedding = self.located[EMBEDDING]
        count = torch.Size(embedding.shape).numel()
        is_same, chunk = self._head.shape == embedding.shape, CHUNK_BYTES // 8
        for start in range(0, count if is_same else 0, chunk):
            parts = (
                self._run(weight, start, min(chunk, count - start)).double()
                for weight in (self._head, embedding)
            )
            is_same = is_same and torch.equal(*parts)
        if not is_same:
            raise UserError(
                f"{self._head.file}: config.json says tie_word_embeddings=true, but {HEAD} differs from "
                f"{EMBEDDING}: set it to false to keep the head, or remove {HEAD} from the file"
            )

    def _run(self, weight: Located, first: int, count: int) -> Tensor:
        """Read a run of elements in the dtype of the file."""
        content = np.empty(count * weight.dtype.itemsize, np.uint8)
        try:
            start = weight.offset + first * weight.dtype.itemsize
            self._files.read_into(str(weight.file), content, start)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{weight.file} cannot be read: {reason}") from None
        self.bytes_read += len(content)
        return torch.from_numpy(content).view(weight.dtype)


def _found(folder: Path, tell: Callable[[str], None]) -> dict[str, Located]:
    """Return where everything lies that the folder's safetensors files hold for the model."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give one as Hugging Face writes it, with {CONFIG}")
    there = sorted(path for path in folder.glob("*.safetensors"))
    index_of: Mapping[str, Path] | None = None
    if (folder / WEIGHTS).exists():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).exists():
        index_of = _index(folder / INDEX)
        files = sorted(set(index_of.values()))
    else:
        raise UserError(_nothing_there(folder, there))
    for path in there:
        if path not in files:
            why = f"{WEIGHTS} is there" if index_of is None else f"{INDEX} does not name it"
            tell(f"{path} is not read, for {why}")
    found: dict[str, Located] = {}
    problems: list[str] = []
    for path in files:
        try:
            located = read_header(path)
        except UserError as error:
            problems += error.messages
            continue
        if index_of is not None:
            strange = [name for name in located if index_of.get(name) != path]
            problems += listed(path, f"is not where {INDEX} says", strange)
        found |= located
    if index_of is not None and not problems:
        problems += listed(folder / INDEX, "is in none of the files", sorted(index_of.keys() - found.keys()))
    if problems:
        raise UserError(*problems[:MOST_PROBLEMS])
    # Files of old versions of transformers hold the rotary angles, which follow from config.json.
    return {name: place for name, place in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _nothing_there(folder: Path, there: list[Path]) -> str:
    message = f"there is no model in {folder}: {WEIGHTS} is missing, and {INDEX} too"
    if there:
        return f"{message}; {there[0].name} alone does not say whether it is all of it"
    if any(folder.glob("*.bin")):
        return (
            f"{message}; pickled weights (.bin) are not read: load them with transformers and save them with "
            "save_pretrained"
        )
    return message


def _index(path: Path) -> dict[str, Path]:
    """Return the file of each weight."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) and file for file in names.values()):
        raise UserError(f"{path} has no weight_map that says which file has which weight")
    return {name: path.parent / file for name, file in names.items()}


def read_header(path: Path) -> dict[str, Located]:
    """Return where the tensors of a safetensors file lie. Raises UserError where the file is not whole."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER_BYTES):
                raise UserError(f"{path} is damaged or incomplete: its header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            return {name: _located(path, name, values, 8 + length, size) for name, values in header.items()}
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged or no safetensors file: its header cannot be read") from None


def _located(path: Path, name: str, values: Mapping[str, Any], data: int, size: int) -> Located:
    shape, (start, stop) = tuple(map(int, values["shape"])), values["data_offsets"]
    dtype = DTYPES.get(values["dtype"])
    if dtype is None:
        raise UserError(
            f"{path}: {name} is stored as {values['dtype']}, which is not supported: use {choices(DTYPES)}"
        )
    if stop - start != torch.Size(shape).numel() * dtype.itemsize or start < 0 or data + stop > size:
        raise UserError(
            f"{path} is damaged or incomplete: {name} should end at byte {data + stop} of its {size}"
        )
    return Located(path, data + start, dtype, shape)


def _misfits(found: Mapping[str, Located], spec: ModelSpec, folder: Path) -> list[str]:
    """Return what keeps the weights from being those of the model."""
    shapes = spec.parameter_shapes()
    problems = listed(folder, "is missing", [name for name in shapes if name not in found])
    problems += listed(
        folder, "is no parameter of this model", [name for name in found if name not in shapes]
    )
    return problems + [
        f"{found[name].file}: {name} has shape {found[name].shape}, the model needs {shape}"
        for name, shape in shapes.items()
        if name in found and found[name].shape != shape
    ]


def listed(path: Path, what: str, names: list[str]) -> list[str]:
    """Return one message for several names that have the same problem."""
    if not names:
        return []
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return [f"{path}: {names[0]} {what}{others}"]
