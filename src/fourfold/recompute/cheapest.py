"""The cheapest plans of a chain of blocks, by how much memory there is: [Note: one planner], solved."""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from fourfold.program.liveness import Block
from fourfold.recompute.plan import Choice, Plan, unrolled

_Costs = NDArray[np.float64]
"""By memory to spare, in steps: the time of the forwards; infinite where that is not enough."""


class Cheapest:
    """The cheapest choices for a chain, for any memory to spare up to some steps.

    Args:
        chain: with sizes in steps.
        steps: the most memory to spare, beside the chain's input.
        keep_tapes: whether a block may leave its tape early.
    """

    def __init__(self, chain: Sequence[Block], *, steps: int, keep_tapes: bool):
        self._chain = chain
        self._steps = steps
        self._keep_tapes = keep_tapes
        self._costs: dict[tuple[int, int], _Costs] = {}
        self._cuts: dict[tuple[int, int], NDArray[np.int32]] = {}
        for length in range(1, len(chain) + 1):
            for i in range(len(chain) - length + 1):
                self._solve(i, i + length)

    def _solve(self, i: int, j: int) -> None:
        """Find the cost of going back over the blocks from i up to j, and the first cut (0: a tape)."""
        chain = self._chain
        if i and chain[i - 1 : j - 1] == chain[i:j]:  # blocks are mostly alike
            self._costs[i, j], self._cuts[i, j] = self._costs[i - 1, j - 1], self._cuts[i - 1, j - 1]
            return
        best = np.full(self._steps + 1, inf)
        cuts = np.zeros(self._steps + 1, dtype=np.int32)
        here = chain[i]
        if j == i + 1:
            best[max(here.tape_bytes - here.input_bytes, 0) :] = here.forward_seconds
        elif self._keep_tapes:
            taken = max(here.tape_bytes - here.input_bytes, 0) + chain[i + 1].input_bytes
            best = here.forward_seconds + _shifted(self._costs[i + 1, j], taken)
        run, widest = 0.0, 0
        for k in range(i + 1, j):
            run += chain[k - 1].forward_seconds
            widest = max(widest, chain[k].input_bytes)
            cost = run + _shifted(self._costs[k, j], chain[k].input_bytes) + self._costs[i, k]
            cost[:widest] = inf
            better = cost < best
            best = np.where(better, cost, best)
            cuts[better] = k - i
        self._costs[i, j], self._cuts[i, j] = best, cuts

    def _choice(self, spare: int) -> Choice:
        """The choices of a span of blocks with so much to spare, and of the spans inside it."""
        memory: dict[tuple[int, int], int] = {}

        def choice(i: int, j: int) -> int | None:
            m = memory.setdefault((i, j), spare)
            cut = int(self._cuts[i, j][m])
            if cut:
                memory[i + cut, j] = m - self._chain[i + cut].input_bytes
                memory[i, i + cut] = m
                return i + cut
            tape = max(self._chain[i].tape_bytes - self._chain[i].input_bytes, 0)
            memory[i + 1, j] = m - tape - self._chain[i + 1].input_bytes
            return None

        return choice

    def cost(self, *, held: int | None, steps: int) -> float:
        """The time of what `plan` computes again; infinite where the memory is not enough."""
        if held is None:
            return float(self._costs[0, len(self._chain)][steps])
        return float(self._left(held, steps - held)[0][0][held])

    def plan(self, *, held: int | None, steps: int) -> Plan:
        """Write out the cheapest plan.

        Args:
            held: what the forward may leave, beside the chain's input; None where the backward follows at
                once.
            steps: what there is to spare then, what the forward left included.
        """
        blocks = len(self._chain)
        if held is None:
            return unrolled(self._choice(steps), blocks)
        slack = steps - held
        _, stops = self._left(held, slack)
        left, choices = [], []
        i, m = 0, held
        while i < blocks:
            stop = int(stops[i][m])
            if stop:
                left.append((i, stop))
                choices.append(self._choice(m + slack))
                m -= self._chain[stop].input_bytes if stop < blocks else 0
                i = stop
            else:
                m -= self._kept(i)
                i += 1
        return unrolled(choices[-1] if choices else self._choice(0), blocks, left, choices)

    def _kept(self, i: int) -> int:
        """Steps that block i's tape takes beside its input, and the next one's input."""
        here = self._chain[i]
        following = self._chain[i + 1].input_bytes if i + 1 < len(self._chain) else 0
        return max(here.tape_bytes - here.input_bytes, 0) + following

    def _left(self, held: int, slack: int) -> tuple[list[_Costs], list[NDArray[np.int32]]]:
        """The cost of going back over the blocks from i on, by what the forward may still leave.

        Also where the span from i ends that leaves its input (0: i leaves its tape). Going back over a span
        there is as much to spare as is left on its right, and what nothing was left in.
        """
        blocks = len(self._chain)
        costs = [np.zeros(held + 1)] * (blocks + 1)
        stops = [np.zeros(held + 1, dtype=np.int32)] * blocks
        for i in reversed(range(blocks)):
            best = _shifted(costs[i + 1], self._kept(i)) if self._keep_tapes else np.full(held + 1, inf)
            stop = np.zeros(held + 1, dtype=np.int32)
            for k in range(blocks, i, -1):
                taken = self._chain[k].input_bytes if k < blocks else 0
                cost = _shifted(costs[k], taken) + self._costs[i, k][slack : slack + held + 1]
                better = cost < best
                best = np.where(better, cost, best)
                stop[better] = k
            costs[i], stops[i] = best, stop
        return costs, stops


def _shifted(costs: _Costs, steps: int) -> _Costs:
    """The costs where ``steps`` of the memory are taken."""
    if steps == 0:
        return costs
    found = np.full(len(costs), inf)
    found[steps:] = costs[: max(len(costs) - steps, 0)]
    return found
