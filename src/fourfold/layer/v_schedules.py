"""Schedules over two stages a rank in a V: down the ranks and up again. The first rank holds both ends."""

from collections import Counter

from fourfold.layer.list_scheduling import list_schedule, over_stages, v_placement
from fourfold.program.actions import Action, Kind
from fourfold.program.clock import Times
from fourfold.program.program import Program


class _Order:
    """The order of one rank, written down; each stage takes the microbatches in turn."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.deferred: list[tuple[int, int]] = []

    def forward(self, stage: int) -> None:
        """The next forward of a stage."""
        self._next(Kind.FORWARD, Kind.FORWARD, stage)

    def backward(self, stage: int) -> None:
        """The next backward of a stage, whole."""
        self._next(Kind.BACKWARD, Kind.BACKWARD, stage)

    def input_gradient(self, stage: int) -> None:
        """The next backward of a stage, its weight gradient deferred."""
        self.deferred.append((stage, self.done[Kind.BACKWARD, stage]))
        self._next(Kind.INPUT_GRADIENT, Kind.BACKWARD, stage)

    def weight_gradient(self, stage: int | None = None) -> None:
        """The weight gradient that was deferred first, of one stage or of any."""
        found = next(pair for pair in self.deferred if stage in (None, pair[0]))
        self.deferred.remove(found)
        self.actions.append(Action(Kind.WEIGHT_GRADIENT, *found))

    def _next(self, kind: Kind, counted: Kind, stage: int) -> None:
        self.actions.append(Action(kind, stage, self.done[counted, stage]))
        self.done[counted, stage] += 1


def zero_bubble_v(*, ranks: int, microbatches: int) -> Program:
    """ZBV (Qi et al. 2024): the zero bubble with P microbatches in flight, on two stages a rank in a V.

    Where F = I = W and M >= 2P-1 the bubble is (P-1)F/2, and a rank never stands idle between its own first
    and last action.
    """
    if microbatches < 2 * ranks - 1:
        return _few_in_a_v(ranks, microbatches, most_in_flight=2 * ranks)
    orders = []
    for rank in range(ranks):
        down, up, order = rank, 2 * ranks - 1 - rank, _Order()
        for _ in range(2 * (ranks - rank) - 1):
            order.forward(down)
        for _ in range(rank):
            order.forward(up)
            order.forward(down)
        for turn in range(microbatches - rank):
            if turn >= ranks - rank:  # the first microbatch has come back
                if order.done[Kind.FORWARD, down] < microbatches:
                    order.forward(down)
                order.input_gradient(down)
                order.weight_gradient(down)
            order.forward(up)
            order.input_gradient(up)
            order.weight_gradient(up)
        for _ in range(rank):
            order.input_gradient(down)
            order.input_gradient(up)
        for _ in range(ranks - rank):
            order.input_gradient(down)
            order.weight_gradient(down)
        for stage in (up, down):
            for _ in range(rank):
                order.weight_gradient(stage)
        orders.append(order.actions)
    return over_stages(orders, v_placement(ranks), microbatches)


def dual_pipe_v(*, ranks: int, microbatches: int) -> Program:
    """DualPipeV (DeepSeek 2025): forwards of one stage and backwards of the other in turn, in a V.

    Holds P + 1/2 microbatches; bubble (P-1)F/2 where F = I = W and M >= 2P. The original runs a forward
    and a backward of different microbatches at the same time; here one follows the other.
    """
    if microbatches < 2 * ranks:
        return _few_in_a_v(ranks, microbatches, most_in_flight=2 * ranks + 1)
    orders = []
    for rank in range(ranks):
        down, up, order = rank, 2 * ranks - 1 - rank, _Order()
        behind = ranks - 1 - rank
        for _ in range(2 * behind):
            order.forward(down)
        for _ in range(rank + 1):
            order.forward(down)
            order.forward(up)
        for _ in range(behind):
            order.input_gradient(up)
            order.weight_gradient()
            order.forward(up)
        for turn in range(microbatches - ranks):
            if turn < microbatches - 2 * ranks + rank + 1:
                order.forward(down)
            order.backward(up)
            order.forward(up)
            order.backward(down)
        for turn in range(2 * (rank + 1)):  # the second half of these in halves
            stage = down if turn % 2 else up
            (order.backward if turn <= rank else order.input_gradient)(stage)
        for _ in range(behind):
            order.weight_gradient()
            order.input_gradient(down)
        for _ in range(rank + 1):
            order.weight_gradient()
        orders.append(order.actions)
    return over_stages(orders, v_placement(ranks), microbatches)


def _few_in_a_v(ranks: int, microbatches: int, *, most_in_flight: int) -> Program:
    """Too few microbatches for the pattern to begin: what list scheduling finds with F = I = W."""
    found = list_schedule(
        v_placement(ranks), microbatches=microbatches, most_in_flight=most_in_flight, times=Times()
    )
    assert found is not None
    return found.program()
