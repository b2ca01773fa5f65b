"""Run a program: the interpreter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold import stop
from fourfold.batch.units import Unit
from fourfold.collectives import Pending, agree, all_reduce_
from fourfold.layer.transport import Transport
from fourfold.measured import Trace
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.place import HERE, encoded
from fourfold.program.actions import Action, Kind
from fourfold.program.liveness import Left, left_behind
from fourfold.program.program import Program
from fourfold.segment import Segment, gradient_of_mean_loss
from fourfold.weight_gradients import WeightGradients


@dataclass
class _Step:
    """What is under way in one step; ``sums`` are of the token losses, and of the ranks asked to end."""

    batches: Sequence[Microbatch]
    valid_tokens: int
    sums: Tensor
    update: Callable[[Tensor], None]
    trace: Trace
    transport: Transport
    left: Left
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gathers: dict[int, Pending] = field(default_factory=dict)
    reductions: dict[int, Pending] = field(default_factory=dict)
    others: list[Pending] = field(default_factory=list)

    @property
    def is_communicating(self) -> bool:
        """Whether a collective or message may still read or write a buffer."""
        return bool(self.gathers or self.reductions or self.others) or self.transport.is_busy


_Run = Callable[[_Step, Action], None]

Head = Callable[[Tensor | None, Microbatch], Tensor]
"""What ends a forward: of the last segment's input and the microbatch."""


class Executor:
    """Interprets the actions of one rank.

    Args:
        program: of a training step, for all pipeline ranks.
        segments: those of this rank, by their number in the model.
        units: the flat buffers of the parameters that this rank holds, by their number in the program.
        weight_gradients: where the linear layers put their weight gradients.
        mesh: the ranks.
        activation: an empty tensor to receive what goes between segments for a microbatch.
    """

    def __init__(
        self,
        program: Program,
        segments: Mapping[int, Segment],
        units: Mapping[int, Unit],
        *,
        weight_gradients: WeightGradients,
        mesh: Mesh,
        activation: Callable[[Microbatch], Tensor],
    ):
        self._program = program
        self._segments = segments
        self._units = units
        self._last = program.num_segments - 1
        self._weight_gradients = weight_gradients
        self._mesh = mesh
        self._activation = activation
        self._training = Transport(mesh, program)
        self._forwards: dict[int, Transport] = {}  # by the program's id
        self._device = mesh.device
        # After a failed step: collectives may still be writing into buffers.
        self._is_broken = False
        self._read: tuple[Sequence[Action], Left] = ((), left_behind(()))
        self._names: dict[int, tuple[Sequence[Action], list[bytes]]] = {}
        self.trace = Trace(self._device, mesh.pp.rank)
        """Of the last step."""
        self.asked_to_end = torch.zeros((), device=self._device)
        """How many ranks were asked to end before the last step's sums."""
        self._run: dict[Kind, _Run] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._backward,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.GATHER: self._gather,
            Kind.FREE: self._free,
            Kind.REDUCE: self._reduce,
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.SEND_ACTIVATION: self._send,
            Kind.SEND_GRADIENT: self._send,
            Kind.RECV_ACTIVATION: self._receive,
            Kind.RECV_GRADIENT: self._receive,
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
            update: called by UPDATE, once loss and gradients are summed over ranks; it is given the sum of
                the token losses.

        Returns:
            The sum of the token losses of the global batch, a float64 scalar. (Where the actions leave out
            LOSS: of this rank's microbatches.)
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        self.trace = Trace(self._device, self._mesh.pp.rank)
        if self._read[0] is not actions:
            self._read = actions, left_behind(actions)
        state = _Step(batches, valid_tokens, sums, update, self.trace, self._training, self._read[1])
        for unit in self._units.values():
            unit.begin_step_()
        self._interpret(actions, state, self._run)
        self.asked_to_end = state.sums[1]
        return state.sums[0]

    def forward(
        self, program: Program, batches: Sequence[Microbatch], *, head: Head | None = None
    ) -> list[Tensor]:
        """Run a program of forwards; return what the last segment gives for each microbatch.

        Args:
            program: made once for many calls; all ranks bring theirs in the same order.
            batches: the microbatches.
            head: computes in place of the last segment, by default that itself.

        Returns:
            The sums of the token losses, or what ``head`` returns; nothing on pipeline ranks without the last
            segment.
        """
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        trace = Trace(self._device, self._mesh.pp.rank)
        if id(program) not in self._forwards:  # a transport keeps its program: no other has its id
            self._forwards[id(program)] = Transport(self._mesh, program)
        transport = self._forwards[id(program)]
        state = _Step(batches, 0, nothing, lambda _: None, trace, transport, left_behind(()))
        results: list[Tensor] = []

        def run_forward(state: _Step, action: Action) -> None:
            x = self._input(state, action)
            if action.segment == self._last and head is not None:
                y = head(x, state.batches[action.microbatch])
            else:
                y = self._segments[action.segment].evaluate(x, state.batches[action.microbatch])
            if action.segment == self._last:
                results.append(y)
            else:
                state.outputs[action.segment, action.microbatch] = y

        actions = program.ranks[self._mesh.pp.rank]
        self._interpret(actions, state, self._run | {Kind.FORWARD: run_forward})
        return results

    def _interpret(self, actions: Sequence[Action], state: _Step, run: dict[Kind, _Run]) -> None:
        if self._is_broken:
            raise RuntimeError("a step failed while ranks were communicating: build the model anew")
        if agree.active() and self._mesh.pp.size > 1:  # else one would wait for what no other rank sends
            what = "a training step" if run is self._run else "forwards alone"
            count = f"of {len(state.batches)} microbatches"
            agree.check("run", self._mesh.pp, self._device, f"{what} {count}")
        try:
            for action, name in zip(actions, self._names_of(actions), strict=True):
                HERE.act(name)
                run[action.kind](state, action)
            state.transport.finish()
        except BaseException:
            for segment in self._segments.values():
                segment.reset()
            self._is_broken = state.is_communicating and self._mesh.world_size > 1
            raise

    def _names_of(self, actions: Sequence[Action]) -> list[bytes]:
        """The names of the actions, as `HERE` takes them; made once."""
        known = self._names.get(id(actions))
        if known is None or known[0] is not actions:
            known = self._names[id(actions)] = actions, [encoded(str(action)) for action in actions]
        return known[1]

    def _forward(self, state: _Step, action: Action) -> None:
        segment, microbatch = action.segment, action.microbatch
        x = self._input(state, action)
        start = state.trace.now()
        keep = action in state.left.tapes
        y = self._segments[segment].forward(microbatch, x, state.batches[microbatch], keep=keep)
        if segment == self._last:
            state.sums[0] += y
            state.gradients[segment, microbatch] = gradient_of_mean_loss(y, state.valid_tokens)
        else:
            state.outputs[segment, microbatch] = y
        state.trace.add(action, start)

    def _recompute(self, state: _Step, action: Action) -> None:
        segment, microbatch = action.segment, action.microbatch
        x = self._input(state, action)
        start = state.trace.now()
        keep = action in state.left.tapes
        y = self._segments[segment].recompute(microbatch, x, state.batches[microbatch], keep=keep)
        if action in state.left.outputs:
            state.outputs[segment, microbatch] = y
        state.trace.add(action, start)

    def _input(self, state: _Step, action: Action) -> Tensor | None:
        """What a forward starts from, once weights and message are here. See [Note: what stays]."""
        self._wait_for_message(state, action)
        self._wait_for_weights(state, action.segment)
        place = action.segment - 1, action.microbatch
        stays = action in state.left.inputs
        return state.outputs.get(place) if stays else state.outputs.pop(place, None)

    def _backward(self, state: _Step, action: Action) -> None:
        segment, microbatch = action.segment, action.microbatch
        self._wait_for_message(state, action)
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

    def _send(self, state: _Step, action: Action) -> None:
        if action.kind is Kind.SEND_ACTIVATION:
            tensor = state.outputs.pop((action.segment, action.microbatch))
        else:
            tensor = state.gradients.pop((action.segment - 1, action.microbatch))
        state.transport.send(action, tensor)

    def _receive(self, state: _Step, action: Action) -> None:
        state.transport.receive(action, self._activation(state.batches[action.microbatch]))

    def _wait_for_message(self, state: _Step, action: Action) -> None:
        """Have what an action starts from here, if another rank sends it."""
        receive = state.transport.program.message_needed(action)
        if receive is None:
            return
        start = state.trace.now()
        message = state.transport.wait_for(receive)
        state.trace.add(receive, start)
        if receive.kind is Kind.RECV_ACTIVATION:
            state.outputs[action.segment - 1, action.microbatch] = message
        else:
            state.gradients[action.segment, action.microbatch] = message

    def _wait_for_weights(self, state: _Step, segment: int) -> None:
        for index in self._program.units_of_segment[segment]:
            if pending := state.gathers.pop(index, None):
                pending.wait()
                state.trace.waited(pending)

    def _take_gradients(self, state: _Step, segment: int) -> None:
        """Make room for the weight gradients of a segment. An earlier one may still be on its way."""
        for index in self._program.units_of_segment[segment]:
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
        # [Note: asked to end] Whether any rank was asked to end travels with the loss, so all ranks come to
        # the same at the same step, and it costs no message of its own. Of ranks with the same loss one adds
        # it; of the others nothing but that it is not finite.
        if not self._mesh.counts_its_loss:
            state.sums[0] *= 0.0
        state.sums[1] = float(stop.is_asked())

        def all_reduce() -> Pending:
            return all_reduce_(state.sums, self._mesh.world, blocking=False)

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
        state.update(state.sums[0])
        state.trace.add(action, start)
