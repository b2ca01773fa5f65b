"""The one place where the axes meet: a model, a mesh, and the program that trains the one on the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, islice, pairwise

import torch
from torch import Tensor, nn

from fourfold.batch.pieces import Pieces, cut
from fourfold.batch.reduction import segments_of_units
from fourfold.batch.units import Slot, Unit, parameter_sites, parameter_users, slots
from fourfold.build import Sharding, UnitUse, build, evaluation
from fourfold.collectives import broadcast_
from fourfold.errors import UserError
from fourfold.execute import Executor
from fourfold.flops import forward_flops
from fourfold.layer.schedules import schedule
from fourfold.layer.split import split
from fourfold.mesh import Axis, Mesh
from fourfold.models import Decoder, Microbatch, Piece
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
        groups: the parameters of the units of all pipeline ranks, by number in the program.
        units: the flat buffers of weights and gradients that this rank holds, by that number.
        stages: the names of the segments of each pipeline stage.
        program: what each pipeline rank does in a training step.
        sharding: how the units are spread on the Batch axis.
        executor: runs it.
    """

    model: Decoder
    mesh: Mesh
    groups: Sequence["Group"]
    units_by_number: Mapping[int, Unit]
    stages: Sequence[Sequence[str]]
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
            if self.groups[number].holders[0] == self.mesh.pp.rank
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
        program = self._forwards(1)
        kept = tuple(tuple(a for a in actions if a.kind in COMPUTE | TRANSFERS) for actions in program.ranks)
        found = self.executor.forward(replace(program, ranks=kept), [batch], head=self._last_logits)
        like = self.units[0].weights
        logits = found[0] if found else like.new_empty(self.model.spec.vocab_size)
        return broadcast_(logits, self.mesh.pp, source=self.program.rank_of_segment[-1])

    def _last_logits(self, x_BSC: Tensor | None, _: Microbatch) -> Tensor:
        assert x_BSC is not None
        return self.model.last_logits(x_BSC)

    def _forwards(self, microbatches: int) -> Program:
        return evaluation(self.program, microbatches=microbatches, sharding=self.sharding)

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
        for number, group in enumerate(self.groups):
            yield from self._named_whole(number, group, lambda unit: unit.master)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter's name with its whole gradient after UPDATE's sums, as `named_masters`."""
        for number, group in enumerate(self.groups):
            if group.is_trained:
                yield from self._named_whole(number, group, lambda unit: unit.summed)

    def _named_whole(
        self, number: int, group: "Group", piece: Callable[[Unit], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        pp, unit = self.mesh.pp, self.units_by_number.get(number)
        source = group.holders[0]
        whole = unit.whole(piece(unit)) if unit is not None else None
        if pp.rank != source or whole is None:
            whole = torch.empty(sum(group.pieces.counts), dtype=group.master_dtype, device=self.mesh.device)
        broadcast_(whole, pp, source=source)
        return ((slot.name, slot.view(whole)) for slot in group.slots)

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
    pieces = model.pieces()
    placement = mesh.layout.placement
    order = schedule(
        mesh.layout.schedule,
        ranks=mesh.pp.size,
        microbatches=microbatches,
        most_stages=max(len(pieces) - 2, 1),
    )
    segments_of_stage = [len(pieces)]
    if order.num_segments > 1:
        costs = forward_flops(model.spec, sequence_length).segments
        segments_of_stage = split(costs, stages=order.num_segments)
    rank_of_segment = [
        rank
        for rank, count in zip(order.rank_of_segment, segments_of_stage, strict=True)
        for _ in range(count)
    ]
    groups = _groups(
        model, pieces, segments_of_stage, rank_of_segment,
        ranks=mesh.fsdp.size, how=sharding.pieces, dtype=dtype, sharded=placement.weights,
    )  # fmt: skip
    units = _units(model, groups, mesh=mesh, dtype=dtype)
    weight_gradients = WeightGradients()
    weight_gradients.attach_(model)
    plan = Sharding(
        placement,
        prefetch=sharding.prefetch,
        keep=sharding.accumulate == "whole" or (sharding.accumulate == "auto" and mesh.pp.size > 1),
    )
    program = build(
        order,
        segments_of_stage=segments_of_stage,
        units=[
            UnitUse(group.users, group.is_trained, mesh.layout.size("dp", "cp") * len(group.holders) > 1)
            for group in groups
        ],
        sharding=plan,
        lookups=frozenset(index for index, piece in enumerate(pieces) if piece.is_lookup),
    )
    executor = Executor(
        program,
        {
            index: Segment(piece, weight_gradients)
            for index, piece in enumerate(pieces)
            if rank_of_segment[index] == mesh.pp.rank
        },
        units,
        weight_gradients=weight_gradients,
        mesh=mesh,
        activation=partial(_activation, model, dtype=dtype, device=mesh.device),
    )
    names = iter(piece.name for piece in pieces)
    stages = [list(islice(names, count)) for count in segments_of_stage]
    return ParallelModel(model, mesh, groups, units, stages, program, plan, executor)


def _activation(model: Decoder, batch: Microbatch, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor of the shape of what goes from segment to segment for a microbatch: (B, S, C)."""
    shape = *batch.input_ids_BS.shape, model.spec.hidden_size
    return torch.empty(shape, dtype=dtype, device=device)


def _units(model: Decoder, groups: Sequence["Group"], *, mesh: Mesh, dtype: torch.dtype) -> dict[int, Unit]:
    """Make the units of this rank, by number. All ranks come to the same process groups in the same order."""
    named = dict(model.named_parameters())
    sites = parameter_sites(model)
    placement = mesh.layout.placement
    units = {}
    for number, group in enumerate(groups):
        replicas = (
            mesh.holders(group.holders, "dp", "cp") if len(group.holders) > 1 else mesh.joint("dp", "cp")
        )
        if mesh.pp.rank in group.holders:
            units[number] = Unit(
                group.name,
                {slot.name: named[slot.name] for slot in group.slots},
                sites,
                pieces=group.pieces,
                placement=placement,
                shards=mesh.fsdp,
                replicas=replicas,
                dtype=dtype,
                master_dtype=group.master_dtype,
                device=mesh.device,
            )
    if placement.weights:
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


@dataclass(frozen=True)
class Group:
    """The parameters of a unit, as every rank knows them.

    Attributes:
        name: the segments they belong to, as in ``layer.3 to layer.4``.
        slots: the parameters in the order of the unit's flat buffer.
        pieces: how the buffer is cut over the fsdp axis.
        users: the segments that compute with any of them.
        holders: the pipeline ranks that hold them, in order.
        is_trained: False where they are frozen.
        master_dtype: of master weights and gradients.
    """

    name: str
    slots: Sequence[Slot]
    pieces: Pieces
    users: tuple[int, ...]
    holders: tuple[int, ...]
    is_trained: bool
    master_dtype: torch.dtype


def _groups(
    model: nn.Module,
    pieces: Sequence[Piece],
    segments_of_stage: Sequence[int],
    rank_of_segment: Sequence[int],
    *,
    ranks: int,
    how: str,
    dtype: torch.dtype,
    sharded: bool,
) -> list[Group]:
    """Put parameters together that are gathered and reduced together.

    A unit holds the trained or the frozen parameters of one segment, or of several small neighbours in one
    stage. Parameters that other pipeline ranks hold as well are a unit of their own.
    """
    owned = parameter_users(model, [piece.modules for piece in pieces])
    named = dict(model.named_parameters())
    itemsize = master_dtype(dtype).itemsize
    sizes = [sum(named[name].numel() * itemsize for name in parameters) for parameters in owned]
    members: list[tuple[str, bool, tuple[int, ...], dict[str, tuple[int, ...]]]] = []
    for stage in _ranges(segments_of_stage):
        for joined in segments_of_units([sizes[segment] for segment in stage], sharded=sharded):
            span = range(stage.start + joined.start, stage.start + joined.stop)
            found: dict[tuple[bool, tuple[int, ...]], dict[str, tuple[int, ...]]] = {}
            for segment in span:
                for name, users in owned[segment].items():
                    holders = tuple(sorted({rank_of_segment[user] for user in users}))
                    found.setdefault((named[name].requires_grad, holders), {})[name] = users
            title = " to ".join(dict.fromkeys(pieces[segment].name for segment in (span[0], span[-1])))
            for (trained, holders), users_of in sorted(
                found.items(), key=lambda item: (-item[0][0], item[0][1])
            ):
                members.append((title, trained, holders, users_of))
    shapes = [{name: tuple(named[name].shape) for name in users_of} for *_, users_of in members]
    return [
        Group(
            title,
            slots(shape, piece.order),
            piece,
            tuple(sorted({user for users in users_of.values() for user in users})),
            holders,
            trained,
            master_dtype(dtype),
        )
        for (title, trained, holders, users_of), shape, piece in zip(
            members, shapes, cut(shapes, ranks=ranks, how=how), strict=True
        )
    ]


def _ranges(counts: Sequence[int]) -> list[range]:
    """Neighbouring ranges of these lengths, from 0."""
    return [range(*pair) for pair in pairwise(accumulate(counts, initial=0))]
