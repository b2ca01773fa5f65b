"""The one place where the axes meet: a model, a mesh, and the program that trains the one on the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fourfold.batch.reduction import segments_of_units
from fourfold.batch.units import Unit, parameter_sites, parameter_users
from fourfold.build import build, evaluation
from fourfold.errors import UserError
from fourfold.execute import Executor
from fourfold.layer.schedules import one_forward_one_backward
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.program.actions import Program
from fourfold.segment import Segment
from fourfold.weight_gradients import WeightGradients


@dataclass(frozen=True)
class ParallelModel:
    """A model cut into segments on a mesh, with the program of a training step.

    Attributes:
        model: the module itself; its parameters keep their names and are views into the units' buffers.
        mesh: the ranks.
        units: the flat buffers of weights and gradients, each of one or more neighbouring segments.
        program: what each pipeline rank does in a training step.
        executor: runs it.
    """

    model: Decoder
    mesh: Mesh
    units: Sequence[Unit]
    program: Program
    executor: Executor

    def step(
        self, batches: Sequence[Microbatch], *, valid_tokens: int, update: Callable[[Tensor], None]
    ) -> Tensor:
        """Run one training step on this rank's microbatches; see `Executor.step`."""
        return self.executor.step(
            self.program.ranks[self.mesh.pp.rank], batches, valid_tokens=valid_tokens, update=update
        )

    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Return the sum of the token losses of ``batches``, with forwards only."""
        program = evaluation(segments=self.program.num_segments, microbatches=len(batches))
        return self.executor.evaluate(program.ranks[0], batches)

    @cached_property
    def unit_numels(self) -> list[int]:
        """Elements of each unit, for the formulas of what is sent."""
        return [unit.gradient.numel() for unit in self.units]

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name with its master weights, each once."""
        for unit in self.units:
            yield from unit.named(unit.master)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name with its gradient, each once."""
        for unit in self.units:
            yield from unit.named(unit.gradient)

    def load_(self, weights: Mapping[str, Tensor]) -> None:
        """Set the master weights, and with them the weights that computation reads."""
        for name, master in self.named_masters():
            master.copy_(weights[name])
        self.publish_()

    def publish_(self) -> None:
        """After the master weights changed: bring the weights that computation reads up to date."""
        for unit in self.units:
            unit.publish_()


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of master weights, gradients and their reduction: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def parallelize(
    model: Decoder, *, mesh: Mesh, microbatches: int = 1, dtype: torch.dtype = torch.float32
) -> ParallelModel:
    """Lay ``model`` out on ``mesh``.

    Args:
        model: built on the meta device, or anywhere; its values are not kept (see `ParallelModel.load_`).
        mesh: the ranks. Of its axes only dp may be larger than 1 so far.
        microbatches: into how many pieces a rank's share of a batch is cut.
        dtype: what computation runs in; master weights, gradients and reductions are float32 or higher.
    """
    problems = mesh.layout.runnable_problems()
    if problems:
        raise UserError(*problems)
    pieces = model.pieces()
    named = dict(model.named_parameters())
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(f"{frozen[0]} is frozen (and {len(frozen) - 1} more): every parameter is trained")
    sites = parameter_sites(model)
    high = master_dtype(dtype)
    owned = parameter_users(model, [piece.modules for piece in pieces])
    sizes = [sum(named[name].numel() * high.itemsize for name in parameters) for parameters in owned]
    unit_segments = segments_of_units(sizes)
    units = [
        Unit(
            " to ".join(dict.fromkeys((pieces[segments[0]].name, pieces[segments[-1]].name))),
            {name: named[name] for segment in segments for name in owned[segment]},
            sites,
            dtype=dtype,
            master_dtype=high,
            device=mesh.device,
        )
        for segments in unit_segments
    ]
    weight_gradients = WeightGradients()
    weight_gradients.attach_(model)
    segments = [Segment(piece, weight_gradients) for piece in pieces]
    program = build(
        one_forward_one_backward(stages=1, microbatches=microbatches),
        segments_of_stage=[len(pieces)],
        users=[_users(owned[segments.start : segments.stop]) for segments in unit_segments],
    )
    executor = Executor(segments, units, weight_gradients=weight_gradients, batch_axis=mesh.batch)
    return ParallelModel(model, mesh, units, program, executor)


def _users(owned: Sequence[Mapping[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """The segments that use any of the parameters."""
    return tuple(sorted({user for parameters in owned for users in parameters.values() for user in users}))
