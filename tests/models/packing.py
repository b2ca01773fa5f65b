"""Rows of packed documents with random tokens, for the tests of the models."""

import torch

from fourfold.models.batch import IGNORE, Microbatch


def pack(documents: tuple[tuple[int, ...], ...], vocab_size: int, seed: int = 0) -> Microbatch:
    """Return random tokens cut into these documents; the last label of each is left out."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(vocab_size, (len(documents), sum(documents[0])), generator=generator)
    labels, positions = input_ids.roll(-1, 1), torch.empty_like(input_ids)
    for row, lengths in enumerate(documents):
        positions[row] = torch.cat([torch.arange(length) for length in lengths])
        labels[row, torch.tensor(lengths).cumsum(0) - 1] = IGNORE
    return Microbatch(input_ids, labels, positions, documents)
