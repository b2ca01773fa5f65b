"""Run a program: the interpreter."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.batch.units import Unit
from fourfold.collectives import Pending, all_reduce_
from fourfold.mesh import Axis
from fourfold.models import Microbatch
from fourfold.program.actions import Action, Kind
from fourfold.program.clock import Span
from fourfold.segment import Segment
from fourfold.weight_gradients import WeightGradients


def gradient_of_mean_loss(loss_sum: Tensor, valid_tokens: int) -> Tensor:
    """The gradient that the backward starts with: that of ``loss_sum / valid_tokens``.

    [Note: the loss is a sum] Segments return the *sum* of the token losses of a microbatch. It is divided
    here, once, by the number of valid tokens of the whole global batch, known before the first backward.
    Gradients are then only ever added: over microbatches and over ranks. With no valid token at all, loss and
    gradients are 0.
    """
    return torch.full_like(loss_sum, 1.0 / max(valid_tokens, 1))


@dataclass
class _Step:
    """What is under way in one step."""

    batches: Sequence[Microbatch]
    valid_tokens: int
    outputs: dict[tuple[int, int], Tensor]
    gradients: dict[tuple[int, int], Tensor]
    pending: list[Pending]
    loss_sum: Tensor
    update: Callable[[Tensor], None]


class Executor:
    """Interprets the actions of one rank.

    Args:
        segments: the model's segments, in order.
        units: the parameters of each segment.
        weight_gradients: where the linear layers put their weight gradients.
        batch_axis: over which gradients are summed (dp x fsdp x cp).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        units: Sequence[Unit],
        *,
        weight_gradients: WeightGradients,
        batch_axis: Axis,
    ):
        self._segments = segments
        self._units = units
        self._weight_gradients = weight_gradients
        self._batch_axis = batch_axis
        self.spans: list[Span] | None = None
        """Set to a list to have the times of each action appended; seconds since the step began."""
        self._run = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.LOSS: self._loss,
            Kind.REDUCE: self._reduce,
            Kind.UPDATE: self._update,
        }

    def step(
        self,
        actions: Sequence[Action],
        batches: Sequence[Microbatch],
        *,
        valid_tokens: int,
        update: Callable[[Tensor], None],
    ) -> Tensor:
        """Run the actions of one training step.

        Args:
            actions: this rank's part of the program.
            batches: this rank's microbatches.
            valid_tokens: labels that count in the global batch, over all ranks and microbatches.
            update: called by UPDATE, once loss and gradients are summed over the Batch axis; it is given the
                sum of the token losses.

        Returns:
            The sum of the token losses of the global batch, a float64 scalar. (Where the actions leave out
            LOSS: of this rank's microbatches.)
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._units[0].master.device)
        state = _Step(batches, valid_tokens, {}, {}, [], loss_sum, update)
        self._weight_gradients.begin_step_()
        began = time.perf_counter()
        try:
            for action in actions:
                start = time.perf_counter()
                self._run[action.kind](state, action)
                if self.spans is not None:
                    self.spans.append(Span(0, action, start - began, time.perf_counter() - began))
        except BaseException:
            for segment in self._segments:
                segment.reset()
            raise
        return state.loss_sum

    def evaluate(self, actions: Sequence[Action], batches: Sequence[Microbatch]) -> Tensor:
        """Run a program of forwards; return the sum of the token losses."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._units[0].master.device)
        x: Tensor | None = None
        for action in actions:
            assert action.kind is Kind.FORWARD
            assert action.segment is not None
            assert action.microbatch is not None
            x = self._segments[action.segment].evaluate(
                None if action.segment == 0 else x, batches[action.microbatch]
            )
            if action.segment == len(self._segments) - 1:
                loss_sum += x
        return loss_sum

    def _forward(self, state: _Step, action: Action) -> None:
        segment, microbatch = _place(action)
        x = state.outputs.pop((segment - 1, microbatch), None)
        y = self._segments[segment].forward(microbatch, x, state.batches[microbatch])
        if segment == len(self._segments) - 1:
            state.loss_sum += y
            state.gradients[segment, microbatch] = gradient_of_mean_loss(y, state.valid_tokens)
        else:
            state.outputs[segment, microbatch] = y

    def _backward(self, state: _Step, action: Action) -> None:
        segment, microbatch = _place(action)
        gradient = self._segments[segment].backward(microbatch, state.gradients.pop((segment, microbatch)))
        if gradient is not None:
            state.gradients[segment - 1, microbatch] = gradient

    def _input_gradient(self, state: _Step, action: Action) -> None:
        segment, microbatch = _place(action)
        gradient = self._segments[segment].input_gradient(
            microbatch, state.gradients.pop((segment, microbatch))
        )
        if gradient is not None:
            state.gradients[segment - 1, microbatch] = gradient

    def _weight_gradient(self, state: _Step, action: Action) -> None:
        segment, microbatch = _place(action)
        self._segments[segment].weight_gradient(microbatch)

    def _loss(self, state: _Step, action: Action) -> None:
        state.pending.append(all_reduce_(state.loss_sum, self._batch_axis, blocking=False))

    def _reduce(self, state: _Step, action: Action) -> None:
        assert action.segment is not None
        unit = self._units[action.segment]
        self._weight_gradients.finish_(unit.parameters)
        state.pending.append(unit.reduce(self._batch_axis))

    def _update(self, state: _Step, action: Action) -> None:
        for pending in state.pending:
            pending.wait()
        state.update(state.loss_sum)


def _place(action: Action) -> tuple[int, int]:
    assert action.segment is not None
    assert action.microbatch is not None
    return action.segment, action.microbatch
