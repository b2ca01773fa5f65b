"""A collective as data: which op, over which axis, how many bytes; what it sends and how long it takes.

The running code records these events and the planner predicts them, so both use this file.

What ``Event.bytes`` counts is always the whole message, whatever a rank holds of it:

| op | bytes |
|---|---|
| all_reduce, broadcast, reduce, send, recv | the tensor |
| all_gather | the gathered tensor |
| reduce_scatter | the tensor before it is scattered |
| all_to_all | all that this rank hands in, its own part included |
| barrier | 0 |
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One collective of one rank: the op, the name of the mesh axis, the message in bytes, its dtype."""

    op: str
    axis: str
    bytes: int
    dtype: str


def sent_bytes(event: Event, axis_size: int) -> float:
    """Return the bytes that a rank puts on the wire with a bandwidth-optimal algorithm.

    Where ranks differ (broadcast, reduce) it is the most that any of them sends: in a chain, the whole
    message. Source: Chan et al. 2007, "Collective communication: theory, practice, and experience".
    """
    others = (axis_size - 1) / axis_size  # the part of a message that is not for oneself
    factors = {
        "all_reduce": 2 * others,
        "reduce_scatter": others,
        "all_gather": others,
        "all_to_all": others,
        "broadcast": 1.0 if axis_size > 1 else 0.0,
        "reduce": 1.0 if axis_size > 1 else 0.0,
        "send": 1.0,
        "recv": 0.0,
        "barrier": 0.0,
    }
    return factors[event.op] * event.bytes


def rounds(op: str, ranks: int) -> int:
    """How many messages of a collective come one after another, each of which takes a latency.

    Those of a ring, as NCCL sends large messages; the sum over all goes over a tree and back where that is
    fewer.
    """
    ring, tree = ranks - 1, math.ceil(math.log2(ranks))
    return {"all_reduce": 2 * min(ring, tree), "send": 1, "recv": 1, "barrier": tree}.get(op, ring)


def seconds(event: Event, axis_size: int, *, bytes_per_second: float, latency_seconds: float) -> float:
    """Return the time of a collective: a latency for each round, and its bytes at the speed of the link.

    ``bytes_per_second`` is what a rank can send in one direction while it receives as much.
    """
    on_the_link = event.bytes if event.op == "recv" else sent_bytes(event, axis_size)
    return rounds(event.op, axis_size) * latency_seconds + on_the_link / bytes_per_second


def counted(events: Iterable[Event]) -> dict[tuple[str, str], tuple[int, int]]:
    """How many events there are of each op and axis, and the bytes of their messages."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for event, times in Counter(events).items():  # most are alike
        calls, size = found.get((event.op, event.axis), (0, 0))
        found[event.op, event.axis] = calls + times, size + times * event.bytes
    return found


def heads_sent(heads: int, kv_heads: int, *, ring: int, ulysses: int, window: float | None = None) -> float:
    """Return how many heads of its own tokens a rank sends for a layer, forward and backward.

    The mean over ranks, where all documents are long and cut zigzag. Times tokens, channels of a head and
    bytes of an element it is what is sent.

    Args:
        heads: query heads of a rank before any exchange, and ``kv_heads`` key/value heads.
        ring: how many ranks the ring has, and ``ulysses`` how many exchange tokens for heads.
        window: how far back a token sees besides itself, as a share of its document; None for all.
    """
    with_copies = kv_heads * max(1, ulysses // kv_heads)
    exchanged = 4 * (heads + with_copies) * (ulysses - 1) / ulysses
    # Keys and values forward; backward once more, and their gradients.
    return exchanged + 6 * keys_sent(ring, window) * with_copies


def keys_sent(ring: int, window: float | None = None) -> float:
    """Return how many tokens' keys a rank of a ring sends, by how many it has; arguments as of `heads_sent`.

    The mean over ranks. Chunk i of the 2 R of a document is on rank i or 2 R - 1 - i. A rank gets of a chunk
    what the nearest of its later ones sees: all of it, or with a window the end.
    """
    if window is None or window >= 1:
        return 0.75 * (ring - 1)
    size, sent = 1 / (2 * ring), 0.0
    for chunk in range(2 * ring):
        readers = {min(chunk, 2 * ring - 1 - chunk)}
        for reader in range(chunk + 1, min(2 * ring, chunk + 2 + int(window / size))):
            rank = min(reader, 2 * ring - 1 - reader)
            if rank not in readers:
                readers.add(rank)
                sent += max(0.0, min(size, window - (reader - chunk - 1) * size))
    return sent
