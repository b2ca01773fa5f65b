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
    """

    input_ids_BS: Tensor
    labels_BS: Tensor
    position_ids_BS: Tensor
    documents: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        B, S = self.input_ids_BS.shape
        assert self.labels_BS.shape == self.position_ids_BS.shape == (B, S), "labels, positions: shape (B, S)"
        assert len(self.documents) == B, f"{len(self.documents)} rows of documents for {B} rows of tokens"
        for row in self.documents:
            assert sum(row) == S, f"documents {row} must sum to {S}"
            # The CPU attention kernel divides by the length: a document without tokens kills the process.
            assert min(row, default=0) > 0, f"documents {row} must not be empty"

    def to(self, device: torch.device | str) -> "Microbatch":
        """Return the same rows with the tensors on `device`."""
        return Microbatch(
            self.input_ids_BS.to(device),
            self.labels_BS.to(device),
            self.position_ids_BS.to(device),
            self.documents,
        )
