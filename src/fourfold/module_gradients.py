"""The gradients of a sharded module over a step: which have room, which are summed, and who may read them."""

from collections.abc import Sequence

from torch import Tensor, nn

from fourfold.batch.unit_groups import UnitGroup
from fourfold.batch.units import Unit
from fourfold.collectives import Pending
from fourfold.refused_steps import refuse_steps_
from fourfold.specs.placement import Placement

UNSUMMED = "gradients are not summed: call reduce_gradients() after the last backward of a step"


class ModuleGradients:
    """Flat buffers that are there from a unit's first backward of a step until its gradient is summed.

    The pieces that an optimizer has get their gradients at the end of the step, and lose them when the next
    one begins: until then a step of the optimizer is refused.

    Args:
        groups: all units of the module, in the order of the forward.
        pieces: what this rank owns, as the optimizer's parameters.
        placement: what is in pieces.
    """

    def __init__(self, groups: Sequence[UnitGroup], pieces: Sequence[nn.Parameter], placement: Placement):
        self._groups = groups
        self._placement = placement
        self._trained = [unit for group in groups for unit in group.units if unit.is_trained]
        # Kept here, since a view of memory that is freed cannot be made.
        self._views = {
            unit: [_gradient_of(parameter) for parameter in unit.parameters] for unit in self._trained
        }
        self._pieces = pieces
        self._piece_gradients = [piece.grad for piece in pieces]
        self._are_summed = False
        self._taken: set[Unit] = set()
        self._reduced: set[Unit] = set()
        self._reductions: dict[Unit, Pending] = {}
        for unit in self._trained:
            for parameter in unit.parameters:
                parameter.grad = None
        self._set_piece_gradients_([None] * len(pieces), refusal=UNSUMMED)

    def take_(self, unit: Unit) -> None:
        """Make room for a unit's gradient, zero at first, unless it is there."""
        if not unit.is_trained:
            return
        if self._are_summed:  # a new step begins
            self._are_summed = False
            self._set_piece_gradients_([None] * len(self._pieces), refusal=UNSUMMED)
        if unit in self._reductions:
            self._finish_reductions_()
        if unit.take_gradient_():
            unit.gradient.zero_()
            for parameter, view in zip(unit.parameters, self._views[unit], strict=True):
                parameter.grad = view
            self._taken.add(unit)

    def reduce_(self, units: Sequence[Unit]) -> None:
        """Start to sum gradients; where they are sharded, see [Note: one reduction in flight]."""
        if self._placement.gradients:
            self._finish_reductions_()
        for unit in units:
            for parameter, view in zip(unit.parameters, self._views[unit], strict=True):
                # What the module's own zero_grad, or a backward that makes a graph, left behind.
                if parameter.grad is None:
                    view.zero_()
                elif parameter.grad is not view:
                    view.copy_(parameter.grad)
                parameter.grad = None
            self._taken.remove(unit)
            self._reduced.add(unit)
            self._reductions[unit] = unit.reduce()

    def end_step_(self) -> None:
        """Sum what is not summed yet, and give the pieces their gradients."""
        for group in reversed(self._groups):
            trained = [unit for unit in group.units if unit.is_trained]
            waiting = [unit for unit in trained if unit in self._taken or unit not in self._reduced]
            for unit in waiting:
                self.take_(unit)
            self.reduce_(waiting)
        self._finish_reductions_()
        if self._placement.optimizer:  # [Note: replicas last]
            for pending in [unit.all_reduce() for unit in self._trained]:
                pending.wait()
        self._set_piece_gradients_(self._piece_gradients, refusal=None)
        self._are_summed = True
        self._reduced.clear()

    def check_summed(self) -> None:
        """Raise RuntimeError where the gradients of this step are not summed yet."""
        if not self._are_summed:
            raise RuntimeError(UNSUMMED)

    def _finish_reductions_(self) -> None:
        for unit, pending in self._reductions.items():
            unit.finish_reduce_(pending.wait())
        self._reductions.clear()

    def _set_piece_gradients_(self, gradients: Sequence[Tensor | None], *, refusal: str | None) -> None:
        for piece, gradient in zip(self._pieces, gradients, strict=True):
            piece.grad = gradient
        refuse_steps_(self._pieces, refusal)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "the parameter has no gradient buffer"
    return gradient
