"""What a forward leaves behind, read from what comes after it.

[Note: what stays] No action says what it keeps; the order does. The last forward (F or R) of a segment before
its backward leaves a *tape*: what autograd saves for that backward. All others compute without one. The input
of a segment stays until it is used for the last time before it is made anew, and then longer only as part of
a tape. What a forward returns is kept only where something goes on with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.program.actions import FORWARDS, TAKES_TAPE, Action, Kind, Program

Place = tuple[int, int]
"""A segment and a microbatch."""


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


def peak_bytes(program: Program, *, input_bytes: Sequence[int], tape_bytes: Sequence[int]) -> list[int]:
    """For each rank, the most bytes of inputs and tapes that it holds between two actions.

    A tape lives to the end of its backward, B or W. What is on its way through messages, gradients of
    activations and what a segment needs while it runs are not counted.

    Args:
        program: of a step.
        input_bytes: of each segment's input, on one microbatch.
        tape_bytes: of each segment's tape, its input included.
    """
    return [_peak(actions, input_bytes, tape_bytes) for actions in program.ranks]


def _peak(actions: Sequence[Action], input_bytes: Sequence[int], tape_bytes: Sequence[int]) -> int:
    left = left_behind(actions)
    inputs: dict[Place, int] = {}
    tapes: dict[Place, int] = {}
    peak = 0
    for action in actions:
        if action.kind in FORWARDS:
            place, following = (action.segment, action.microbatch), (action.segment + 1, action.microbatch)
            inputs.pop(place, None)
            if action in left.inputs:
                inputs[place] = input_bytes[action.segment]
            if action in left.tapes:
                tapes[place] = tape_bytes[action.segment]
            if action in left.outputs and following[0] < len(input_bytes):
                inputs[following] = input_bytes[following[0]]
        elif action.kind is Kind.SEND_ACTIVATION:
            inputs.pop((action.segment + 1, action.microbatch), None)
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            tapes.pop((action.segment, action.microbatch), None)
        peak = max(peak, sum(inputs.values()) + sum(tapes.values()))
    return peak
