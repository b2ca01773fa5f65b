"""The first weights of a run, from a Hugging Face folder straight into the pieces of whatever layout."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from fourfold.checkpoint.files import CHUNK_BYTES
from fourfold.checkpoint.hugging_face import MOST_PROBLEMS, HuggingFaceWeights
from fourfold.checkpoint.progress import Progress, counting
from fourfold.checkpoint.ranks import messages_of_all
from fourfold.errors import UserError
from fourfold.parallel_model import ParallelModel
from fourfold.specs import ModelSpec


def read_hugging_face_(parallel: ParallelModel, folder: Path, progress: Progress = lambda *_: None) -> int:
    """Set the master weights that this rank owns, and return how many bytes it read. All ranks call it.

    Each reads its own slices alone; ``progress`` hears how far this one is. Raises UserError on all ranks
    with what is wrong on any of them; the weights are of no use then.
    """
    problems: list[str] = []
    read = 0
    try:
        with HuggingFaceWeights(folder, parallel.model.spec) as weights:
            parts = list(parallel.weights.masters())
            sizes = [len(part.target) * weights.located[part.name].dtype.itemsize for part in parts]
            weights.on_read = counting(sum(sizes), progress)
            for part in parts:
                weights.read_(part.name, part.first, part.target)
            read = weights.bytes_read
            if parallel.mesh.rank == 0:
                weights.check_head()
    except UserError as error:
        problems = list(error.messages)
    problems = messages_of_all(problems, parallel.mesh)
    if problems:
        raise UserError(*problems[:MOST_PROBLEMS])
    parallel.publish_()
    return read


def read_all(
    folder: Path,
    spec: ModelSpec,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> int:
    """Read every weight of a folder once, in one process, keep none, and return how many bytes they are.

    Raises UserError with what is missing, damaged, not finite or does not fit. Memory does not grow with the
    model. ``tell`` is given a line on each file that is not read, ``progress`` hears how far it is.
    """
    with HuggingFaceWeights(folder, spec, tell) as weights:
        weights.check_head()
        total = sum(map(weights.size_bytes, weights.located))
        weights.on_read = counting(total, progress)
        target = torch.empty(CHUNK_BYTES // 8)
        for name, place in weights.located.items():
            count = torch.Size(place.shape).numel()
            for first in range(0, count, len(target)):
                weights.read_(name, first, target[: count - first])
        return total


def check_hugging_face(folder: Path, spec: ModelSpec, tell: Callable[[str], None] = lambda _: None) -> str:
    """Hold names, shapes and sizes of a folder's weights against a model; return what tells it from others.

    Reads the headers alone. Raises UserError with all that does not fit. ``tell`` is given a line on each
    file that is not read.
    """
    with HuggingFaceWeights(folder, spec, tell) as weights:
        return hashlib.sha256(
            "\n".join(
                f"{name} {place.file.name} {place.offset} {place.dtype} {place.shape}"
                for name, place in sorted(weights.located.items())
            ).encode()
        ).hexdigest()
