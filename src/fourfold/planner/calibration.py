"""What was measured of the blocks of a model, in place of formulas: as rows of a calibration file.

`fourfold bench` writes such a file and `fourfold.planner.machine.Machine` reads it. A block is measured as
one rank computes it: with the heads, channels and part of the vocabulary that a rank of tp has, and as many
tokens as a rank of cp has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log

from fourfold.specs.model import ModelSpec


@dataclass(frozen=True)
class MeasuredBlock:
    """How long one action on one block took.

    Attributes:
        block: ``embed``, ``layer`` or ``head``.
        kind: ``F``, ``B``, ``I`` or ``W``, as of `fourfold.program.actions.Kind`.
        shape: of its weights on a rank; see `shape_of_block`.
        rows: of the microbatch, each one document of ``sequence`` tokens.
        sequence: tokens of a row.
        dtype: of the computation.
        seconds: of the action.
    """

    block: str
    kind: str
    shape: tuple[int, ...]
    rows: int
    sequence: int
    dtype: str
    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # from JSON a list


@dataclass(frozen=True)
class MeasuredAttention:
    """How long fused attention took, forward and backward, on (rows, sequence, heads, head_dim)."""

    rows: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class MeasuredUpdate:
    """How long the norm, clipping and AdamW took on so many elements in a rank's buffers."""

    elements: int
    seconds: float


def shape_of_block(spec: ModelSpec, block: str, *, tp: int = 1) -> tuple[int, ...]:
    """What decides the size of a block's products on a rank of tp.

    Of a layer hidden size, query heads, key/value heads, channels of a head and of the feed-forward; of the
    embedding and the head hidden size and vocabulary.
    """
    if block != "layer":
        return spec.hidden_size, -(-spec.vocab_size // tp)
    heads, kv_heads = spec.num_attention_heads // tp, max(1, spec.num_key_value_heads // tp)
    return spec.hidden_size, heads, kv_heads, spec.head_dim, spec.intermediate_size // tp


@dataclass(frozen=True)
class BlockTable:
    """Measured blocks by what they are of. Between sizes, seconds lie on a line of logarithms."""

    blocks: Sequence[MeasuredBlock] = ()
    attentions: Sequence[MeasuredAttention] = ()
    updates: Sequence[MeasuredUpdate] = ()

    def block_seconds(
        self, block: str, kind: str, shape: tuple[int, ...], *, rows: int, sequence: int, dtype: str
    ) -> float | None:
        """The time of an action on a block, None where nothing like it was measured.

        From rows of the measured length that is nearest to ``sequence``, by the number of tokens.
        """
        by_length = self._by_block.get((block, kind, shape, dtype))
        if by_length is None:
            return None
        nearest = min(by_length, key=lambda length: abs(log(length / sequence)))
        return interpolated(by_length[nearest], rows * sequence)

    def attention_seconds(
        self, *, rows: int, sequence: int, heads: float, head_dim: int, dtype: str, backward: bool
    ) -> float | None:
        """The time of fused attention, None where nothing like it was measured; by its size."""
        table = self._by_attention.get((head_dim, dtype, backward))
        return None if table is None else interpolated(table, rows * heads * sequence**2)

    def update_seconds(self, elements: int) -> float | None:
        """The time of an update, None where none was measured."""
        return interpolated(self._by_elements, elements) if self._by_elements else None

    @cached_property
    def _by_block(
        self,
    ) -> dict[tuple[str, str, tuple[int, ...], str], dict[int, list[tuple[float, float]]]]:
        found: dict[tuple[str, str, tuple[int, ...], str], dict[int, list[tuple[float, float]]]] = {}
        for row in self.blocks:
            by_length = found.setdefault((row.block, row.kind, tuple(row.shape), row.dtype), {})
            by_length.setdefault(row.sequence, []).append((row.rows * row.sequence, row.seconds))
        return {
            key: {length: sorted(rows) for length, rows in by_length.items()}
            for key, by_length in found.items()
        }

    @cached_property
    def _by_attention(self) -> dict[tuple[int, str, bool], list[tuple[float, float]]]:
        found: dict[tuple[int, str, bool], list[tuple[float, float]]] = {}
        for row in self.attentions:
            size = row.rows * row.heads * row.sequence**2
            for backward, seconds in ((False, row.forward_seconds), (True, row.backward_seconds)):
                found.setdefault((row.head_dim, row.dtype, backward), []).append((size, seconds))
        return {key: sorted(rows) for key, rows in found.items()}

    @cached_property
    def _by_elements(self) -> list[tuple[float, float]]:
        return sorted((row.elements, row.seconds) for row in self.updates)


def interpolated(table: Sequence[tuple[float, float]], size: float) -> float:
    """The seconds at a size, from sorted (size, seconds).

    Between sizes on a line of logarithms; above the last in proportion; below the first as that, since what
    is left there is the time to start.
    """
    if size <= table[0][0]:
        return table[0][1]
    if size >= table[-1][0]:
        return table[-1][1] * size / table[-1][0]
    above = next(index for index, (other, _) in enumerate(table) if other >= size)
    (low, low_seconds), (high, high_seconds) = table[above - 1], table[above]
    if high == low:
        return high_seconds
    share = (log(size) - log(low)) / (log(high) - log(low))
    return exp(log(low_seconds) + share * (log(high_seconds) - log(low_seconds)))
