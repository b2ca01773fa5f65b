"""A model in a folder as Hugging Face writes it, in and out of one process.

model.safetensors   the weights by their Hugging Face names, a tied head stored once
config.json         the model
fourfold.json       the step, and which tokenizer
tokenizer.json      where the tokenizer is not that of bytes
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import fourfold
from fourfold.data import ByteTokenizer, Tokenizer, load_tokenizer
from fourfold.errors import RunStopped, UserError
from fourfold.models import Decoder
from fourfold.run_folder import sync, writing
from fourfold.specs import ModelSpec

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A trained model in one process, its tokenizer, and how many steps it was trained."""

    model: Decoder
    tokenizer: Tokenizer
    step: int


def save_checkpoint(
    folder: Path, *, weights: Mapping[str, Tensor], spec: ModelSpec, step: int, tokenizer: Mapping[str, bytes]
) -> None:
    """Write the model, whole or not at all; what lies in ``folder`` stays until the new one is complete.

    ``tokenizer`` has the tokenizer's files by name. Raises RunStopped where it cannot be written.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    about = {"fourfold": fourfold.__version__, "step": step, "tokenizer": "file" if tokenizer else "bytes"}
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    if spec.tie_word_embeddings:
        stored.pop(HEAD, None)
    try:
        with writing(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file(stored, partial / WEIGHTS, metadata={"format": "pt"})
            (partial / CONFIG).write_text(json.dumps(spec.to_config(), indent=2) + "\n")
            (partial / "fourfold.json").write_text(json.dumps(about, indent=2) + "\n")
            for name, content in tokenizer.items():
                (partial / name).write_bytes(content)
            _put_in_place(partial, folder)
    except SafetensorError as error:  # how safetensors tells of a full disk
        raise RunStopped(f"cannot write {folder / WEIGHTS}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Give a complete folder its name, with all of it on disk first."""
    for path in [*partial.iterdir(), partial]:
        sync(path)
    previous = folder.with_name(f"{folder.name}.previous")
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    partial.rename(folder)
    shutil.rmtree(previous, ignore_errors=True)


def load_folder(folder: Path) -> Checkpoint:
    """Return what a folder holds, in float32 on the CPU.

    Raises UserError with everything that is missing, damaged or does not fit together.
    """
    if not (folder / WEIGHTS).exists():
        raise UserError(f"there is no checkpoint in {folder}: {WEIGHTS} is missing")
    spec = ModelSpec.from_config(folder)
    about = _about(folder)
    named = about.get("tokenizer", "file")
    tokenizer = ByteTokenizer() if named == "bytes" else load_tokenizer(folder / "tokenizer.json")
    weights = read_weights(folder / WEIGHTS, spec)
    return Checkpoint(decoder(spec, weights), tokenizer, int(about.get("step", 0)))


def decoder(spec: ModelSpec, weights: Mapping[str, Tensor]) -> Decoder:
    """Return the model with these weights, a tied head among them, in float32."""
    with torch.device("meta"):
        model = Decoder(spec)
    model.load_state_dict(weights, assign=True)
    if spec.tie_word_embeddings:  # assigning gave the head a parameter of its own
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.to(torch.float32)


def _about(folder: Path) -> dict[str, Any]:
    """Return what fourfold wrote beside the weights; a folder from elsewhere has nothing."""
    path = folder / "fourfold.json"
    if not path.exists():
        return {}
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(about, dict):
        raise UserError(f"{path} holds no JSON object: the checkpoint is damaged")
    return about


def read_weights(path: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Return the weights of the model in a safetensors file by name, a tied head under both of its names.

    A tied model's file may leave the head out, or repeat the embedding there; a head of its own
    contradicts config.json, and so does its absence where the model is not tied. Raises UserError.
    """
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}: it is damaged or incomplete") from error
    # Files of old versions of transformers hold the rotary angles, which follow from config.json.
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    shapes = spec.parameter_shapes()
    problems = []
    if spec.tie_word_embeddings and EMBEDDING in weights:
        head = weights.pop(HEAD, None)
        if head is not None and not torch.equal(head, weights[EMBEDDING]):
            problems.append(
                f"{path}: config.json says tie_word_embeddings=true, but {HEAD} differs from {EMBEDDING}: "
                f"set it to false to keep the head, or remove {HEAD} from the file"
            )
    problems += _listed(path, "is missing", [name for name in shapes if name not in weights])
    problems += _listed(
        path, "is no parameter of this model", [name for name in weights if name not in shapes]
    )
    for name, shape in shapes.items():
        if name in weights and tuple(weights[name].shape) != shape:
            problems.append(
                f"{path}: {name} has shape {tuple(weights[name].shape)}, config.json says {shape}"
            )
    if problems:
        raise UserError(*problems[:10])
    if spec.tie_word_embeddings:
        weights[HEAD] = weights[EMBEDDING]
    return weights


def _listed(path: Path, what: str, names: list[str]) -> list[str]:
    """Return one message for several names that have the same problem."""
    if not names:
        return []
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return [f"{path}: {names[0]} {what}{others}"]
