"""What a model reads in one forward: tokens, labels, positions and where documents end."""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100
"""Label of a position that does not count in the loss."""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Rows of packed documents, ready for a model.

    The three tensors are int64 of shape (B, S). Labels are already shifted by one and masked with `IGNORE`;
    positions restart at 0 in each document. `documents` holds, for each row, the lengths of its documents in
    order: they are positive and sum to S. Two microbatches are equal only if they are the same object.

    Where the sequence is cut over ranks, the tensors are this rank's tokens, and `columns` says for each row
    where they stand in it; `documents` are those of the whole rows all the same.
    """

    input_ids_BS: Tensor
    labels_BS: Tensor
    position_ids_BS: Tensor
    documents: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[range, ...], ...] | None = None

    def __post_init__(self) -> None:
        B, S = self.input_ids_BS.shape
        assert self.labels_BS.shape == self.position_ids_BS.shape == (B, S), "labels, positions: shape (B, S)"
        assert len(self.documents) == B, f"{len(self.documents)} rows of documents for {B} rows of tokens"
        for index, row in enumerate(self.documents):
            if self.columns is None:
                assert sum(row) == S, f"documents {row} must sum to {S}"
            else:
                assert sum(map(len, self.columns[index])) == S, f"columns {self.columns[index]} must be {S}"
            # The CPU attention kernel divides by the length: a document without tokens kills the process.
            assert min(row, default=0) > 0, f"documents {row} must not be empty"

    def to(self, device: torch.device | str) -> "Microbatch":
        """Return the same rows with the tensors on `device`."""
        return Microbatch(
            self.input_ids_BS.to(device),
            self.labels_BS.to(device),
            self.position_ids_BS.to(device),
            self.documents,
            self.columns,
        )

    def take(self, columns: tuple[tuple[range, ...], ...]) -> "Microbatch":
        """Return the tokens of a whole row's `columns`, for each row; equally many of each."""
        index_BS = torch.tensor([[i for run in row for i in run] for row in columns], dtype=torch.int64)
        index_BS = index_BS.view(len(columns), -1).to(self.input_ids_BS.device)
        return Microbatch(
            self.input_ids_BS.gather(1, index_BS),
            self.labels_BS.gather(1, index_BS),
            self.position_ids_BS.gather(1, index_BS),
            self.documents,
            columns,
        )

    @property
    def token_lengths(self) -> Tensor:
        """The length of each token's document, (B, S), on the CPU."""
        rows = [torch.tensor(row).repeat_interleave(torch.tensor(row)) for row in self.documents]
        if self.columns is not None:
            rows = [
                torch.cat([lengths[run.start : run.stop] for run in columns] or [lengths[:0]])
                for lengths, columns in zip(rows, self.columns, strict=True)
            ]
        return torch.stack(rows)
