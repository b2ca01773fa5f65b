"""Messages between pipeline ranks: activations forward, their gradients backward."""

from torch import Tensor

from fourfold.collectives import Pending, recv_, send
from fourfold.mesh import Axis, Mesh
from fourfold.program.actions import SENDS, Action, Kind
from fourfold.program.program import Program


class Transport:
    """Sends and receives what the SEND and RECV actions of a program say, for this rank.

    Every message has a number of its own, which gloo knows as its tag: whatever the order of arrival, it goes
    where it belongs. On NCCL, which knows none, an edge (sender, receiver, kind) has a communicator of its
    own, on which the program sends and receives in the same order: see [Note: messages in order].

    Args:
        mesh: the ranks. All of them make their transports at the same time.
        program: a step with all its messages; the same for all ranks.
    """

    def __init__(self, mesh: Mesh, program: Program):
        assert program.microbatches <= _MOST_MICROBATCHES
        self._program = program
        self._pp = mesh.pp
        pairs = {
            (rank, program.peer(action), action.kind.value)
            for rank, action in program.actions()
            if action.kind in SENDS
        }
        self._edges = mesh.edges(sorted(pairs))
        self._trains = any(kind == Kind.SEND_GRADIENT.value for _, _, kind in pairs)

    def send(self, action: Action, tensor: Tensor) -> Pending:
        """Start to send ``tensor``; it must stay as it is until the end has been waited for."""
        axis, there = self._edge(action, self._pp.rank, self._program.peer(action))
        return send(tensor, axis, destination=there, tag=self._number(action), blocking=False)

    def receive(self, action: Action, buffer: Tensor) -> Pending:
        """Start to receive into ``buffer``."""
        message = action.other_end
        axis, there = self._edge(message, self._program.peer(action), self._pp.rank)
        return recv_(buffer, axis, source=there, tag=self._number(message), blocking=False)

    def _edge(self, message: Action, sender: int, receiver: int) -> tuple[Axis, int]:
        """What a SEND's message travels on, and the rank of the other end there."""
        axis = self._edges[sender, receiver, message.kind.value]
        other = receiver if sender == self._pp.rank else sender
        return axis, axis.ranks.index(self._pp.ranks[other])

    def _number(self, message: Action) -> int:
        """The number of a SEND among all of a step, and none that an evaluation has, nor the other way."""
        kind = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT).index(message.kind) if self._trains else 2
        return (kind * self._program.num_segments + message.segment) * _MOST_MICROBATCHES + message.microbatch


_MOST_MICROBATCHES = 2**16
"""In a step. Tags have 32 bits, which leaves room for thousands of segments."""
