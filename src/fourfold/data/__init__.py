"""From text to batches: sources, tokenizers, token files, and the batch of a step."""

from fourfold.data.dataset import Dataset, PackedDataset, SyntheticDataset
from fourfold.data.prepare import Prepared, prepare
from fourfold.data.sources import PYTHON_STDLIB, find_source
from fourfold.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from fourfold.data.tokens import TokenFile, TokenWriter

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
