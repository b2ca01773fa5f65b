"""What a forward leaves behind, read from what comes after it.

[Note: what stays] No action says what it keeps; the order does. The last forward (F or R) of a segment before
its backward leaves a *tape*: what autograd saves for that backward. All others compute without one. The input
of a segment stays until it is used for the last time before it is made anew, and then longer only as part of
a tape. What a forward returns is kept only where something goes on with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.program.actions import COMPUTE, FORWARDS, TAKES_TAPE, Action, Kind
from fourfold.program.program import Program

Place = tuple[int, int]
"""A segment and a microbatch."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a segment takes on one microbatch.

    Attributes:
        forward_seconds: of its forward, in any one unit.
        input_bytes: of its input.
        tape_bytes: of what its forward keeps for its backward, its input included.
        deferred_bytes: of what a weight gradient needs that comes later than its input gradient: inputs and
            output gradients of the linear layers.
        kept_bytes: of the results that a forward without a tape leaves beside its input (`selective`).
    """

    forward_seconds: float = 1.0
    input_bytes: int = 1
    tape_bytes: int = 1
    deferred_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True)
class Left:
    """What the forwards of one rank leave, F and R alike.

    Attributes:
        tapes: those that leave a tape.
        inputs: those after which their input stays, to be used again.
        outputs: those whose output is the next input of a forward, or is sent.
    """

    tapes: frozenset[Action]
    inputs: frozenset[Action]
    outputs: frozenset[Action]


def left_behind(actions: Sequence[Action]) -> Left:
    """Read what each forward among the actions of a rank leaves."""
    tapes: set[Action] = set()
    inputs: set[Action] = set()
    outputs: set[Action] = set()
    latest: dict[Place, Action] = {}  # forward of a segment
    used: dict[Place, Action] = {}  # by this forward last, since it was made
    for action in actions:
        if action.kind in FORWARDS:
            place, following = (action.segment, action.microbatch), (action.segment + 1, action.microbatch)
            below = latest.get((action.segment - 1, action.microbatch))
            if place in used:
                inputs.add(used[place])
            elif below is not None:
                outputs.add(below)
            used[place] = latest[place] = action
            used.pop(following, None)
        elif action.kind in TAKES_TAPE or action.kind is Kind.SEND_ACTIVATION:
            made = latest.get((action.segment, action.microbatch))
            if made is not None:
                (outputs if action.kind is Kind.SEND_ACTIVATION else tapes).add(made)
    return Left(frozenset(tapes), frozenset(inputs), frozenset(outputs))


def peak_bytes(program: Program, blocks: Sequence[Block]) -> list[int]:
    """For each rank, the most bytes of inputs and tapes that it holds between two actions.

    Of a backward in halves, what its weight gradient needs stays when the input gradient has gone through the
    tape. What is on its way through messages, gradients of activations and what a segment needs while it runs
    are not counted.

    Args:
        program: of a step.
        blocks: the sizes of its segments.
    """
    return [rank_peak_bytes(actions, blocks) for actions in program.ranks]


def rank_peak_bytes(actions: Sequence[Action], blocks: Sequence[Block]) -> int:
    """The same for the actions of one rank."""
    left = left_behind(actions)
    held = _Held()
    for action in actions:
        if action.kind not in COMPUTE and action.kind is not Kind.SEND_ACTIVATION:
            continue
        place, following = (action.segment, action.microbatch), (action.segment + 1, action.microbatch)
        if action.kind in FORWARDS:
            block = blocks[action.segment]
            held.inputs(place, block.input_bytes if action in left.inputs else 0)
            held.tapes(place, block.tape_bytes if action in left.tapes else block.kept_bytes)
            if action in left.outputs and following[0] < len(blocks):
                held.inputs(following, blocks[following[0]].input_bytes)
        elif action.kind is Kind.SEND_ACTIVATION:
            held.inputs(following, 0)
        else:
            is_half = action.kind is Kind.INPUT_GRADIENT
            held.tapes(place, blocks[action.segment].deferred_bytes if is_half else 0)
        held.peak = max(held.peak, held.now)
    return held.peak


class _Held:
    """Bytes of inputs and of tapes, or of what stays in a tape's place."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._inputs: dict[Place, int] = {}
        self._tapes: dict[Place, int] = {}

    def inputs(self, place: Place, size: int) -> None:
        """From now on so many bytes are held of a place's input."""
        self.now += size - self._inputs.pop(place, 0)
        self._inputs[place] = size

    def tapes(self, place: Place, size: int) -> None:
        """The same of its tape."""
        self.now += size - self._tapes.pop(place, 0)
        self._tapes[place] = size
