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
from math import isqrt

from fourfold.program.liveness import Block
from fourfold.specs.recompute_name import RecomputeName

Plan = tuple[tuple[int, ...], ...]
"""For each block, the blocks that are computed again right before its backward, in order."""

Choice = Callable[[int, int], int | None]
"""Of the blocks from i up to j: where they are cut; None where block i leaves its tape."""


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
            # numpy takes a while to load, and most policies do without.
            from fourfold.recompute.cheapest import Cheapest

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
        return unrolled(choice, blocks)
    return unrolled(
        choice, blocks, [(start, min(start + group, blocks)) for start in range(0, blocks, group)]
    )


def unrolled(
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
