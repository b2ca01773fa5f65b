"""A trained model in one process, from a checkpoint of any layout or from a Hugging Face folder."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fourfold.checkpoint.files import problem_of
from fourfold.checkpoint.folders import CHECKPOINTS, folder_of, steps_there
from fourfold.checkpoint.hugging_face import CONFIG, EMBEDDING, HEAD, Checkpoint, decoder, load_folder
from fourfold.checkpoint.manifest import MANIFEST, WEIGHT, Damaged, Manifest, read_manifest
from fourfold.checkpoint.reader import Reader, damaged_pieces
from fourfold.checkpoint.state import Held
from fourfold.checkpoint.stripes import Stripes
from fourfold.data import ByteTokenizer, Tokenizer, load_tokenizer
from fourfold.data.tokenizers import FileTokenizer
from fourfold.errors import UserError
from fourfold.run_folder import RUN_FILE
from fourfold.specs import ModelSpec


def about_files(spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the small files of a checkpoint, by name: the model's config and the tokenizer.

    The tokenizer is read now: its files may be gone later.
    """
    files = {CONFIG: json.dumps(spec.to_config(), indent=2).encode() + b"\n"}
    if isinstance(tokenizer, FileTokenizer):
        files["tokenizer.json"] = tokenizer.path.read_bytes()
        declared = tokenizer.path.with_name("tokenizer_config.json")
        files |= {declared.name: declared.read_bytes()} if declared.exists() else {}
    return files


def load_checkpoint(folder: Path, tell: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """Return the model of a run's newest good checkpoint, of one checkpoint, or of a Hugging Face folder.

    In float32 on the CPU. ``tell`` is given a line on each broken checkpoint that is passed over. Raises
    UserError with everything that is missing, damaged or does not fit together.
    """
    if (folder / MANIFEST).exists():
        try:
            return _load(folder)
        except Damaged as damaged:
            raise UserError(*damaged.messages[:10]) from None
    checkpoints = folder / CHECKPOINTS
    steps = steps_there(checkpoints)
    if not steps and not (folder / RUN_FILE).exists():
        return load_folder(folder)  # from elsewhere
    problems: list[str] = []
    for step in steps:
        try:
            return _load(folder_of(step, checkpoints))
        except Damaged as damaged:
            problems += damaged.messages
            if step != steps[-1]:
                tell(f"{damaged.messages[0]}: going back to the checkpoint before")
    if problems:
        raise UserError(f"no checkpoint in {checkpoints} can be loaded", *problems[:10])
    raise UserError(f"there is no checkpoint in {folder}: the run has not saved one")


def _load(folder: Path) -> Checkpoint:
    """Read the weights of a checkpoint. Raises Damaged."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        if problem := problem_of(folder / name, entry):
            raise Damaged(problem)
    spec = ModelSpec.from_config(folder)
    weights = _whole_weights(folder, manifest)
    problems = [
        f"{folder} has {name} of shape {found}, {CONFIG} says {wanted}"
        for name, wanted in spec.parameter_shapes().items()
        if (found := tuple(weights[name].shape) if name in weights else None) != wanted
    ]
    if problems:
        raise Damaged(*problems)
    named = "tokenizer.json" in manifest.files
    tokenizer = load_tokenizer(folder / "tokenizer.json") if named else ByteTokenizer()
    if spec.tie_word_embeddings:
        weights[HEAD] = weights[EMBEDDING]
    return Checkpoint(decoder(spec, weights), tokenizer, manifest.step)


def _whole_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    weights = {}
    with Reader(folder, manifest) as reader:
        for tensor in manifest.tensors.values():
            if tensor.state == WEIGHT:
                values = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
                reader.read(Held(tensor, (Stripes(0, values.numel()),), values.view(-1), owners=1))
                weights[tensor.parameter] = values
    problems = damaged_pieces(folder, manifest, reader.sums, dict.fromkeys(weights, 1), states=[WEIGHT])
    if problems:
        raise Damaged(*problems)
    return weights
