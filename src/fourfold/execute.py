"""Run a program: the interpreter."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


class Trace:
    """When each action of a step ran, in seconds since the step began.

    The end of a collective is seen after the action during which it ended, or when it is waited for. On an
    accelerator the host runs ahead of the device and its clock says nothing of actions: there are no spans.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._began = time.perf_counter()
        self._open: list[tuple[Action, float, Pending]] = []
        self.spans: list[Span] = []

    def now(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began

    def add(self, action: Action, start: float) -> None:
        """Note an action that ends now."""
        if self._on_host:
            self.spans.append(Span(0, action, start, self.now()))
            self._close([entry for entry in self._open if entry[2].is_done()])

    def started(self, action: Action, pending: Pending) -> None:
        """Note a collective that starts now and runs on."""
        if self._on_host:
            self._open.append((action, self.now(), pending))

    def waited(self, pending: Pending) -> None:
        """Note that a collective has been waited for."""
        self._close([entry for entry in self._open if entry[2] is pending])

    def _close(self, entries: list[tuple[Action, float, Pending]]) -> None:
        for entry in entries:
            self._open.remove(entry)
            self.spans.append(Span(0, entry[0], entry[1], self.now()))


@dataclass
class _Step:
    """What is under way in one step."""

    batches: Sequence[Microbatch]
    valid_tokens: int
    loss_sum: Tensor
    update: Callable[[Tensor], None]
    trace: Trace
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)


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
        self._device = units[0].master.device
        # After a failed step: collectives may still be writing into the gradient buffers.
        self._is_reducing = False
        self.trace = Trace(self._device)
        """Of the last step."""
        self._run = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._backward,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.LOSS: self._collective,
            Kind.REDUCE: self._collective,
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
        if self._is_reducing:
            raise RuntimeError("a step failed while its gradients were being summed: build the model anew")
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self.trace = Trace(self._device)
        state = _Step(batches, valid_tokens, loss_sum, update, self.trace)
        self._weight_gradients.begin_step_()
        try:
            for action in actions:
                self._run[action.kind](state, action)
        except BaseException:
            for segment in self._segments:
                segment.reset()
            self._is_reducing = bool(state.pending) and self._batch_axis.size > 1
            raise
        return state.loss_sum

    def evaluate(self, actions: Sequence[Action], batches: Sequence[Microbatch]) -> Tensor:
        """Run a program of forwards; return the sum of the token losses."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
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
        start = state.trace.now()
        x = state.outputs.pop((segment - 1, microbatch), None)
        y = self._segments[segment].forward(microbatch, x, state.batches[microbatch])
        if segment == len(self._segments) - 1:
            state.loss_sum += y
            state.gradients[segment, microbatch] = gradient_of_mean_loss(y, state.valid_tokens)
        else:
            state.outputs[segment, microbatch] = y
        state.trace.add(action, start)

    def _backward(self, state: _Step, action: Action) -> None:
        segment, microbatch = _place(action)
        start = state.trace.now()
        run = self._segments[segment]
        backward = run.backward if action.kind is Kind.BACKWARD else run.input_gradient
        gradient = backward(microbatch, state.gradients.pop((segment, microbatch)))
        if gradient is not None:
            state.gradients[segment - 1, microbatch] = gradient
        state.trace.add(action, start)

    def _weight_gradient(self, state: _Step, action: Action) -> None:
        segment, microbatch = _place(action)
        start = state.trace.now()
        self._segments[segment].weight_gradient(microbatch)
        state.trace.add(action, start)

    def _collective(self, state: _Step, action: Action) -> None:
        if action.kind is Kind.LOSS:
            pending = all_reduce_(state.loss_sum, self._batch_axis, blocking=False)
        else:
            assert action.segment is not None
            unit = self._units[action.segment]
            self._weight_gradients.finish_(unit.parameters)
            pending = unit.reduce(self._batch_axis)
        state.trace.started(action, pending)
        state.pending.append(pending)

    def _update(self, state: _Step, action: Action) -> None:
        for pending in state.pending:
            pending.wait()
            state.trace.waited(pending)
        start = state.trace.now()
        state.update(state.loss_sum)
        state.trace.add(action, start)


def _place(action: Action) -> tuple[int, int]:
    assert action.segment is not None
    assert action.microbatch is not None
    return action.segment, action.microbatch
