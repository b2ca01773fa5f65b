"""Batches of packed documents that a test writes down itself."""

from dataclasses import dataclass

import torch

from fourfold.models import IGNORE, Microbatch
from fourfold.sequence.rows import Documents


@dataclass(frozen=True)
class WrittenRows:
    """Random tokens in the documents that are given. A label counts unless it starts another document.

    Attributes:
        documents: of each row of the batch.
        left_out: for each row, places whose labels do not count either.
    """

    documents: Documents
    left_out: tuple[tuple[int, ...], ...] = ()
    vocab_size: int = 64

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return sum(self.documents[0])

    def valid_tokens(self, step: int, batch: int) -> int:
        """Return the labels that count in the whole batch."""
        return int((self.rows(step, batch, range(batch)).labels_BS != IGNORE).sum())

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return some rows of the batch of a step."""
        assert batch == len(self.documents)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.vocab_size, (batch, self.sequence_length), generator=generator)
        labels = torch.cat([tokens[:, 1:], torch.full((batch, 1), IGNORE)], 1)
        for row, lengths in enumerate(self.documents):
            labels[row, torch.tensor(lengths).cumsum(0) - 1] = IGNORE
        for row, places in enumerate(self.left_out):
            labels[row, list(places)] = IGNORE
        own = slice(rows.start, rows.stop)
        positions = [torch.cat([torch.arange(size) for size in row]) for row in self.documents[own]]
        return Microbatch(tokens[own], labels[own], torch.stack(positions), self.documents[own])
