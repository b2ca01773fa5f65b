"""FLOPs of a training step, exactly, by convention.

[Note: what is counted]
A matrix product of (m, k) with (k, n) is 2mkn FLOPs: a multiplication and an addition each. Only matrix
products count: norms, activations, rotary angles, softmax and the optimizer are left out, and so is the
embedding, which is a lookup. The head counts whether tied or not.

*Weights.* A token passes each weight matrix once: 2 FLOPs for each of its elements.

*Attention.* Query i sees the keys 0..i, so one sequence of S tokens has S(S+1)/2 pairs of query and key;
with a sliding window of w, query i sees min(i+1, w) of them. Each pair costs 2D for its score and 2D for its
share of the value product, for each of the H query heads (grouped heads only shrink the k and v
projections): 4HD. A row that packs several documents is counted as one sequence, by convention.

*Backward.* Each product C = AB of the forward becomes two of the same size, for the gradients of A and
of B: a step is 3 times its forward.

*Recomputation* is work that the hardware does and the model does not need. It counts in executed FLOPs
(HFU) and never in model FLOPs (MFU): Chowdhery et al., arXiv:2204.02311, appendix B; Korthikanti et al.,
arXiv:2205.05198. What a fused attention kernel recomputes of itself counts in neither.

All numbers are of the whole model and the global batch, the same on every layout.
"""

from dataclasses import dataclass
from typing import Literal

from fourfold.specs.model import ModelSpec

# What is computed again before the backward: nothing, every layer, or only the products of query with key
# and of weights with value. The head is not recomputed.
Recomputation = Literal["none", "layers", "attention"]


def attended_pairs(sequence_length: int, sliding_window: int | None = None) -> int:
    """Return the pairs of query and key in one causal sequence, exactly."""
    window = min(sequence_length, sliding_window or sequence_length)
    return window * (window + 1) // 2 + (sequence_length - window) * window


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


def forward_flops(spec: ModelSpec, sequence_length: int) -> ForwardFlops:
    """Return the forward FLOPs of one sequence, by segment. See [Note: what is counted]."""
    matrices = (shape for shape in spec.layer_shapes().values() if len(shape) == 2)
    return ForwardFlops(
        embed=0,
        layer_weights=2 * sequence_length * sum(rows * columns for rows, columns in matrices),
        layer_attention=4
        * spec.num_attention_heads
        * spec.head_dim
        * attended_pairs(sequence_length, spec.sliding_window),
        head=2 * sequence_length * spec.vocab_size * spec.hidden_size,
        num_layers=spec.num_hidden_layers,
    )


def model_flops(spec: ModelSpec, *, batch: int, sequence_length: int) -> int:
    """Return the FLOPs that a training step of ``batch`` sequences needs: the numerator of MFU."""
    return 3 * batch * forward_flops(spec, sequence_length).total


def executed_flops(
    spec: ModelSpec, *, batch: int, sequence_length: int, recomputation: Recomputation = "none"
) -> int:
    """Return the FLOPs that a training step executes, with what it recomputes: the numerator of HFU."""
    forward = forward_flops(spec, sequence_length)
    again = {"none": 0, "layers": forward.layer, "attention": forward.layer_attention}[recomputation]
    return batch * (3 * forward.total + spec.num_hidden_layers * again)


def model_flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """Return the FLOPs that training on one token needs, averaged over a sequence."""
    return model_flops(spec, batch=1, sequence_length=sequence_length) / sequence_length


def executed_flops_per_token(
    spec: ModelSpec, sequence_length: int, recomputation: Recomputation = "none"
) -> float:
    """Return the FLOPs that training on one token executes, averaged over a sequence."""
    flops = executed_flops(spec, batch=1, sequence_length=sequence_length, recomputation=recomputation)
    return flops / sequence_length
