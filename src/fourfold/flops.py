"""FLOPs that a model needs for a training step, exactly, by convention.

[Note: what is counted]
A matrix product of (m, k) with (k, n) is 2mkn FLOPs: a multiplication and an addition each. Only matrix
products of the model count: norms, biases, activations, rotary angles, softmax and the optimizer are left
out, and so is the embedding, which is a lookup. The head counts whether tied or not.

*Weights.* A token passes each weight matrix once: 2 FLOPs for each of its elements.

*Attention.* Each pair of query and key costs 2D for its score and 2D for its share of the value product, for
each of the H query heads (grouped heads only shrink the k and v projections): 4HD. Which pairs count is a
convention, `Convention`:

- ``pairs``, ours: those that see each other. Query i of a document sees the keys 0..i, so a document of n
  tokens has n(n+1)/2 of them; with a sliding window of w, query i sees min(i+1, w).
- ``square``: all S x S of a row, as if nothing were causal, no window and one document (PaLM, nanoGPT,
  torchtitan: 12 L H D S a token). Published numbers are comparable only with the convention named.

*Backward.* Each product C = AB of the forward becomes two of the same size, for the gradients of A and
of B: a step is 3 times its forward.

These are model FLOPs, the numerator of MFU: the same on every layout. What the hardware executes, the
numerator of HFU, is in `fourfold.step_flops`. Sources: Chowdhery et al., arXiv:2204.02311, appendix B;
Korthikanti et al., arXiv:2205.05198.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fourfold.specs.model import ModelSpec

Convention = Literal["pairs", "square"]
"""Which pairs of query and key count; see [Note: what is counted]."""


def attended_pairs(length: int, sliding_window: int | None = None) -> int:
    """Return the pairs of query and key that see each other in one causal document, exactly."""
    window = min(length, sliding_window or length)
    return window * (window + 1) // 2 + (length - window) * window


def row_pairs(
    documents: Sequence[int], sliding_window: int | None = None, *, convention: Convention = "pairs"
) -> int:
    """Return the pairs of query and key that count in one row.

    Args:
        documents: the lengths of the row's documents.
        sliding_window: how many tokens a query sees, itself included; None for all before it.
        convention: which pairs count.
    """
    if convention == "square":
        return sum(documents) ** 2
    return sum(attended_pairs(length, sliding_window) for length in documents)


def pairs_in_blocks(length: int, window: int) -> int:
    """Return how many pairs attention computes where it goes in blocks of ``window`` queries, masked.

    As `fourfold.models.attention` does with a document under a sliding window: a block sees its own tokens
    and the ``window - 1`` before it.
    """
    return sum(
        (min(start + window, length) - start) * (min(start + window, length) - max(0, start - window + 1))
        for start in range(0, length, window)
    )


@dataclass(frozen=True)
class ForwardFlops:
    """Forward FLOPs of one sequence by segment; those of a layer in two parts."""

    embed: int
    layer_weights: int
    layer_attention: int
    head: int
    num_layers: int

    @property
    def layer(self) -> int:
        """One layer."""
        return self.layer_weights + self.layer_attention

    @property
    def segments(self) -> tuple[int, ...]:
        """The embedding, each layer, the head: in model order."""
        return (self.embed, *(self.layer,) * self.num_layers, self.head)

    @property
    def total(self) -> int:
        """The whole model."""
        return sum(self.segments)


def forward_flops(
    spec: ModelSpec,
    sequence_length: int,
    *,
    documents: Sequence[int] | None = None,
    convention: Convention = "pairs",
) -> ForwardFlops:
    """Return the forward FLOPs of one sequence, by segment. See [Note: what is counted].

    Args:
        spec: the model.
        sequence_length: tokens of the sequence.
        documents: the lengths of the documents in it; None for one.
        convention: which pairs count in attention.
    """
    matrices = (shape for shape in spec.layer_shapes().values() if len(shape) == 2)
    pairs = row_pairs(documents or [sequence_length], spec.sliding_window, convention=convention)
    return ForwardFlops(
        embed=0,
        layer_weights=2 * sequence_length * sum(rows * columns for rows, columns in matrices),
        layer_attention=flops_of_a_pair(spec) * pairs,
        head=2 * sequence_length * spec.vocab_size * spec.hidden_size,
        num_layers=spec.num_hidden_layers,
    )


def flops_of_a_pair(spec: ModelSpec) -> int:
    """Return what one pair of query and key costs in a layer's forward, over all heads: score and value."""
    return 4 * spec.num_attention_heads * spec.head_dim


def model_flops(
    spec: ModelSpec, *, batch: int, sequence_length: int, convention: Convention = "pairs"
) -> int:
    """Return the FLOPs that a training step of ``batch`` sequences of one document each needs."""
    return 3 * batch * forward_flops(spec, sequence_length, convention=convention).total


def model_flops_of_rows(
    spec: ModelSpec, rows: Sequence[Sequence[int]], *, convention: Convention = "pairs"
) -> int:
    """Return the FLOPs that a training step needs: the numerator of MFU.

    Args:
        spec: the model.
        rows: of each row of the global batch, the lengths of its documents. All rows are of one length.
        convention: which pairs count in attention.
    """
    if not rows:
        return 0
    of_tokens = forward_flops(spec, sum(rows[0]))
    weights = spec.num_hidden_layers * of_tokens.layer_weights + of_tokens.head
    pairs = sum(row_pairs(row, spec.sliding_window, convention=convention) for row in rows)
    return 3 * (len(rows) * weights + spec.num_hidden_layers * flops_of_a_pair(spec) * pairs)


def model_flops_per_token(
    spec: ModelSpec, sequence_length: int, *, convention: Convention = "pairs"
) -> float:
    """Return the FLOPs that training on one token needs, averaged over a sequence of one document."""
    flops = model_flops(spec, batch=1, sequence_length=sequence_length, convention=convention)
    return flops / sequence_length
