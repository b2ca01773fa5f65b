"""The one place where the axes meet: a model, a mesh, and the program that trains the one on the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fourfold.batch.pieces import cut
from fourfold.batch.reduction import segments_of_units
from fourfold.batch.units import Unit, parameter_sites, parameter_users
from fourfold.build import Sharding, UnitUse, build, evaluation
from fourfold.errors import UserError
from fourfold.execute import Executor
from fourfold.layer.schedules import one_forward_one_backward
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.program.actions import Program
from fourfold.segment import Segment
from fourfold.specs import ShardingSection
from fourfold.weight_gradients import WeightGradients


@dataclass(frozen=True)
class ParallelModel:
    """A model cut into segments on a mesh, with the program of a training step.

    Attributes:
        model: the module itself; its parameters keep their names and are views of the units' buffers.
            Sharded weights are there while a step uses them, or after `gather_`; reading one at another time
            is an error that PyTorch may not catch. Take them from `named_masters`.
        mesh: the ranks.
        units: the flat buffers of weights and gradients, each of one or more neighbouring segments.
        program: what each pipeline rank does in a training step.
        sharding: how the units are spread on the Batch axis.
        executor: runs it.
    """

    model: Decoder
    mesh: Mesh
    units: Sequence[Unit]
    program: Program
    sharding: Sharding
    executor: Executor

    def step(
        self, batches: Sequence[Microbatch], *, valid_tokens: int, update: Callable[[Tensor], None]
    ) -> Tensor:
        """Run one training step on this rank's microbatches; see `Executor.step`."""
        return self.executor.step(
            self.program.ranks[self.mesh.pp.rank], batches, valid_tokens=valid_tokens, update=update
        )

    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Return the sum of the token losses of ``batches``, with forwards only. All ranks call it."""
        program = evaluation(self.program, microbatches=len(batches), sharding=self.sharding)
        return self.executor.evaluate(program.ranks[0], batches)

    @cached_property
    def block_matrices(self) -> frozenset[str]:
        """The names of the matrices of the model's blocks: all but embedding and head."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return frozenset(
            names[id(parameter)]
            for piece in self.model.pieces()[1:-1]
            for module in piece.modules
            for parameter in module.parameters()
            if parameter.ndim == 2
        )

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name with its whole master weights, each once.

        All ranks go through it together: a unit that is sharded is gathered when its turn comes.
        """
        for unit in self.units:
            yield from unit.named(unit.whole(unit.master))

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter's name with its whole gradient after UPDATE's sums, as `named_masters`."""
        for unit in self.units:
            if unit.is_trained:
                yield from unit.named(unit.whole(unit.summed))

    def load_(self, weights: Mapping[str, Tensor]) -> None:
        """Set the master weights, and with them the weights that computation reads."""
        for unit in self.units:
            unit.load_(weights.__getitem__)
        self.publish_()

    def publish_(self) -> None:
        """After the master weights changed: bring the weights that computation reads up to date.

        Where optimizer state is sharded, the next step gathers them.
        """
        for unit in self.units:
            unit.publish_()

    @torch.no_grad()
    def gather_(self) -> None:
        """Bring all weights to every rank, to use the model outside a step. All ranks call it.

        The next step frees them.
        """
        if self.sharding.placement.optimizer:
            for unit in self.units:
                unit.gather().wait()


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of master weights, gradients and their reduction: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


DEFAULT_SHARDING = ShardingSection()


def parallelize(
    model: Decoder,
    *,
    mesh: Mesh,
    microbatches: int = 1,
    dtype: torch.dtype = torch.float32,
    sharding: ShardingSection = DEFAULT_SHARDING,
) -> ParallelModel:
    """Lay ``model`` out on ``mesh``.

    Args:
        model: built on the meta device, or anywhere; its values are not kept (see `ParallelModel.load_`).
            Parameters that need no gradient stay frozen.
        mesh: the ranks. Of its axes only dp and fsdp may be larger than 1 so far.
        microbatches: into how many pieces a rank's share of a batch is cut.
        dtype: what computation runs in; master weights, gradients and reductions are float32 or higher.
        sharding: how weights are cut over the fsdp axis.
    """
    problems = mesh.layout.runnable_problems()
    if problems:
        raise UserError(*problems)
    pieces = model.pieces()
    placement = mesh.layout.placement
    groups = _groups(model, [piece.modules for piece in pieces], dtype=dtype, sharded=placement.weights)
    named = dict(model.named_parameters())
    shapes = [{name: tuple(named[name].shape) for name in group.users} for group in groups]
    sites = parameter_sites(model)
    replicas = mesh.joint("dp", "cp")
    units = [
        Unit(
            " to ".join(dict.fromkeys(pieces[segment].name for segment in (group.first, group.last))),
            {name: named[name] for name in group.users},
            sites,
            pieces=piece,
            placement=placement,
            shards=mesh.fsdp,
            replicas=replicas,
            dtype=dtype,
            master_dtype=master_dtype(dtype),
            device=mesh.device,
        )
        for group, piece in zip(groups, cut(shapes, ranks=mesh.fsdp.size, how=sharding.pieces), strict=True)
    ]
    if placement.weights:
        _guard_(model, units, sites)
    weight_gradients = WeightGradients()
    weight_gradients.attach_(model)
    segments = [Segment(piece, weight_gradients) for piece in pieces]
    plan = Sharding(
        placement,
        replicas=replicas.size > 1,
        prefetch=sharding.prefetch,
        keep=sharding.accumulate == "whole",
    )
    program = build(
        one_forward_one_backward(stages=1, microbatches=microbatches),
        segments_of_stage=[len(pieces)],
        units=[
            UnitUse(_union(group.users), unit.is_trained) for group, unit in zip(groups, units, strict=True)
        ],
        sharding=plan,
        lookups=frozenset(index for index, piece in enumerate(pieces) if piece.is_lookup),
    )
    executor = Executor(
        segments,
        units,
        units_of_segment=program.units_of_segment,
        weight_gradients=weight_gradients,
        batch_axis=mesh.batch,
    )
    return ParallelModel(model, mesh, units, program, plan, executor)


def _guard_(
    model: nn.Module, units: Sequence[Unit], sites: Mapping[str, Sequence[tuple[nn.Module, str]]]
) -> None:
    """Refuse to use weights that are not there: memory would be read that is not the process's any more."""

    def refuse(unit: Unit, *_: object) -> None:
        if not unit.is_present:
            raise RuntimeError(
                f"the weights of {unit.name} are not on this rank: between its uses in a step a sharded unit "
                "holds a piece only; call ParallelModel.gather_ on all ranks to use the model outside a step"
            )

    def refuse_all(*_: object) -> None:
        for unit in units:
            refuse(unit)

    for unit in units:
        for module in {module for slot in unit.slots for module, _ in sites[slot.name]}:
            module.register_forward_pre_hook(partial(refuse, unit))
    model.register_state_dict_pre_hook(refuse_all)


@dataclass(frozen=True)
class _Group:
    """The parameters of a unit, each with the segments that use it, and the segments that they belong to."""

    users: Mapping[str, tuple[int, ...]]
    first: int
    last: int


def _groups(
    model: nn.Module, segments: Sequence[tuple[nn.Module, ...]], *, dtype: torch.dtype, sharded: bool
) -> list[_Group]:
    """Put parameters together that are gathered and reduced together.

    A unit holds the trained or the frozen parameters of one segment, or of several small neighbours.
    """
    owned = parameter_users(model, segments)
    named = dict(model.named_parameters())
    itemsize = master_dtype(dtype).itemsize
    sizes = [sum(named[name].numel() * itemsize for name in parameters) for parameters in owned]
    groups = []
    for span in segments_of_units(sizes, sharded=sharded):
        for trained in (True, False):
            users = {
                name: users
                for segment in span
                for name, users in owned[segment].items()
                if named[name].requires_grad is trained
            }
            if users:
                groups.append(_Group(users, span[0], span[-1]))
    return groups


def _union(users: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The segments that use any of the parameters."""
    return tuple(sorted({segment for segments in users.values() for segment in segments}))
