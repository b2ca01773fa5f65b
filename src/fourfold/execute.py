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

    def started(self, action: Action, start: float, pending: Pending) -> None:
        """Note a collective that runs on."""
        if self._on_host:
            self._open.append((action, start, pending))

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
    gathers: dict[int, Pending] = field(default_factory=dict)
    reductions: dict[int, Pending] = field(default_factory=dict)
    others: list[Pending] = field(default_factory=list)

    @property
    def is_communicating(self) -> bool:
        """Whether a collective may still read or write a buffer."""
        return bool(self.gathers or self.reductions or self.others)


_Run = Callable[[_Step, Action], None]


class Executor:
    """Interprets the actions of one rank.

    Args:
        segments: the model's segments, in order.
        units: the flat buffers of the model's parameters.
        units_of_segment: for each segment, the units that it computes with.
        weight_gradients: where the linear layers put their weight gradients.
        batch_axis: over which the loss is summed (dp x fsdp x cp).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        units: Sequence[Unit],
        *,
        units_of_segment: Sequence[Sequence[int]],
        weight_gradients: WeightGradients,
        batch_axis: Axis,
    ):
        self._segments = segments
        self._units = units
        self._units_of_segment = units_of_segment
        self._weight_gradients = weight_gradients
        self._batch_axis = batch_axis
        self._device = units[0].master.device
        # After a failed step: collectives may still be writing into buffers.
        self._is_broken = False
        self.trace = Trace(self._device)
        """Of the last step."""
        self._run: dict[Kind, _Run] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._backward,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.GATHER: self._gather,
            Kind.FREE: self._free,
            Kind.REDUCE: self._reduce,
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.LOSS: self._loss,
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
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self.trace = Trace(self._device)
        state = _Step(batches, valid_tokens, loss_sum, update, self.trace)
        for unit in self._units:
            unit.begin_step_()
        self._interpret(actions, state, self._run)
        return state.loss_sum

    def evaluate(self, actions: Sequence[Action], batches: Sequence[Microbatch]) -> Tensor:
        """Run a program of forwards; return the sum of the token losses."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        state = _Step(batches, 0, loss_sum, lambda _: None, Trace(self._device))
        self._interpret(actions, state, self._run | {Kind.FORWARD: self._evaluate})
        return state.loss_sum

    def _interpret(self, actions: Sequence[Action], state: _Step, run: dict[Kind, _Run]) -> None:
        if self._is_broken:
            raise RuntimeError("a step failed while ranks were communicating: build the model anew")
        try:
            for action in actions:
                run[action.kind](state, action)
        except BaseException:
            for segment in self._segments:
                segment.reset()
            self._is_broken = state.is_communicating and self._batch_axis.size > 1
            raise

    def _forward(self, state: _Step, action: Action) -> None:
        segment, microbatch = action.segment, action.microbatch
        self._wait_for_weights(state, segment)
        start = state.trace.now()
        x = state.outputs.pop((segment - 1, microbatch), None)
        y = self._segments[segment].forward(microbatch, x, state.batches[microbatch])
        if segment == len(self._segments) - 1:
            state.loss_sum += y
            state.gradients[segment, microbatch] = gradient_of_mean_loss(y, state.valid_tokens)
        else:
            state.outputs[segment, microbatch] = y
        state.trace.add(action, start)

    def _evaluate(self, state: _Step, action: Action) -> None:
        segment, microbatch = action.segment, action.microbatch
        self._wait_for_weights(state, segment)
        x = state.outputs.pop((segment - 1, microbatch), None)
        y = self._segments[segment].evaluate(x, state.batches[microbatch])
        if segment == len(self._segments) - 1:
            state.loss_sum += y
        else:
            state.outputs[segment, microbatch] = y

    def _backward(self, state: _Step, action: Action) -> None:
        segment, microbatch = action.segment, action.microbatch
        self._wait_for_weights(state, segment)
        self._take_gradients(state, segment)
        start = state.trace.now()
        run = self._segments[segment]
        backward = run.backward if action.kind is Kind.BACKWARD else run.input_gradient
        gradient = backward(microbatch, state.gradients.pop((segment, microbatch)))
        if gradient is not None:
            state.gradients[segment - 1, microbatch] = gradient
        state.trace.add(action, start)

    def _weight_gradient(self, state: _Step, action: Action) -> None:
        self._take_gradients(state, action.segment)
        start = state.trace.now()
        self._segments[action.segment].weight_gradient(action.microbatch)
        state.trace.add(action, start)

    def _wait_for_weights(self, state: _Step, segment: int) -> None:
        for index in self._units_of_segment[segment]:
            if pending := state.gathers.pop(index, None):
                pending.wait()
                state.trace.waited(pending)

    def _take_gradients(self, state: _Step, segment: int) -> None:
        """Make room for the weight gradients of a segment. An earlier one may still be on its way."""
        for index in self._units_of_segment[segment]:
            unit = self._units[index]
            if unit.placement.gradients:
                self._finish_reduction(state, index)
            if unit.take_gradient_():
                self._weight_gradients.begin_(unit.parameters)

    def _gather(self, state: _Step, action: Action) -> None:
        state.gathers[action.unit] = self._start(state, action, self._units[action.unit].gather)

    def _free(self, state: _Step, action: Action) -> None:
        start = state.trace.now()
        self._units[action.unit].free_()
        state.trace.add(action, start)

    def _reduce(self, state: _Step, action: Action) -> None:
        unit = self._units[action.unit]
        if unit.placement.optimizer:  # [Note: one reduction in flight]
            self._finish_reductions(state)
        self._weight_gradients.finish_(unit.parameters)
        state.reductions[action.unit] = self._start(state, action, unit.reduce)

    def _finish_reductions(self, state: _Step) -> None:
        for index in list(state.reductions):
            self._finish_reduction(state, index)

    def _finish_reduction(self, state: _Step, index: int) -> None:
        if pending := state.reductions.pop(index, None):
            result = pending.wait()
            state.trace.waited(pending)
            self._units[index].finish_reduce_(result)

    def _all_reduce(self, state: _Step, action: Action) -> None:
        self._finish_reduction(state, action.unit)
        state.others.append(self._start(state, action, self._units[action.unit].all_reduce))

    def _loss(self, state: _Step, action: Action) -> None:
        def all_reduce() -> Pending:
            return all_reduce_(state.loss_sum, self._batch_axis, blocking=False)

        state.others.append(self._start(state, action, all_reduce))

    def _start(self, state: _Step, action: Action, collective: Callable[[], Pending]) -> Pending:
        start = state.trace.now()  # a backend may send some of it before it returns
        pending = collective()
        state.trace.started(action, start, pending)
        return pending

    def _update(self, state: _Step, action: Action) -> None:
        self._finish_reductions(state)
        while state.others:
            pending = state.others.pop()
            pending.wait()
            state.trace.waited(pending)
        start = state.trace.now()
        state.update(state.loss_sum)
        state.trace.add(action, start)
