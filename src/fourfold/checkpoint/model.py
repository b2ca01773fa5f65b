"""A trained model in one process, from a checkpoint of any layout or from a Hugging Face folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fourfold.checkpoint.folders import CHECKPOINTS, newest_good, steps_there
from fourfold.checkpoint.hugging_face import CONFIG, HuggingFaceWeights
from fourfold.checkpoint.manifest import MANIFEST, WEIGHT, Damaged, Manifest, read_manifest
from fourfold.checkpoint.progress import Progress, counting
from fourfold.checkpoint.reader import Reader, damaged_pieces, problems_there
from fourfold.checkpoint.state import Held
from fourfold.checkpoint.stripes import Stripes
from fourfold.data import ByteTokenizer, Tokenizer, load_tokenizer
from fourfold.data.tokenizers import TOKENIZER, FileTokenizer
from fourfold.errors import UserError
from fourfold.models import Decoder
from fourfold.run_folder import RUN_FILE
from fourfold.specs import ModelSpec

Result = TypeVar("Result")


@dataclass(frozen=True)
class Checkpoint:
    """A model in one process, in float32 on the CPU, its tokenizer, and how many steps it was trained."""

    model: Decoder
    tokenizer: Tokenizer
    step: int


def about_files(spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the small files of a checkpoint, by name: the model's config and the tokenizer.

    The tokenizer is read now: its files may be gone later. That of bytes needs none.
    """
    files = {CONFIG: json.dumps(spec.to_config(), indent=2).encode() + b"\n"}
    return files | tokenizer.files() if isinstance(tokenizer, FileTokenizer) else files


def load_checkpoint(
    folder: Path, tell: Callable[[str], None] = lambda _: None, progress: Progress = lambda *_: None
) -> Checkpoint:
    """Return the model of a run's newest good checkpoint, of one checkpoint, or of a Hugging Face folder.

    ``tell`` is given a line on each broken checkpoint that is passed over, ``progress`` hears how far the
    reading is. Raises UserError with everything that is missing, damaged or does not fit together.
    """
    if any((folder / name).exists() for name in (MANIFEST, RUN_FILE)) or steps_there(folder / CHECKPOINTS):
        return of_newest_good(folder, partial(_load, progress=progress), tell)
    if not (folder / CONFIG).exists():
        raise UserError(
            f"{folder} is neither the folder of a run, nor a checkpoint, nor a Hugging Face folder with a "
            f"{CONFIG}"
        )
    return _load_hugging_face(folder, tell, progress)


def of_newest_good(
    folder: Path, use: Callable[[Path], Result], tell: Callable[[str], None] = lambda _: None
) -> Result:
    """Return what ``use`` makes of a run's newest checkpoint for which it does not raise Damaged.

    Args:
        folder: of a run, or of one checkpoint.
        use: is given the folder of a checkpoint.
        tell: is given a line on each broken checkpoint that is passed over.

    Raises UserError where there is none.
    """
    if (folder / MANIFEST).exists():
        try:
            return use(folder)
        except Damaged as damaged:
            raise UserError(*damaged.messages[:10]) from None
    checkpoints = folder / CHECKPOINTS
    if found := newest_good(checkpoints, steps_there(checkpoints), use, tell):
        return found[1]
    if (folder / RUN_FILE).exists():
        raise UserError(f"there is no checkpoint in {folder}: the run has not saved one")
    raise UserError(f"{folder} is neither the folder of a run nor a checkpoint")


def spec_of(folder: Path, manifest: Manifest) -> ModelSpec:
    """Return the model of a checkpoint, whose small files and names and shapes of weights are checked.

    Raises Damaged.
    """
    if problems := problems_there(folder, manifest):
        raise Damaged(*problems)
    spec = ModelSpec.from_config(folder)
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors.values() if tensor.state == WEIGHT}
    wanted = spec.parameter_shapes()
    problems = [
        f"{folder} has {name} of shape {shapes.get(name)}, {CONFIG} says {wanted.get(name)}"
        for name in wanted | shapes
        if shapes.get(name) != wanted.get(name)
    ]
    if problems:
        raise Damaged(*problems)
    return spec


def tokenizer_of(folder: Path, manifest: Manifest) -> Tokenizer:
    """Return the tokenizer of a checkpoint."""
    return load_tokenizer(folder / TOKENIZER) if TOKENIZER in manifest.files else ByteTokenizer()


def _load(folder: Path, progress: Progress) -> Checkpoint:
    """Read the weights of a checkpoint. Raises Damaged."""
    manifest = read_manifest(folder)
    spec = spec_of(folder, manifest)
    weights = {
        name: torch.empty(manifest.tensors[name].shape, dtype=getattr(torch, manifest.tensors[name].dtype))
        for name in spec.parameter_shapes()
    }
    total = sum(values.nbytes for values in weights.values())
    with Reader(folder, manifest, counting(total, progress)) as reader:
        for name, values in weights.items():
            tensor = manifest.tensors[name]
            reader.read(Held(tensor, (Stripes(0, values.numel()),), values.view(-1), owners=1))
    problems = damaged_pieces(folder, manifest, reader.sums, dict.fromkeys(weights, 1), states=[WEIGHT])
    if problems:
        raise Damaged(*problems)
    return Checkpoint(_decoder(spec, weights), tokenizer_of(folder, manifest), manifest.step)


def _load_hugging_face(folder: Path, tell: Callable[[str], None], progress: Progress) -> Checkpoint:
    spec = ModelSpec.from_config(folder)
    weights = {}
    with HuggingFaceWeights(folder, spec, tell) as files:
        files.check_head()
        files.on_read = counting(sum(map(files.size_bytes, spec.parameter_shapes())), progress)
        for name, shape in spec.parameter_shapes().items():
            weights[name] = torch.empty(shape)
            files.read_(name, 0, weights[name].view(-1))
    return Checkpoint(_decoder(spec, weights), load_tokenizer(folder / TOKENIZER), 0)


def _decoder(spec: ModelSpec, weights: Mapping[str, Tensor]) -> Decoder:
    """Return the model with these weights, in float32."""
    with torch.device("meta"):
        model = Decoder(spec)
    model.load_state_dict(weights, strict=False, assign=True)
    if spec.tie_word_embeddings:  # assigning gave the embedding a parameter of its own
        model.lm_head.weight = model.model.embed_tokens.weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.to(torch.float32)
