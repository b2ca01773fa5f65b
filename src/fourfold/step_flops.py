"""FLOPs that the ranks of a program execute in a step, exactly: the numerator of HFU.

[Note: what is executed] A step executes what the model needs (`fourfold.flops`, convention ``pairs``), and
beside that:

- *recomputed*: forwards that a program runs again (R), and logits that are made again in the backward of the
  head ([Note: logits of one chunk] in `fourfold.models.loss`);
- *attention again*: the backward of fused attention computes the scores a second time, one product beside
  its four: 2HD for each pair of query and key;
- *padding*: pairs that a kernel computes and a mask throws away, which are those of the bands of a sliding
  window; and key/value projections that ranks of tp hold as copies.

A causal kernel is taken to compute the pairs that see each other and no more: what its tiles lose on the
diagonal is not counted. With the convention ``square`` it is taken to compute all of a square, as PyTorch's
`FlopCounterMode` counts, and the other half is padding. The optimizer is not counted:
Muon's products neither.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from fourfold.flops import Convention, attended_pairs, flops_of_a_pair, pairs_in_blocks, row_pairs
from fourfold.memory import tokens_of_logits
from fourfold.program.actions import Action, Kind
from fourfold.program.program import Program
from fourfold.rectangle import Rectangle
from fourfold.sequence.partition import partition_of, tokens_of_ranks
from fourfold.sequence.rectangles import rectangles
from fourfold.sequence.rows import Documents
from fourfold.specs.layout import Layout
from fourfold.specs.model import ModelSpec


@dataclass(frozen=True)
class StepFlops:
    """FLOPs by what they are for; see [Note: what is executed].

    Attributes:
        model: what the model needs.
        recomputed: forwards that run again, with what those pad.
        attention_again: scores that the backward of attention computes again.
        padding: what is computed and not needed, in first forwards and in backwards.
    """

    model: int = 0
    recomputed: int = 0
    attention_again: int = 0
    padding: int = 0

    @property
    def executed(self) -> int:
        """All of it."""
        return self.model + self.recomputed + self.attention_again + self.padding

    def __add__(self, other: "StepFlops") -> "StepFlops":
        return StepFlops(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, count: int) -> "StepFlops":
        return StepFlops(*(getattr(self, f.name) * count for f in fields(self)))


Runs = Mapping[tuple[Kind, str, int], int]
"""By kind of action, kind of block (``embed``, ``layer``, ``head``) and microbatch: how often it runs."""


def runs_of(actions: Iterable[Action], blocks: Sequence[Sequence[str]]) -> Runs:
    """Count what actions run.

    Args:
        actions: any; only those that compute a segment count.
        blocks: the names of the blocks of each segment.
    """
    return Counter(
        (action.kind, block.partition(".")[0], action.microbatch)
        for action in actions
        if action.kind in _PARTS
        for block in blocks[action.segment]
    )


@dataclass(frozen=True)
class StepWork:
    """What decides the FLOPs of a program's actions, over all ranks of cp and tp together.

    Attributes:
        spec: the model.
        layout: gives the degrees of cp and tp; its other axes do not matter.
        blocks: the names of the blocks of each segment: ``embed``, ``layer.0``..., ``head``.
        documents: of each microbatch, of its whole rows: of one rank of dp and fsdp, or of several.
        itemsize: bytes of an element in the dtype that computation runs in: it decides for how many tokens
            there are logits at once.
        ranks_of_data: over how many ranks of dp and fsdp the rows of ``documents`` are spread.
        convention: what causal attention computes.
        keeps: the names of the results of a layer that are not made again where its forward runs again.
    """

    spec: ModelSpec
    layout: Layout
    blocks: Sequence[Sequence[str]]
    documents: Sequence[Documents]
    itemsize: int
    ranks_of_data: int = 1
    convention: Convention = "pairs"
    keeps: frozenset[str] = frozenset()

    def of_rank(self, program: Program, rank: int) -> StepFlops:
        """The FLOPs of a pipeline rank's step."""
        return self.of_runs(runs_of(program.ranks[rank], self.blocks))

    def of_program(self, program: Program) -> StepFlops:
        """The FLOPs of a step on all pipeline ranks."""
        return sum((self.of_rank(program, rank) for rank in range(len(program.ranks))), StepFlops())

    def of_action(self, action: Action) -> StepFlops:
        """The FLOPs of an action; what computes no segment has none.

        Of a backward in halves, the first has the input gradients and all of attention, the second the weight
        gradients.
        """
        return self.of_runs(runs_of([action], self.blocks))

    def of_runs(self, runs: Runs) -> StepFlops:
        """The FLOPs of counted runs."""
        total = StepFlops()
        for (kind, block, microbatch), count in runs.items():
            total += self._of_block(block, kind, self.documents[microbatch]) * count
        return total

    def _of_block(self, block: str, kind: Kind, documents: Documents) -> StepFlops:
        if block == "embed":
            return StepFlops()
        if block == "head":
            return self._head(kind, documents)
        return self._layer(kind, documents)

    def _layer(self, kind: Kind, documents: Documents) -> StepFlops:
        spec, parts = self.spec, _PARTS[kind]
        tokens = sum(map(sum, documents))
        matrices = _matrices(spec)
        weights = sum(rows * columns for _, (rows, columns) in matrices)
        keys = sum(rows * columns for name, (rows, columns) in matrices if name in ("k_proj", "v_proj"))
        copies = max(1, self.layout.tp // spec.num_key_value_heads)
        needed, computed = self._pairs(documents)
        pair = flops_of_a_pair(spec)
        linear, copied = 2 * tokens * weights, 2 * tokens * keys * (copies - 1)
        model = parts.linear * linear + parts.attention * pair * needed
        padding = parts.linear * copied + parts.attention * pair * (computed - needed)
        if kind is Kind.RECOMPUTE:
            kept = pair * computed if "attention" in self.keeps else 0
            for name, (rows, columns) in _matrices(spec):
                if name in self.keeps:
                    kept += 2 * tokens * rows * columns * (copies if name in ("k_proj", "v_proj") else 1)
            return StepFlops(recomputed=model + padding - kept)
        again = pair // 2 * computed if parts.attention == 2 else 0
        return StepFlops(model=model, attention_again=again, padding=padding)

    def _head(self, kind: Kind, documents: Documents) -> StepFlops:
        of_a_token = 2 * self.spec.vocab_size * self.spec.hidden_size
        flops = of_a_token * sum(map(sum, documents))
        if kind is Kind.RECOMPUTE:
            return StepFlops(recomputed=flops)
        again = of_a_token * self._logits_again(documents) if _PARTS[kind].attention == 2 else 0
        return StepFlops(model=_PARTS[kind].linear * flops, recomputed=again)

    def _logits_again(self, documents: Documents) -> int:
        """For how many tokens logits are made again: all of a rank's but the last chunk."""
        chunk = tokens_of_logits(self.spec.vocab_size, itemsize=self.itemsize, ranks=self.layout.tp)
        rows, length = len(documents) // self.ranks_of_data, sum(documents[0])
        again = 0
        for tokens in tokens_of_ranks(length, self.layout.cp):
            again += max(0, rows * tokens - 1) // chunk * chunk
        return self.ranks_of_data * again

    def _pairs(self, documents: Documents) -> tuple[int, int]:
        """How many pairs of query and key the model needs, and how many are computed."""
        window = self.spec.sliding_window
        needed = sum(row_pairs(row, window) for row in documents)
        if window is None and self.convention == "pairs":
            return needed, needed  # rectangles are all or nothing, whatever the partition
        return needed, sum(_computed(row, window, self._ring, self.convention) for row in documents)

    @property
    def _ring(self) -> int:
        """Over how many ranks attention is cut into rectangles; 0 where rows are whole."""
        return self.layout.cp // self.layout.ulysses(self.spec) if self.layout.cp > 1 else 0


@dataclass(frozen=True)
class _Parts:
    """How often an action runs the products of a segment's forward, or products of the same size."""

    linear: int
    attention: int


_PARTS = {
    Kind.FORWARD: _Parts(1, 1),
    Kind.RECOMPUTE: _Parts(1, 1),
    Kind.BACKWARD: _Parts(2, 2),
    Kind.INPUT_GRADIENT: _Parts(1, 2),
    Kind.WEIGHT_GRADIENT: _Parts(1, 0),
}


@lru_cache(maxsize=16)
def _matrices(spec: ModelSpec) -> tuple[tuple[str, tuple[int, int]], ...]:
    """The matrices of a layer by their short names: ``q_proj``."""
    shapes = spec.layer_shapes().items()
    return tuple((name.split(".")[-2], (shape[0], shape[1])) for name, shape in shapes if len(shape) == 2)


@lru_cache(maxsize=4096)
def _computed(row: tuple[int, ...], window: int | None, ring: int, convention: Convention) -> int:
    """How many pairs the kernels compute for one row, on all ranks of a ring; see `StepWork`."""
    if ring:
        pieces = [
            piece
            for q_rank in range(ring)
            for k_rank in range(ring)
            for piece in rectangles(partition_of(row, ring), q_rank, k_rank, row, window=window)
        ]
        return sum(_computed_of(piece, convention) for piece in pieces)
    return sum(_computed_of_document(length, window, convention) for length in row)


def _computed_of(piece: Rectangle, convention: Convention) -> int:
    queries, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
    is_triangle = piece.causal and piece.window is None and convention == "pairs"
    return attended_pairs(queries) if is_triangle else queries * keys


def _computed_of_document(length: int, window: int | None, convention: Convention) -> int:
    """As `fourfold.models.attention` cuts a document."""
    if window is None or window >= length:
        return attended_pairs(length) if convention == "pairs" else length**2
    return pairs_in_blocks(length, window)
