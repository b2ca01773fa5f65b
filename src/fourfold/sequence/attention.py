"""Attention over tokens that are spread over ranks: Ulysses around a ring.

With a ring of one it is Ulysses, with one rank of Ulysses it is ring attention. With both, each group of
Ulysses' ranks exchanges tokens for heads, and a ring goes through the ranks with the same heads.
"""

from torch import Tensor

from fourfold.collectives import barrier
from fourfold.errors import UserError, choices
from fourfold.mesh import Axis
from fourfold.sequence.ops import Place, context_attention
from fourfold.sequence.partition import partition_of
from fourfold.sequence.rows import Documents
from fourfold.specs.cp_option import ulysses_problems
from fourfold.specs.spec import divisors


class ContextAttention:
    """In place of `fourfold.models.attention.attention`, for this rank's tokens.

    Args:
        ring: the ranks between which keys and values travel.
        ulysses: the ranks that exchange tokens for heads. Rank r of the ring and u of these holds part
            ``r * ulysses.size + u`` of every row's partition.
        causal: whether a token sees only itself and those before it.
    """

    def __init__(self, *, ring: Axis, ulysses: Axis, causal: bool = True):
        self.place = Place(ring, ulysses, causal)
        # NCCL makes a communicator at its first use, for which all ranks must come; the first messages of a
        # ring may be for only some of them.
        barrier(ring)

    def columns(self, documents: Documents) -> tuple[tuple[range, ...], ...]:
        """Which tokens of each row this rank holds."""
        ring, ulysses = self.place.ring, self.place.ulysses
        rank = ring.rank * ulysses.size + ulysses.rank
        return tuple(partition_of(row, ring.size, ulysses.size).columns(rank) for row in documents)

    def __call__(
        self,
        q_BSHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        *,
        documents: Documents,
        window: int | None,
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of this rank's queries, (B, S, H, D).

        ``documents`` are those of the whole rows, each of which sums to the whole length. ``sinks_H`` are
        logits, one a query head of ``q_BSHD``, that take part in the softmax and bring no value; each rank
        has a summand of their gradient. Raises UserError with every rule that the arguments break.
        """
        # Cheap, since each layer comes here; and free of caches, which torch.compile would complain of.
        problems = [*self._token_problems(q_BSHD, k_BSKD, v_BSKD, documents)]
        problems += self._head_problems(q_BSHD.shape[2], k_BSKD.shape[2])
        problems += _window_problems(window, self.place.causal)
        if sinks_H is not None and sinks_H.shape != q_BSHD.shape[2:3]:
            problems.append(
                f"sinks of shape {tuple(sinks_H.shape)} for {q_BSHD.shape[2]} query heads (Sequence axis): "
                "give one logit for each query head that this rank has before any exchange"
            )
        if problems:
            raise UserError(*problems)
        lengths = [length for row in documents for length in row]
        out_BSHD, *_ = context_attention(
            q_BSHD, k_BSKD, v_BSKD, self.place.number, lengths, window, scale, sinks_H
        )
        return out_BSHD

    def _token_problems(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> list[str]:
        """Whether each row has documents, equally many tokens of them, and this rank its own of these."""
        rows = q.shape[0]
        if len(documents) != rows:
            return [
                f"documents are of {len(documents)} rows, and the queries of {rows} (Sequence axis): give "
                "the lengths of the documents of each row"
            ]
        empty = [row for row, lengths in enumerate(documents) if not lengths or min(lengths) < 1]
        if empty:
            return [
                f"documents of row {empty[0]} are {tuple(documents[empty[0]])} (Sequence axis): a row has at "
                "least one document, and a document at least one token; leave empty ones out"
            ]
        lengths = [sum(row) for row in documents]
        if min(lengths) != max(lengths):
            return [
                f"documents of the rows sum to {choices(sorted(set(lengths)))} tokens (Sequence axis): rows "
                "are equally long; give what fills a row up as a document of its own"
            ]
        own = self.place.tokens(documents)[self.place.ulysses.rank]
        given = {"queries": q.shape[1], "keys": k.shape[1], "values": v.shape[1]}
        return [
            f"{name} of {tokens} tokens of a row, of whose {lengths[0]} this rank has {own} "
            "(Sequence axis): give those where columns(documents) says, and the documents of whole rows"
            for name, tokens in given.items()
            if tokens != own
        ]

    def _head_problems(self, heads: int, kv_heads: int) -> list[str]:
        """Whether query heads share key/value heads equally, and the ranks of Ulysses can deal both."""
        if heads % kv_heads:
            return [
                f"{kv_heads} key/value heads do not divide the {heads} query heads (Sequence axis): "
                f"use {choices(divisors(heads))}"
            ]
        size = self.place.ulysses.size
        broken = ulysses_problems(heads, kv_heads, size)
        if not broken:
            return []
        ranks = self.place.ring.size * size
        fitting = [value for value in divisors(ranks) if not ulysses_problems(heads, kv_heads, value)]
        return [
            f"ulysses={size} {', and '.join(broken)} (Sequence axis): use {choices(fitting)} of the "
            f"{ranks} ranks, as in mesh.split('cp', {fitting[-1]})"
        ]


def _window_problems(window: int | None, causal: bool) -> list[str]:
    if window is None or (causal and window >= 1):
        return []
    if not causal:
        return [f"window={window} without causal order (Sequence axis): a window looks back; use window=None"]
    return [f"window={window} (Sequence axis): a token sees itself at least; use 1 or more, or None for all"]
