"""Attention over ranks as an operation that PyTorch knows by name: `fourfold::context_attention`.

torch.compile takes it into a graph as it stands. Selective recomputation may keep its results by the name of
`torch.ops.fourfold.context_attention.default`: all that the backward needs, beside the op's arguments, is
among them, so neither attention nor its messages run again.

[Note: by number] The arguments of an op are tensors and numbers. So it is told its ranks by the number of a
`Place`, and the documents as one list of all rows' lengths: rows are equally long, so it can be cut again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fourfold.attention_engine import Forward
from fourfold.mesh import Axis
from fourfold.sequence.partition import tokens_of_ranks
from fourfold.sequence.ring import Around, ring_backward, ring_forward
from fourfold.sequence.rows import Documents, Ring
from fourfold.sequence.sinks import sinks_gradient, with_sinks
from fourfold.sequence.ulysses import copied, copies_of_heads, from_heads, summed_copies, to_heads

_numbers = count()
_places: WeakValueDictionary[int, "Place"] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Place:
    """The ranks that attend together, as this one sees them.

    Attributes:
        ring: the ranks between which keys and values travel.
        ulysses: the ranks that exchange tokens for heads.
        causal: whether a token sees only itself and those before it.
        number: what the op knows it by, for as long as it is held; see [Note: by number].
    """

    ring: Axis
    ulysses: Axis
    causal: bool
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _places[self.number] = self

    def around(self, documents: Documents, window: int | None) -> Around:
        """The attention around the ring."""
        return Around(self.ring, Ring(self.ring.size, self.causal, window), documents)

    def tokens(self, documents: Documents) -> list[int]:
        """How many tokens of a row each rank of Ulysses holds, in this rank's part of the ring."""
        of_the_group = tokens_of_ranks(sum(documents[0]), self.ring.size)[self.ring.rank]
        return tokens_of_ranks(of_the_group, self.ulysses.size)

    def of_this_rank(self, sinks: Tensor) -> Tensor:
        """The sinks of this rank's heads, of those of all."""
        return sinks.chunk(self.ulysses.size)[self.ulysses.rank]

    def split(self, exchanged: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        """Queries, keys and values of this rank's heads; the numbers are those before the exchange."""
        kv = kv_heads * copies_of_heads(kv_heads, self.ulysses.size) // self.ulysses.size
        return exchanged.split([heads // self.ulysses.size, kv, kv], 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: int,
    documents: Sequence[int],
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the attention of this rank's queries (B, S, H, D), and what the backward needs.

    That is the log-sum-exp (B, H, S) in float32 or higher and, where heads are exchanged, queries, keys and
    values of all tokens and this rank's heads side by side, and the output of the same. S, H are of those.
    """
    at, whole = _places[place], _rows(tuple(documents), q.shape[0])
    around = at.around(whole, window)
    if at.ulysses.size == 1:
        out, lse = ring_forward(q, k, v, around=around, scale=scale)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return out.contiguous(), lse.contiguous(), q.new_empty(0), q.new_empty(0)
    tokens = at.tokens(whole)
    exchanged = to_heads([q, copied(k, at.ulysses.size), copied(v, at.ulysses.size)], at.ulysses, tokens)
    parts = at.split(exchanged, q.shape[2], k.shape[2])
    attended, lse = ring_forward(*parts, around=around, scale=scale)
    if sinks is not None:
        attended, lse = with_sinks(attended, lse, at.of_this_rank(sinks))
    (out,) = from_heads([attended], at.ulysses, tokens)
    return out, lse.contiguous(), exchanged, attended.contiguous()


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_heads: int,
    place: int,
    documents: Sequence[int],
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys, values and of the sinks, from that of its output.

    The other tensors are of this rank's heads; ``kv_heads`` is how many there were before any exchange. The
    sinks are those of all heads, and their gradient is 0 for heads of other ranks; without sinks it is empty.
    """
    at, whole = _places[place], _rows(tuple(documents), q.shape[0])
    tokens = at.tokens(whole)
    if at.ulysses.size > 1:
        grad = to_heads([grad], at.ulysses, tokens)
    dsinks = lse.new_empty(0)
    if sinks is not None:
        dsinks = torch.zeros_like(sinks)
        at.of_this_rank(dsinks).copy_(sinks_gradient(grad, out, lse, at.of_this_rank(sinks)))
    found = ring_backward(
        grad if grad.stride(-1) == 1 else grad.contiguous(),
        Forward(q, k, v, out, lse),
        around=at.around(whole, window),
        scale=scale,
    )
    if at.ulysses.size > 1:
        dq, dk, dv = from_heads(found, at.ulysses, tokens)
        found = dq, summed_copies(dk, kv_heads), summed_copies(dv, kv_heads)
    dq, dk, dv = (gradient.contiguous() for gradient in found)
    return dq, dk, dv, dsinks


context_attention = torch.library.custom_op("fourfold::context_attention", _attend, mutates_args=())
context_attention_backward = torch.library.custom_op(
    "fourfold::context_attention_backward", _attend_backward, mutates_args=()
)

INSIDE: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.ops.fourfold.context_attention.default: _attend,
    torch.ops.fourfold.context_attention_backward.default: _attend_backward,
}
"""What the ops run, for a dispatch mode that is to see the operations inside of them."""


@context_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: int,
    documents: Sequence[int],
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    at = _places[place]
    high = torch.promote_types(q.dtype, torch.float32)
    B, S, H, D = q.shape
    if at.ulysses.size == 1:
        return q.new_empty(B, S, H, D), q.new_empty(B, H, S, dtype=high), q.new_empty(0), q.new_empty(0)
    S = sum(at.tokens(_rows(tuple(documents), B)))
    kv = k.shape[2] * copies_of_heads(k.shape[2], at.ulysses.size)
    H, together = H // at.ulysses.size, (H + 2 * kv) // at.ulysses.size
    return (
        q.new_empty(q.shape),
        q.new_empty(B, H, S, dtype=high),
        q.new_empty(B, S, together, D),
        q.new_empty(B, S, H, D),
    )


@context_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_heads: int,
    place: int,
    documents: Sequence[int],
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys = (*grad.shape[:2], kv_heads, grad.shape[3])
    dsinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return grad.new_empty(grad.shape), grad.new_empty(keys), grad.new_empty(keys), dsinks


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, place, documents, window, scale, sinks = inputs
    out, lse, exchanged, attended = output
    ctx.kv_heads, ctx.rest = k.shape[2], (place, documents, window, scale)
    ctx.set_materialize_grads(False)
    at = _places[place]
    ctx.held = at  # the backward finds it by number, though who made it may be gone by then
    if at.ulysses.size > 1:
        q, k, v = at.split(exchanged, q.shape[2], k.shape[2])
        out = attended
    ctx.save_for_backward(q, k, v, out, lse, sinks)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    *saved, sinks = ctx.saved_tensors
    *found, dsinks = context_attention_backward(grad, *saved, ctx.kv_heads, *ctx.rest, sinks)
    return *found, None, None, None, None, None if sinks is None else dsinks


context_attention.register_autograd(_backward, setup_context=_setup)


@lru_cache(maxsize=4096)
def _rows(lengths: tuple[int, ...], rows: int) -> Documents:
    """Cut the lengths of all documents into rows of equally many tokens."""
    row = sum(lengths) // rows
    ends = [stop for stop, total in enumerate(accumulate(lengths), 1) if total % row == 0]
    return tuple(lengths[start:stop] for start, stop in zip([0, *ends], ends, strict=False))
