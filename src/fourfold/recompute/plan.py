"""The planner of activation checkpointing: which blocks of a chain are computed again, and when.

A stage is a chain of blocks, each with an input and a *tape*: what its forward keeps for its backward. A plan
says, for each block, which blocks are computed again right before its backward. What is kept meanwhile
follows from that: a block's last forward before its backward leaves the tape, an input stays until it is used
for the last time (`fourfold.program.liveness`).

[Note: one planner] Going back over the blocks i to j, with the input of i kept and m bytes to spare, there
are two ways. Either block i leaves its tape now, and its backward comes after all others. Or the blocks i to
k - 1 run and leave nothing but the input of k; the blocks from k on are gone back over with what is left to
spare, and then i to k - 1 with all of it. The cheapest choice is a recursion over (i, j, m): Beaumont et al.
2019 ("Rotor") for any times and sizes; with blocks alike and no tape kept early, the binomial checkpoints of
Griewank and Walther 2000 ("Revolve"). Every policy is such a tree of choices:

- ``every:k`` cuts after each k blocks and lets them leave their tapes together; ``full`` is ``every:1``,
  ``sqrt`` is ``every:k`` with k the root of the number of blocks;
- ``slots:s`` takes the cheapest choices with s inputs kept, the chain's own included, and one tape;
  ``min`` is ``slots:1``;
- ``budget`` takes the cheapest choices within so many bytes (`fourfold.recompute.budget`);
- ``selective`` is ``full``, with results kept inside each block (`fourfold.kept`).

[Note: at once] Where the backward follows right after the forward, the forward itself is the first part of
the plan: the last blocks leave their tapes at once. Where other work comes between, as in a pipeline, what
the forward leaves is held all that time, for each microbatch on its way. Then the forward leaves inputs (and
with a budget, tapes) only as far as the policy allows, and the last blocks run again like the others.
"""

from collections.abc import Callable, Sequence
from math import inf, isqrt

import numpy as np
from numpy.typing import NDArray

from fourfold.program.liveness import Block
from fourfold.specs.recompute_name import RecomputeName

Plan = tuple[tuple[int, ...], ...]
"""For each block, the blocks that are computed again right before its backward, in order."""

Choice = Callable[[int, int], int | None]
"""Of the blocks from i up to j: where they are cut; None where block i leaves its tape."""

_Costs = NDArray[np.float64]
"""By memory to spare, in steps: the time of the forwards; infinite where that is not enough."""


def plan(policy: RecomputeName, chain: Sequence[Block], *, at_once: bool) -> Plan:
    """Return what ``policy`` computes again. A budget is in `fourfold.recompute.budget`.

    Args:
        policy: by name.
        chain: the blocks of a stage.
        at_once: whether the backward follows right after the forward.
    """
    blocks, number = len(chain), policy.number
    if policy.is_none or not chain:
        return ((),) * blocks
    match policy.name:
        case "full" | "selective" | "every" | "sqrt":
            group = {"full": 1, "selective": 1, "every": int(number or 1), "sqrt": _root(blocks)}[policy.name]
            return _every(group, blocks, at_once=at_once)
        case _:
            assert policy.name in ("min", "slots"), "a budget is planned for a whole rank"
            slots = min(int(number or 1), blocks)
            alike = [Block(block.forward_seconds) for block in chain]
            found = Cheapest(alike, steps=slots, keep_tapes=False)
            return found.plan(held=None if at_once else slots - 1, steps=slots)


def forwards(found: Plan) -> int:
    """How many forwards of a block a plan runs in all, the first of each included."""
    return len(found) + sum(len(again) for again in found)


def _root(blocks: int) -> int:
    """The whole number nearest to the square root."""
    root = isqrt(blocks)
    return root + (blocks > root * (root + 1))


def _every(group: int, blocks: int, *, at_once: bool) -> Plan:
    def choice(i: int, j: int) -> int | None:
        return None if j - i <= group else i + group

    if at_once:
        return _unrolled(choice, blocks)
    return _unrolled(
        choice, blocks, [(start, min(start + group, blocks)) for start in range(0, blocks, group)]
    )


def _unrolled(
    choice: Choice, blocks: int, left: Sequence[tuple[int, int]] | None = None, choices: Sequence[Choice] = ()
) -> Plan:
    """Write out a tree of choices.

    Args:
        choice: made for each span of blocks that is gone back over from its kept input.
        blocks: how many there are.
        left: the spans whose inputs the forward leaves. A block in none of them leaves its tape. None where
            the backward follows at once: then the forward is the first way down the tree.
        choices: for each of ``left`` its own, in place of ``choice``.
    """
    before: list[tuple[int, ...]] = [()] * blocks
    waiting: list[int] = []

    def go_back(i: int, j: int, choice: Choice) -> None:
        # A loop over what would be the recursion's last call, so that its depth stays small.
        later: list[tuple[int, int | None]] = []
        while i < j:
            cut = None if j - i == 1 else choice(i, j)
            if cut is None:
                waiting.append(i)
                later.append((i, None))
                i += 1
            else:
                waiting.extend(range(i, cut))
                later.append((i, cut))
                i = cut
        for start, stop in reversed(later):
            if stop is None:
                before[start] = tuple(waiting)
                waiting.clear()
            else:
                go_back(start, stop, choice)

    if left is None:
        go_back(0, blocks, choice)
        assert before[-1] == tuple(range(blocks))
        before[-1] = ()
    else:
        for number, (start, stop) in reversed(list(enumerate(left))):
            go_back(start, stop, choices[number] if choices else choice)
    return tuple(before)


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
            return _unrolled(self._choice(steps), blocks)
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
        return _unrolled(choices[-1] if choices else self._choice(0), blocks, left, choices)

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
