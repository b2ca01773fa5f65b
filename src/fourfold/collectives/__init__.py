"""Collectives: the only place that communicates.

Each takes tensors and a mesh axis; ranks in ``source`` and ``destination`` count within the axis. A strided
tensor is right everywhere, by way of a packed copy. On an axis of one rank nothing is sent and the result is
right. With ``blocking=False`` a collective returns a ``Pending`` whose ``wait`` gives the result.

All ranks of an axis call the same collectives in the same order, whatever their data.
``fourfold.collectives.differentiable`` has those through which gradients flow.
"""

from fourfold.collectives.agree import CollectiveMismatch, agreement
from fourfold.collectives.moves import all_gather, all_to_all, barrier, broadcast_, exchange_, recv_, send
from fourfold.collectives.pending import CollectiveError, Pending, Wait, log_waits
from fourfold.collectives.recorder import record
from fourfold.collectives.reductions import all_reduce_, reduce_, reduce_scatter

__all__ = [
    "CollectiveError",
    "CollectiveMismatch",
    "Pending",
    "Wait",
    "agreement",
    "all_gather",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast_",
    "exchange_",
    "log_waits",
    "record",
    "recv_",
    "reduce_",
    "reduce_scatter",
    "send",
]
