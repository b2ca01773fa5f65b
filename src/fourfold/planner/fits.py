"""What a rank holds, in closed form: quick enough to ask for every layout there is.

`fourfold.explain` walks over a program, action by action. This adds up the same sizes (those of
`fourfold.block_memory`, the parameters of blocks, and how many microbatches are in flight) at the moment
that is dearest in all programs that the planner tries: when a rank has most in flight and goes back a layer.
A test holds it against the walk. What the backends of collectives and the context of a device take is
`FIXED_BYTES`; what an allocator cannot use is a share of all.
"""

from dataclasses import dataclass, replace

from fourfold.block_memory import BlockMemory, BlockSizes
from fourfold.outline import ITEMSIZES, master_dtype
from fourfold.planner.practice import Practice
from fourfold.specs.placement import Placement

FIXED_BYTES = 1.5e9
"""A CUDA context, workspaces of cuBLAS, and channels of NCCL for each of a few groups."""

SCORE_BYTES = 5
"""Of a query and a key in 16 bits, where scores are kept: their softmax, a mask of dropout, and their product
(arXiv:2205.05198)."""

USABLE = 0.94
"""Of what a program sees of a device's memory, a plan may reserve so much."""


@dataclass(frozen=True)
class StageLoad:
    """What a pipeline rank has of the model.

    Attributes:
        layers: how many, and whether the ``embed``ding or the ``head`` is there too.
        in_flight: of its share of the model, the most microbatches that it keeps activations of.
    """

    layers: int
    embed: bool
    head: bool
    in_flight: float


@dataclass(frozen=True)
class Sizes:
    """What the memory of all pipeline ranks follows from.

    Attributes:
        embed, layer, head: bytes of the blocks on one microbatch.
        numel: parameters of each kind of block on a rank of tp.
        dtype: of computation.
        recompute: ``none``, ``selective`` or ``full``.
        tied: whether the head's weight is the embedding's, which both ends of a pipeline then hold.
        gradient_bytes: of a parameter's gradients while they are kept, and ``owned_gradient_bytes`` of those
            that the optimizer has beside them.
        fragmentation: the share that an allocator reserves beyond what is allocated.
    """

    embed: BlockMemory
    layer: BlockMemory
    head: BlockMemory
    numel: dict[str, int]
    dtype: str
    recompute: str
    tied: bool
    gradient_bytes: int
    owned_gradient_bytes: int
    fragmentation: float

    @classmethod
    def of(
        cls,
        sizes: BlockSizes,
        numel: dict[str, int],
        *,
        dtype: str,
        recompute: str,
        practice: Practice,
    ) -> "Sizes":
        """From the sizes of blocks; where attention is not fused, scores are kept as well."""
        layer = sizes.layer()
        if not practice.fused_attention:
            scores = SCORE_BYTES * sizes.tokens * sizes.sequence_length * sizes.heads
            layer = replace(layer, tape=layer.tape + scores)
        return cls(
            sizes.embed(),
            layer,
            sizes.head(),
            numel,
            dtype,
            recompute,
            sizes.spec.tie_word_embeddings,
            max(practice.gradient_bytes, 8 if dtype == "float64" else 0),
            practice.owned_gradient_bytes,
            practice.fragmentation,
        )


@dataclass(frozen=True)
class Held:
    """Bytes on a rank when it holds most, by category; see `fourfold.memory.Category`.

    ``unused`` is what an allocator reserves beyond what is allocated.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    communication: float
    unused: float

    @property
    def allocated(self) -> float:
        """All but that."""
        static = self.weights + self.gradients + self.optimizer  # written out: it is asked for very often
        return static + self.gathered + self.activations + self.logits + self.communication

    @property
    def reserved(self) -> float:
        """With what an allocator and the backends take beside it."""
        return self.allocated + self.unused + FIXED_BYTES


def held(
    sizes: Sizes,
    load: StageLoad,
    *,
    placement: Placement,
    owners: int,
    keep: bool,
    activations: tuple[float, float] | None = None,
) -> Held:
    """What a pipeline rank holds.

    Args:
        sizes: of blocks.
        load: what the rank has of the model.
        placement: what is cut over the ranks that own pieces.
        owners: how many those are.
        keep: whether gathered weights and whole gradients stay through a step.
        activations: what `activations_of` says, if it is known already.
    """
    numel, itemsize = sizes.numel, ITEMSIZES[sizes.dtype]
    master = ITEMSIZES[master_dtype(sizes.dtype)]
    has_table = load.embed or (load.head and sizes.tied)
    ends = numel["embed"] * has_table + numel["head"] * load.head
    count = numel["layer"] * load.layers + ends
    piece = count / owners
    largest = max(numel["layer"], numel["embed"] * has_table, numel["head"] * load.head)
    two_units = numel["layer"] + largest if load.layers > 1 else count
    weights = gathered = 0.0
    if placement.weights:
        weights = piece * master
        gathered = (count if keep else two_units) * itemsize
    else:
        apart = itemsize != master
        weights = count * itemsize + (piece if placement.optimizer else count) * master * apart
    gradients = float(count)
    if placement.gradients:
        gradients = piece + (count if keep else two_units)
    gradients *= sizes.gradient_bytes
    owned = piece if placement.optimizer else count
    gradients += owned * sizes.owned_gradient_bytes
    kept, logits = activations_of(sizes, load) if activations is None else activations
    # Unequal pieces are summed through a buffer of the whole unit.
    summed = largest * master if placement.optimizer and owners > 1 and not keep else 0.0
    optimizer = 2.0 * owned * master
    allocated = weights + gradients + optimizer + gathered + kept + logits + summed
    unused = sizes.fragmentation * allocated
    return Held(weights, gradients, optimizer, gathered, kept, logits, summed, unused)


def activations_of(sizes: Sizes, load: StageLoad) -> tuple[float, float]:
    """Bytes of activations, and of logits beside them."""
    layer, head = sizes.layer, sizes.head
    working = float(layer.backward + layer.input)
    if sizes.recompute == "none":
        each = float(load.layers * layer.tape)
    else:
        each = float(load.layers * (layer.input + layer.kept))
        working += layer.tape - layer.input
    logits = 0.0
    if load.embed:
        each += sizes.embed.tape
    if load.head:
        each += head.tape
        logits = float(head.loss)
        working = max(working, float(head.backward))
    return load.in_flight * each + working, logits
