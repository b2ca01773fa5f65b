"""The one place where the axes meet: a model, a mesh, and the program that trains the one on the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from fourfold.batch.reduction import blocks_of_segments
from fourfold.batch.unit_specs import UnitSpec, unit_specs
from fourfold.batch.units import Unit, master_dtype, parameter_sites, parameter_users
from fourfold.build import Sharding, UnitUse, build, evaluation
from fourfold.collectives import broadcast_
from fourfold.errors import UserError
from fourfold.execute import Executor
from fourfold.flops import forward_flops
from fourfold.layer.schedules import schedule_of
from fourfold.layer.split import split
from fourfold.mesh import Axis, Mesh
from fourfold.models import Decoder, Microbatch, Piece, join
from fourfold.program.actions import COMPUTE, TRANSFERS, Program
from fourfold.segment import Segment
from fourfold.specs import ShardingSection
from fourfold.weight_gradients import WeightGradients


@dataclass(frozen=True)
class ParallelModel:
    """A model cut into segments on a mesh, with the program of a training step.

    Attributes:
        model: the module itself; its parameters keep their names and are views of the units' buffers. Those
            of other pipeline ranks stay on the meta device. Sharded weights are there while a step uses them,
            or after `gather_`; reading one at another time is an error that PyTorch may not catch. Take them
            from `named_masters`.
        mesh: the ranks.
        unit_specs: the units of all pipeline ranks, by number in the program.
        units: the flat buffers of weights and gradients that this rank holds, by that number.
        stages: the names of the blocks of each pipeline stage.
        before_head: the blocks that are joined with the head to the last segment.
        program: what each pipeline rank does in a training step.
        sharding: how the units are spread on the Batch axis.
        executor: runs it.
    """

    model: Decoder
    mesh: Mesh
    unit_specs: Sequence[UnitSpec]
    units_by_number: Mapping[int, Unit]
    stages: Sequence[Sequence[str]]
    before_head: Sequence[Piece]
    program: Program
    sharding: Sharding
    executor: Executor

    @property
    def units(self) -> Sequence[Unit]:
        """The flat buffers of weights and gradients that this rank holds, in model order."""
        return list(self.units_by_number.values())

    @property
    def counted_units(self) -> Sequence[Unit]:
        """The units that this rank counts in the gradient norm: a tied one is counted on its first rank."""
        return [
            unit
            for number, unit in self.units_by_number.items()
            if self.unit_specs[number].holders[0] == self.mesh.pp.rank
        ]

    @property
    def norm_axis(self) -> Axis:
        """The ranks whose counted units together are the whole model, each parameter once."""
        return self.mesh.joint("pp", "fsdp")

    def step(
        self, batches: Sequence[Microbatch], *, valid_tokens: int, update: Callable[[Tensor], None]
    ) -> Tensor:
        """Run one training step on this rank's microbatches; see `Executor.step`."""
        return self.executor.step(
            self.program.ranks[self.mesh.pp.rank], batches, valid_tokens=valid_tokens, update=update
        )

    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Return the sum of the token losses of ``batches``, with forwards only. All ranks call it.

        Pipeline ranks without the last segment get 0: add up over all ranks.
        """
        losses = self.executor.forward(self._forwards(len(batches)), batches)
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return sum((loss.double() for loss in losses), start=zero)

    @torch.no_grad()
    def last_logits(self, batch: Microbatch) -> Tensor:
        """Return the logits after the last token of the only row, (V,), on all pipeline ranks.

        The weights must be there: see `gather_`. All pipeline ranks call it.
        """
        found = self.executor.forward(self._one_forward, [batch], head=self._last_logits)
        like = self.units[0].weights
        logits = found[0] if found else like.new_empty(self.model.spec.vocab_size)
        return broadcast_(logits, self.mesh.pp, source=self.program.rank_of_segment[-1])

    def _last_logits(self, x_BSC: Tensor | None, batch: Microbatch) -> Tensor:
        """The last segment with logits in place of the loss."""
        for block in self.before_head:
            x_BSC = block.forward(x_BSC, batch)
        assert x_BSC is not None
        return self.model.last_logits(x_BSC)

    def _forwards(self, microbatches: int) -> Program:
        if microbatches not in self._evaluations:
            self._evaluations[microbatches] = evaluation(
                self.program, microbatches=microbatches, sharding=self.sharding
            )
        return self._evaluations[microbatches]

    @cached_property
    def _evaluations(self) -> dict[int, Program]:
        """By number of microbatches, made when they are first needed."""
        return {}

    @cached_property
    def _one_forward(self) -> Program:
        """Of one microbatch, on weights that are there already."""
        program = self._forwards(1)
        kept = tuple(tuple(a for a in actions if a.kind in COMPUTE | TRANSFERS) for actions in program.ranks)
        return replace(program, ranks=kept)

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

        All ranks go through it together: a unit that is sharded, or on another pipeline rank, is brought here
        when its turn comes.
        """
        for number in range(len(self.unit_specs)):
            yield from self._named_whole(number, lambda unit: unit.master)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter's name with its whole gradient after UPDATE's sums, as `named_masters`."""
        for number, spec in enumerate(self.unit_specs):
            if spec.is_trained:
                yield from self._named_whole(number, lambda unit: unit.summed)

    def _named_whole(self, number: int, piece: Callable[[Unit], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Bring a unit's whole buffer to all ranks; ``piece`` says which of its buffers."""
        spec, unit, pp = self.unit_specs[number], self.units_by_number.get(number), self.mesh.pp
        whole = None if unit is None else unit.whole(piece(unit))
        if whole is None or pp.rank != spec.holders[0]:
            whole = torch.empty(spec.numel, dtype=spec.master_dtype, device=self.mesh.device)
        broadcast_(whole, pp, source=spec.holders[0])
        return ((slot.name, slot.view(whole)) for slot in spec.slots)

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
        """Bring the weights of this rank's stages to it, to use them outside a step. All ranks call it.

        The next step frees them.
        """
        if self.sharding.placement.optimizer:
            for unit in self.units:
                unit.gather().wait()


DEFAULT_SHARDING = ShardingSection()


def parallelize(
    model: Decoder,
    *,
    mesh: Mesh,
    microbatches: int = 1,
    dtype: torch.dtype = torch.float32,
    sharding: ShardingSection = DEFAULT_SHARDING,
    sequence_length: int = 1,
) -> ParallelModel:
    """Lay ``model`` out on ``mesh``.

    Args:
        model: built on the meta device, or anywhere; its values are not kept (see `ParallelModel.load_`).
            Parameters that need no gradient stay frozen.
        mesh: the ranks. Of its axes only pp, dp and fsdp may be larger than 1 so far.
        microbatches: into how many pieces a rank's share of a batch is cut.
        dtype: what computation runs in; master weights, gradients and reductions are float32 or higher.
        sharding: how weights are cut over the fsdp axis.
        sequence_length: tokens of a sequence. It decides what attention costs beside the head where layers
            are dealt to pipeline stages.
    """
    problems = mesh.layout.runnable_problems()
    if problems:
        raise UserError(*problems)
    stages = _stages(model, mesh, microbatches, sequence_length, dtype)
    pieces = [piece for stage in stages.pieces for piece in stage]
    rank_of_segment = [
        rank for rank, stage in zip(stages.order.rank_of_segment, stages.pieces, strict=True) for _ in stage
    ]
    specs = unit_specs(
        model,
        {piece.name: piece.modules for piece in pieces},
        rank_of_segment=rank_of_segment,
        shards=mesh.fsdp.size,
        pieces=sharding.pieces,
        dtype=dtype,
    )
    units = _units(model, specs, mesh=mesh, dtype=dtype)
    weight_gradients = WeightGradients()
    weight_gradients.attach_(model)
    plan = Sharding(
        mesh.layout.placement,
        prefetch=sharding.prefetch,
        keep=sharding.accumulate == "whole" or (sharding.accumulate == "auto" and mesh.pp.size > 1),
    )
    replicas = mesh.layout.size("dp", "cp")
    program = build(
        stages.order,
        segments_of_stage=[len(stage) for stage in stages.pieces],
        units=[UnitUse(spec.users, spec.is_trained, replicas * len(spec.holders) > 1) for spec in specs],
        sharding=plan,
        lookups=frozenset(index for index, piece in enumerate(pieces) if piece.is_lookup),
    )
    mine = [index for index, rank in enumerate(rank_of_segment) if rank == mesh.pp.rank]
    executor = Executor(
        program,
        {index: Segment(pieces[index], weight_gradients) for index in mine},
        units,
        weight_gradients=weight_gradients,
        mesh=mesh,
        activation=partial(_activation, model, dtype=dtype, device=mesh.device),
    )
    return ParallelModel(model, mesh, specs, units, stages.names, stages.before_head, program, plan, executor)


@dataclass(frozen=True)
class _Stages:
    """The schedule, the names of the blocks of each of its stages, and the segments that they make.

    ``before_head`` are the blocks that are joined with the head.
    """

    order: Program
    names: Sequence[Sequence[str]]
    pieces: Sequence[Sequence[Piece]]
    before_head: Sequence[Piece]


def _stages(
    model: Decoder, mesh: Mesh, microbatches: int, sequence_length: int, dtype: torch.dtype
) -> _Stages:
    """Deal the model's blocks to pipeline stages, and join small neighbours of a stage to segments."""
    blocks = model.pieces()
    order = schedule_of(mesh.layout, microbatches=microbatches, layers=max(len(blocks) - 2, 1))
    counts = [len(blocks)]
    if order.num_segments > 1:
        counts = split(forward_flops(model.spec, sequence_length).segments, stages=order.num_segments)
    itemsize = master_dtype(dtype).itemsize
    owned = parameter_users(model, [block.modules for block in blocks])
    named = dict(model.named_parameters())
    sizes = [sum(named[name].numel() * itemsize for name in parameters) for parameters in owned]
    names, pieces = [], []
    for first, stop in pairwise(accumulate(counts, initial=0)):
        stage = blocks[first:stop]
        spans = blocks_of_segments(sizes[first:stop], sharded=mesh.layout.placement.weights)
        names.append([block.name for block in stage])
        pieces.append([join(stage[span.start : span.stop]) for span in spans])
    return _Stages(order, names, pieces, stage[spans[-1].start : -1])


def _activation(model: Decoder, batch: Microbatch, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor of the shape of what goes from segment to segment for a microbatch: (B, S, C)."""
    shape = *batch.input_ids_BS.shape, model.spec.hidden_size
    return torch.empty(shape, dtype=dtype, device=device)


def _units(model: Decoder, specs: Sequence[UnitSpec], *, mesh: Mesh, dtype: torch.dtype) -> dict[int, Unit]:
    """Make the units of this rank, by number. All ranks make the same process groups in the same order."""
    named = dict(model.named_parameters())
    sites = parameter_sites(model)
    units = {}
    for number, spec in enumerate(specs):
        together = len(spec.holders) > 1
        replicas = mesh.holders(spec.holders, "dp", "cp") if together else mesh.joint("dp", "cp")
        if mesh.pp.rank in spec.holders:
            units[number] = Unit(
                spec.name,
                {slot.name: named[slot.name] for slot in spec.slots},
                sites,
                pieces=spec.pieces,
                placement=mesh.layout.placement,
                shards=mesh.fsdp,
                replicas=replicas,
                dtype=dtype,
                master_dtype=spec.master_dtype,
                device=mesh.device,
            )
    if mesh.layout.placement.weights:
        _guard_(model, list(units.values()), sites)
    return units


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
