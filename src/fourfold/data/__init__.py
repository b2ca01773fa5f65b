"""From text to batches: sources, tokenizers, token files, and the batch of a step."""

from typing import TYPE_CHECKING

from fourfold.data.prepare import Prepared, prepare
from fourfold.data.sources import PYTHON_STDLIB, find_source
from fourfold.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from fourfold.data.tokens import TokenFile, TokenWriter

if TYPE_CHECKING:
    from fourfold.data.dataset import Dataset, PackedDataset, SyntheticDataset

__all__ = [
    "PYTHON_STDLIB",
    "ByteTokenizer",
    "Dataset",
    "PackedDataset",
    "Prepared",
    "SyntheticDataset",
    "TokenFile",
    "TokenWriter",
    "Tokenizer",
    "find_source",
    "load_tokenizer",
    "prepare",
]


def __getattr__(name: str) -> object:
    # A dataset needs torch; what else is here does not, and a prediction asks a tokenizer for its size.
    if name not in ("Dataset", "PackedDataset", "SyntheticDataset"):
        raise AttributeError(f"module 'fourfold.data' has no attribute '{name}'")
    from fourfold.data import dataset

    return getattr(dataset, name)
