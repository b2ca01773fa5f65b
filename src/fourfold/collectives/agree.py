"""Debug mode: before a collective the ranks tell each other what they are about to do.

A backend trusts its callers. Tensors of other shapes or types on other ranks give wrong numbers, a hang, or
the end of a process without a Python error. In debug mode, which FOURFOLD_DEBUG=1 turns on for all ranks, a
mismatch is an error on every rank of the axis instead, after which the axis cannot be used any more. It
costs a message of a few hundred bytes a collective.

What it cannot see: ranks that wait on different axes, or one in a collective and one in a send. These end
with the timeout of the process group.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fourfold.collectives import backend
from fourfold.collectives.pending import CollectiveError, naming
from fourfold.collectives.recorder import dtype_name
from fourfold.mesh import Axis

# Every description has this size, so that ranks that disagree can still exchange theirs.
DESCRIPTION_BYTES = 256

# How many debug contexts are open; the environment opens one for the whole process.
_open = 1 if os.environ.get("FOURFOLD_DEBUG") == "1" else 0


class CollectiveMismatch(CollectiveError):
    """Ranks came to a collective with different operations, shapes or types."""


@contextmanager
def agreement() -> Iterator[None]:
    """Turn debug mode on in this context, which every rank must enter alike."""
    global _open
    _open += 1
    try:
        yield
    finally:
        _open -= 1


def active() -> bool:
    """Return whether debug mode is on."""
    return _open > 0


def describe(dtype: torch.dtype, shape: Sequence[int], details: str = "") -> str:
    """Return what ranks compare: ``float32 (4, 3) op=sum``."""
    return f"{dtype_name(dtype)} {tuple(shape)} {details}".rstrip()


def check(op: str, axis: Axis, device: torch.device, description: str) -> None:
    """Raise ``CollectiveMismatch`` on all ranks of the axis unless all come with the same."""
    descriptions = _gather_texts(op, axis, device, f"{op} {description}".rstrip())
    if len(set(descriptions)) > 1:
        lines = [f"  rank {rank}: {text}" for rank, text in zip(axis.ranks, descriptions, strict=True)]
        raise CollectiveMismatch(f"ranks disagree on axis {axis.name}, here in {op}:\n" + "\n".join(lines))


def check_counts(axis: Axis, device: torch.device, send: Sequence[int], receive: Sequence[int]) -> None:
    """Raise on all ranks unless every rank receives as many rows as the others send it."""
    mine = torch.tensor([*send, *receive], dtype=torch.int64, device=device)
    table = mine.new_empty(axis.size * mine.numel())
    _finish("all_to_all", axis, lambda: backend.all_gather(mine, axis, table, None))
    sent, expected = table.view(axis.size, 2, axis.size).unbind(1)
    wrong = [
        f"  rank {axis.ranks[i]} sends {sent[i, j]} rows, rank {axis.ranks[j]} expects {expected[j, i]}"
        for i, j in (sent != expected.T).nonzero().tolist()
    ]
    if wrong:
        raise CollectiveMismatch(f"ranks disagree on axis {axis.name}, in all_to_all:\n" + "\n".join(wrong))


def announce(axis: Axis, peer: int, device: torch.device, description: str, tag: int) -> Callable[[], None]:
    """Tell a peer what comes, and return a function that raises where it expects something else.

    The peer's answer is not awaited here, since it may itself be sending: both sides would wait for ever. It
    is taken in the background, since the peer waits for that.
    """
    answer = torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8, device=device)
    works, _ = backend.send(_encode(description, device), axis, peer, tag, backend.Part.ANNOUNCEMENT)
    works += backend.receive(answer, axis, peer, tag, backend.Part.ANSWER)[0]

    def hear_answer() -> None:
        for work in works:
            work.wait()
        _compare(axis, axis.rank, description, peer, _decode(answer))

    return hear_answer


def answer(axis: Axis, peer: int, device: torch.device, description: str, tag: int) -> None:
    """Hear from a peer what comes, answer with what is expected, and raise where they differ."""
    announced = torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8, device=device)
    _finish("recv", axis, lambda: backend.receive(announced, axis, peer, tag, backend.Part.ANNOUNCEMENT))
    _finish(
        "recv", axis, lambda: backend.send(_encode(description, device), axis, peer, tag, backend.Part.ANSWER)
    )
    _compare(axis, peer, _decode(announced), axis.rank, description)


def check_messages(axis: Axis, sent: Mapping[int, str], received: Mapping[int, str]) -> None:
    """Raise on both ends of a message, by rank of the axis, unless they expect the same of it."""
    place = backend.device(axis)
    peers = sorted({*sent, *received})
    mine = {
        peer: torch.cat([_encode(messages.get(peer, "nothing"), place) for messages in (sent, received)])
        for peer in peers
    }
    theirs = {peer: torch.empty_like(mine[peer]) for peer in peers}
    _finish("exchange", axis, lambda: (backend.exchange(mine, theirs, axis), lambda: torch.empty(0)))
    for peer, table in theirs.items():
        their_sent, their_received = (_decode(row) for row in table.view(2, -1))
        _compare(axis, axis.rank, sent.get(peer, "nothing"), peer, their_received)
        _compare(axis, peer, their_sent, axis.rank, received.get(peer, "nothing"))


def _compare(axis: Axis, sender: int, sent: str, receiver: int, expected: str) -> None:
    if sent != expected:
        raise CollectiveMismatch(
            f"ranks disagree on axis {axis.name}, in send and recv:\n"
            f"  rank {axis.ranks[sender]} sends {sent}\n  rank {axis.ranks[receiver]} expects {expected}"
        )


def _gather_texts(op: str, axis: Axis, device: torch.device, text: str) -> list[str]:
    table = torch.empty(axis.size * DESCRIPTION_BYTES, dtype=torch.uint8, device=device)
    _finish(op, axis, lambda: backend.all_gather(_encode(text, device), axis, table, None))
    return [_decode(row) for row in table.view(axis.size, -1)]


def _finish(op: str, axis: Axis, start: Callable[[], backend.Started]) -> None:
    """Start a message of debug mode and wait for its end."""
    with naming(op, axis):
        works, finish = start()
        for work in works:
            work.wait()
        finish()


def _encode(text: str, device: torch.device) -> Tensor:
    """Return a text as bytes of the fixed size; of a longer one the end is replaced by a checksum."""
    data = text.encode()
    if len(data) > DESCRIPTION_BYTES:
        mark = f"... (checksum {zlib.crc32(data):08x})".encode()
        data = data[: DESCRIPTION_BYTES - len(mark)] + mark
    return torch.tensor(list(data.ljust(DESCRIPTION_BYTES, b"\0")), dtype=torch.uint8, device=device)


def _decode(row: Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
