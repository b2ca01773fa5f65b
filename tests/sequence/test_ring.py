"""What a ring puts on the wire: groups that NCCL could run, and no key that nobody reads."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fourfold.collectives import backend, record
from fourfold.collectives.pending import Work
from fourfold.mesh import Axis, Mesh
from fourfold.sequence.attention import ContextAttention
from fourfold.sequence.rows import Documents, Ring
from fourfold.specs import Layout
from fourfold.traffic import Event
from tests.ranks import RankPool

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""To which ranks one group of messages sends, and from which it receives."""

LONG = ((24, 24, 24), (72,), (5, 67))


def forward_and_backward(documents: Documents) -> Axis:
    mesh = Mesh(Layout(cp=torch.distributed.get_world_size()))
    ring, alone = mesh.split("cp", 1)
    attend = ContextAttention(ring=ring, ulysses=alone)
    tokens = sum(len(run) for run in attend.columns(documents)[0])
    q, k, v = (torch.randn(len(documents), tokens, 2, 4).requires_grad_() for _ in range(3))
    attend(q, k, v, documents=documents, window=None, scale=1.0).sum().backward()
    return ring


def groups_of_a_rank(documents: Documents) -> list[Group]:
    """Those started, in order; a message outside of a group is an error."""
    found: list[Group] = []
    start = backend.exchange

    def watched(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], axis: Axis) -> list[Work]:
        if sent or received:
            found.append((tuple(sent), tuple(received)))
        return start(sent, received, axis)

    def alone(*args: object) -> None:
        raise AssertionError("a message outside of a group")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "exchange", watched)
        patch.setattr(backend, "send", alone)
        patch.setattr(backend, "receive", alone)
        forward_and_backward(documents)
    return found


def can_end(groups: list[list[Group]]) -> bool:
    """Whether all groups end where each rank runs one at a time, and a message needs both of its ends."""
    at = [0] * len(groups)
    left = [[list(map(set, group)) for group in of_a_rank] for of_a_rank in groups]
    moved = True
    while moved:
        moved = False
        for rank, of_a_rank in enumerate(left):
            if at[rank] == len(of_a_rank):
                continue
            sends, receives = of_a_rank[at[rank]]
            for peer in list(sends):
                if at[peer] < len(left[peer]) and rank in left[peer][at[peer]][1]:
                    sends.remove(peer)
                    left[peer][at[peer]][1].remove(rank)
                    moved = True
            if not sends and not receives:
                at[rank] += 1
                moved = True
    return at == [len(of_a_rank) for of_a_rank in groups]


@pytest.mark.parametrize("documents", [((48,),), LONG, ((3,) * 16,), ((1, 40, 7),)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_go_in_groups_that_end_in_their_order(
    ranks: RankPool, world_size: int, documents: Documents
) -> None:
    """NCCL runs the groups of a rank one after another, on all ranks at their own pace."""
    groups = ranks(world_size, groups_of_a_rank, documents)
    assert can_end(groups)
    if documents == ((48,),):
        assert [len(of_a_rank) for of_a_rank in groups] == [3 * (world_size - 1)] * world_size


def test_receive_first_then_send_would_not_end() -> None:
    assert not can_end([[((), (1,)), ((1,), ())], [((), (0,)), ((0,), ())]])
    assert can_end([[((1,), (1,))], [((0,), (0,))]])


def keys_sent(documents: Documents) -> tuple[list[Event], int]:
    with record() as events:
        rank = forward_and_backward(documents).rank
    return [event for event in events if event.op == "send"], rank


def test_keys_that_nobody_reads_stay(ranks: RankPool) -> None:
    """Of three long documents an earlier rank needs the chunks of later ones, not what lies between."""
    token_bytes = 2 * 2 * 4 * 4
    for events, rank in ranks(4, keys_sent, ((48, 48, 48),)):
        # A chunk of a document has 6 tokens. Rank r sends both of its chunks to earlier ranks, and to later
        # ones the first. All of that once as keys forward, once backward; as much comes back as gradients.
        tokens = 3 * 6 * (2 * rank + (3 - rank))
        received = 3 * 6 * sum(2 if source > rank else 1 for source in range(4) if source != rank)
        assert sum(event.bytes for event in events) == (2 * tokens + received) * token_bytes
    ring = Ring(4, causal=True, window=None)
    (needed,) = ring.needed(((48, 48, 48),), 2, 1)
    assert needed.runs == ((0, 6), (12, 18), (24, 30))
    assert needed.place(13) == 7
