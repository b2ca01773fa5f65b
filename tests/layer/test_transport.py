"""Messages on a communicator for each edge, as on NCCL, which knows no tags."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from fourfold.layer.schedules import schedule
from fourfold.layer.transfers import with_transfers
from fourfold.layer.transport import Transport
from fourfold.mesh import Mesh
from fourfold.program.actions import RECEIVES, SENDS
from fourfold.specs import Layout
from tests.ranks import RankPool


def values_received(name: str, layout: str) -> list[tuple[str, float]]:
    """Each message of a schedule carries its own number; what arrives, by the name of its RECV."""
    mesh = Mesh(Layout.parse(layout))
    program = with_transfers(schedule(name, ranks=mesh.pp.size, microbatches=3))
    with patch.object(dist, "get_backend", lambda group=None: "nccl"):
        transport = Transport(mesh, program)
    own = {(s, r, k): axis for (s, r, k), axis in transport._edges.items() if mesh.pp.rank in (s, r)}
    assert len({id(axis.group) for axis in own.values()}) == len(own), "edges share a communicator"
    numbers = {action: float(i) for i, (_, action) in enumerate(program.actions())}
    receives = []
    for action in program.ranks[mesh.pp.rank]:
        if action.kind in SENDS:
            transport.send(action, torch.tensor([numbers[action]]))
        elif action.kind in RECEIVES:
            transport.receive(action, torch.empty(1))
            receives.append(action)
    found = [(action, float(transport.wait_for(action))) for action in receives]
    transport.finish()
    assert not transport.is_busy
    assert all(value == numbers[action.other_end] for action, value in found)
    return [(str(action), value) for action, value in found]


def test_every_edge_has_a_communicator_of_its_own(ranks: RankPool) -> None:
    for name, layout, world_size in (("1f1b", "pp2", 2), ("interleaved2", "pp2", 2), ("zbv", "pp2,dp2", 4)):
        results = ranks(world_size, values_received, name, layout)
        assert all(results), "a rank received nothing"
