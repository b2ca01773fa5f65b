"""Messages between pipeline ranks: activations forward, their gradients backward."""

from collections.abc import Sequence

from torch import Tensor

from fourfold.collectives import Pending, recv_, send
from fourfold.layer.transfers import arrived
from fourfold.mesh import Axis, Mesh
from fourfold.program.actions import SENDS, Action, Kind
from fourfold.program.program import Program


class Transport:
    """Sends and receives what the SEND and RECV actions of a program say, for this rank.

    What was sent is kept until it has arrived: [Note: sent and gone].

    Every message has a number of its own, which gloo knows as its tag: whatever the order of arrival, it goes
    where it belongs. On NCCL, which knows none, an edge (sender, receiver, kind) has a communicator of its
    own, on which the program sends and receives in the same order: see [Note: messages in order].

    Args:
        mesh: the ranks. All of them make their transports at the same time.
        program: a step with all its messages; the same for all ranks.
    """

    def __init__(self, mesh: Mesh, program: Program):
        assert program.microbatches <= _MOST_MICROBATCHES
        self.program = program
        self._pp = mesh.pp
        pairs = {
            (rank, program.peer(action), action.kind.value)
            for rank, action in program.actions()
            if action.kind in SENDS
        }
        self._edges = mesh.edges(sorted(pairs))
        self._trains = any(kind == Kind.SEND_GRADIENT.value for _, _, kind in pairs)
        self._arrived = arrived(program, mesh.pp.rank)
        self._sends: dict[Action, Pending] = {}
        self._receives: dict[Action, Pending] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a message may still be read from a buffer, or written to one."""
        return bool(self._sends or self._receives)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send ``tensor``, which nobody may write to any more."""
        peer = self.program.peer(action)
        on_edge = [s for s in self._sends if s.kind is action.kind and self.program.peer(s) == peer]
        self._finish(on_edge[: -len(self.program.ranks)])  # [Note: sent and gone]
        axis, there = self._edge(action, self._pp.rank, peer)
        number = self._number(action)
        self._sends[action] = send(tensor, axis, destination=there, tag=number, blocking=False)

    def receive(self, action: Action, buffer: Tensor) -> None:
        """Start to receive into ``buffer``."""
        message = action.other_end
        axis, there = self._edge(message, self.program.peer(action), self._pp.rank)
        number = self._number(message)
        self._receives[action] = recv_(buffer, axis, source=there, tag=number, blocking=False)

    def wait_for(self, receive: Action) -> Tensor:
        """Return what a RECV brings, once it is here."""
        message = self._receives.pop(receive).wait()
        self._finish(self._arrived[self.program.user(receive)])  # [Note: sent and gone]
        return message

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self._finish(list(self._sends))

    def _finish(self, sends: Sequence[Action]) -> None:
        for action in sends:
            if (pending := self._sends.pop(action, None)) is not None:
                pending.wait()

    def _edge(self, message: Action, sender: int, receiver: int) -> tuple[Axis, int]:
        """What a SEND's message travels on, and the rank of the other end there."""
        axis = self._edges[sender, receiver, message.kind.value]
        other = receiver if sender == self._pp.rank else sender
        return axis, axis.ranks.index(self._pp.ranks[other])

    def _number(self, message: Action) -> int:
        """The number of a SEND among all of a step, and none that an evaluation has, nor the other way."""
        kind = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT).index(message.kind) if self._trains else 2
        return (kind * self.program.num_segments + message.segment) * _MOST_MICROBATCHES + message.microbatch


_MOST_MICROBATCHES = 2**16
"""In a step. Tags have 32 bits, which leaves room for thousands of segments."""
