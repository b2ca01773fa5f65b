"""The batch of a step: packed documents from a token file, or synthetic ones for checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fourfold.data.tokens import TokenFile
from fourfold.errors import UserError
from fourfold.models.batch import IGNORE, Microbatch

# [Note: the batch of a step]
# Row j of the global batch of step k (from 0) is a pure function of the data, the seed, k and j. There is no
# other state: a run resumes from the step number alone, on any layout, and how the rows are divided over
# ranks and microbatches changes none of them.


class Dataset(Protocol):
    """Gives the global batch of every step, or any of its rows."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def valid_tokens(self, step: int, batch: int) -> int:
        """Return the number of labels that count in the global batch of `batch` rows of a step (from 0)."""

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return some rows of the global batch of a step, as CPU tensors."""


class PackedDataset:
    """Documents packed one after the other into sequences of S tokens, in a new order every epoch.

    Sequence i is made of the tokens [i*S, i*S + S] of the file: S inputs, and as labels the token after each.
    A label that starts another document is `IGNORE`, and positions restart there. With n tokens there are
    floor((n - 1)/S) sequences. Sequence g = step*batch + row of the run is number g modulo that of the
    order of epoch g // that. Raises UserError if the file is too short for one sequence.
    """

    def __init__(self, tokens: TokenFile, *, sequence_length: int, seed: int):
        self.tokens = tokens
        self.vocab_size = tokens.vocab_size
        self.sequence_length = sequence_length
        self.seed = seed
        self.num_sequences = (tokens.num_tokens - 1) // sequence_length
        if self.num_sequences < 1:
            raise UserError(
                f"sequence_length={sequence_length} needs {sequence_length + 1} tokens, but {tokens.source} "
                f"has {tokens.num_tokens}: use more text or sequence_length <= {tokens.num_tokens - 1}"
            )
        self._orders: dict[int, NDArray[np.int64]] = {}

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the sequences in an epoch: a permutation of range(num_sequences)."""
        if epoch not in self._orders:
            # Sorting raw random numbers: numpy promises that these stay the same in every version.
            keys = np.random.Philox(key=_words(self.seed, epoch)).random_raw(self.num_sequences)
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = np.argsort(keys, kind="stable")
        return self._orders[epoch]

    def valid_tokens(self, step: int, batch: int) -> int:
        """Return the number of labels that count in the global batch of a step, from the offsets alone."""
        first, last = self._starts_within(self._sequence_starts(step, batch, range(batch)))
        return batch * self.sequence_length - int((last - first).sum())

    def documents(self, step: int, batch: int) -> tuple[tuple[int, ...], ...]:
        """Return the lengths of the documents in each row of the global batch, from the offsets alone."""
        boundaries = self._boundaries(self._sequence_starts(step, batch, range(batch)))
        return tuple(_lengths(starts, self.sequence_length) for starts in boundaries)

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return some rows of the global batch of a step.

        Raises UserError for a token outside the vocabulary, naming its place in the file.
        """
        starts_B = self._sequence_starts(step, batch, rows)
        ids = self.tokens.read(starts_B[:, None] + np.arange(self.sequence_length + 1))
        return _microbatch(ids, self._boundaries(starts_B))

    def _boundaries(self, starts_B: NDArray[np.int64]) -> list[list[int]]:
        """Return, for each row, the places in 1 to S where another document starts."""
        first, last = self._starts_within(starts_B)
        return [
            (self.tokens.document_starts[low:high] - start).tolist()
            for low, high, start in zip(first.tolist(), last.tolist(), starts_B.tolist(), strict=True)
        ]

    def _sequence_starts(self, step: int, batch: int, rows: range) -> NDArray[np.int64]:
        """Return the place in the file of the first token of each row."""
        assert not rows or 0 <= min(rows[0], rows[-1]) <= max(rows[0], rows[-1]) < batch, f"{rows} of {batch}"
        counters = step * batch + np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
        epochs, places = np.divmod(counters, self.num_sequences)
        sequences = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            sequences[inside] = self.order(epoch)[places[inside]]
        return sequences * self.sequence_length

    def _starts_within(self, starts_B: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which document starts lie in (start, start + S]: the first, and the one after the last."""
        documents = self.tokens.document_starts
        return (
            np.searchsorted(documents, starts_B, side="right"),
            np.searchsorted(documents, starts_B + self.sequence_length, side="right"),
        )


@dataclass(frozen=True)
class SyntheticDataset:
    """Random tokens and labels, uneven on purpose, so that a wrong count or weight shows.

    Rows hold one to four documents. Of every three rows the first has all labels but those at the ends of
    documents, the second has none, the third a random part of at most half. Row j of a step depends on the
    seed, the step and j, not on the size of the batch.
    """

    vocab_size: int
    sequence_length: int
    seed: int

    def valid_tokens(self, step: int, batch: int) -> int:
        """Return the number of labels that count in the global batch of a step."""
        return int((self.rows(step, batch, range(batch)).labels_BS != IGNORE).sum())

    def documents(self, step: int, batch: int) -> tuple[tuple[int, ...], ...]:
        """Return the lengths of the documents in each row of the global batch of a step."""
        return self.rows(step, batch, range(batch)).documents

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return some rows of the global batch of a step."""
        S = self.sequence_length
        ids = np.empty((len(rows), S + 1), dtype=np.int64)
        ignored = np.zeros((len(rows), S), dtype=bool)
        boundaries = []
        for index, row in enumerate(rows):
            assert 0 <= row < batch, f"row {row} of {batch}"
            counter = _words(0, 0, step, row)
            random = np.random.Generator(np.random.Philox(key=_words(self.seed, 0), counter=counter))
            cuts = random.integers(1, S, size=random.integers(0, 4)) if S > 1 else ()
            boundaries.append(sorted({int(cut) for cut in cuts}))
            ids[index] = random.integers(0, self.vocab_size, size=S + 1)
            if row % 3 == 1:
                ignored[index] = True
            elif row % 3 == 2:
                counted = random.permutation(S)[: random.integers(1, max(S // 2, 1), endpoint=True)]
                ignored[index] = True
                ignored[index, counted] = False
        microbatch = _microbatch(ids, boundaries)
        microbatch.labels_BS[torch.from_numpy(ignored)] = IGNORE
        return microbatch


def _words(*values: int) -> NDArray[np.uint64]:
    """Return integers as the 64-bit words that Philox takes."""
    return np.array([value % 2**64 for value in values], dtype=np.uint64)


def _lengths(starts: Sequence[int], length: int) -> tuple[int, ...]:
    """Return the lengths of the documents of a row, of which all but the first start at ``starts``."""
    return tuple(b - a for a, b in pairwise([0, *(start for start in starts if start < length), length]))


def _microbatch(ids: NDArray[np.int64], boundaries: Sequence[Sequence[int]]) -> Microbatch:
    """Return rows of S + 1 consecutive tokens as inputs, labels and positions.

    `boundaries` are, for each row, the places in 1 to S where another document starts.
    """
    B, S = ids.shape[0], ids.shape[1] - 1
    labels = ids[:, 1:].copy()
    documents = []
    document_starts = np.zeros((B, S), dtype=np.int64)  # of the document of each token
    for row, starts in enumerate(boundaries):
        if starts:
            labels[row, np.subtract(starts, 1)] = IGNORE
        inside = [start for start in starts if start < S]
        if inside:
            document_starts[row, inside] = inside
        documents.append(_lengths(inside, S))
    positions = np.arange(S) - np.maximum.accumulate(document_starts, axis=1)
    return Microbatch(
        torch.from_numpy(ids[:, :-1].copy()),
        torch.from_numpy(labels),
        torch.from_numpy(positions),
        tuple(documents),
    )
