"""The one place where the axes meet: a model, a mesh, and the program that trains the one on the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn

from fourfold.batch.reduction import blocks_of_segments
from fourfold.batch.unit_specs import Copies, UnitSpec, unit_specs
from fourfold.batch.units import Unit, master_dtype
from fourfold.build import Sharding, UnitUse, build, evaluation
from fourfold.channel.cuts import Cut
from fourfold.channel.plans import decoder_plan
from fourfold.channel.tensor_parallel import TensorParallel, tensor_parallel_
from fourfold.channel.vocabulary import vocabulary_parallel_cross_entropy_sum
from fourfold.collectives import all_gather, broadcast_
from fourfold.errors import UserError
from fourfold.execute import Executor
from fourfold.flops import forward_flops
from fourfold.layer.schedules import schedule_of
from fourfold.layer.split import split
from fourfold.mesh import Axis, Mesh
from fourfold.models import Decoder, Microbatch, Piece, join
from fourfold.models.decoder import Attention
from fourfold.models.parameters import parameter_sites, parameter_users
from fourfold.named_weights import NamedWeights
from fourfold.program.actions import COMPUTE, TRANSFERS, Program
from fourfold.recompute.costs import decoder_blocks
from fourfold.segment import Segment
from fourfold.sequence.attention import ContextAttention
from fourfold.specs import ShardingSection
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
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
        blocks: the names of the blocks of each segment, of all pipeline ranks.
        before_head: the blocks that are joined with the head to the last segment.
        program: what each pipeline rank does in a training step.
        sharding: how the units are spread on the Batch axis.
        executor: runs it.
        tensor_parallel: how the modules are cut on the tp axis, None where it has one rank.
        context: attention over the ranks of cp, None where it has one.
    """

    model: Decoder
    mesh: Mesh
    unit_specs: Sequence[UnitSpec]
    units_by_number: Mapping[int, Unit]
    stages: Sequence[Sequence[str]]
    blocks: Sequence[Sequence[str]]
    before_head: Sequence[Piece]
    program: Program
    sharding: Sharding
    executor: Executor
    tensor_parallel: TensorParallel | None
    context: ContextAttention | None

    @property
    def weights(self) -> NamedWeights:
        """The parameters by name, whole."""
        return NamedWeights(self.mesh, self.unit_specs, self.units_by_number, self.cuts)

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """What the ranks of tp hold of each parameter; empty where tp is 1."""
        return {} if self.tensor_parallel is None else self.tensor_parallel.cuts

    @property
    def units(self) -> Sequence[Unit]:
        """The flat buffers of weights and gradients that this rank holds, in model order."""
        return list(self.units_by_number.values())

    @property
    def counted_units(self) -> Sequence[Unit]:
        """The units that this rank counts in the gradient norm: of several holders the first one does."""
        return [
            unit
            for number, unit in self.units_by_number.items()
            if self.unit_specs[number].holders[0] == self.mesh.pp.rank
            and self.mesh.tp.rank % self.unit_specs[number].copies.count == 0
        ]

    @property
    def norm_axis(self) -> Axis:
        """The ranks whose counted units together are the whole model, each parameter once."""
        return self.mesh.joint("pp", *self.mesh.layout.shard_axes, "tp")

    def step(
        self, batches: Sequence[Microbatch], *, valid_tokens: int, update: Callable[[Tensor], None]
    ) -> Tensor:
        """Run one training step on this rank's rows; see `Executor.step`."""
        actions = self.program.ranks[self.mesh.pp.rank]
        return self.executor.step(actions, self.own(batches), valid_tokens=valid_tokens, update=update)

    def own(self, batches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """This rank's tokens of some rows: all, where the sequence is not cut."""
        if self.context is None:
            return batches
        return [batch.take(self.context.columns(batch.documents)) for batch in batches]

    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Return the sum of the token losses of ``batches``, with forwards only. All ranks call it.

        Pipeline ranks without the last segment get 0: add up over pp and the axes of the batch.
        """
        losses = self.executor.forward(self._forwards(len(batches)), self.own(batches))
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return sum((loss.double() for loss in losses), start=zero)

    @torch.no_grad()
    def last_logits(self, batch: Microbatch) -> Tensor:
        """Return the logits after the last token of the only row, (V,), on all ranks of pp and tp.

        The weights must be there: see `gather_`. All these ranks call it. The row is whole: where cp is
        larger than 1, attention is not this model's own but one for whole rows, as in `fourfold.generate`.
        """
        with nullcontext() if self.tensor_parallel is None else self.tensor_parallel.whole_sequence():
            found = self.executor.forward(self._one_forward, [batch], head=self._last_logits)
        if found and self.tensor_parallel is not None:
            counts = [stop - start for ((start, stop),) in self.cuts["model.embed_tokens.weight"].runs]
            found = [all_gather(found[0], self.mesh.tp, counts=counts)]
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
            yield from self.weights.whole(number, lambda unit: unit.master)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter's name with its whole gradient after UPDATE's sums, as `named_masters`."""
        for number, spec in enumerate(self.unit_specs):
            if spec.is_trained:
                yield from self.weights.whole(number, lambda unit: unit.summed)

    def load_(self, weights: Mapping[str, Tensor]) -> None:
        """Set the master weights, and with them the weights that computation reads."""
        self.weights.load_(weights.__getitem__)
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
    sequence_length: int | None = None,
    rows: int = 1,
    recompute: RecomputeName = NO_RECOMPUTATION,
) -> ParallelModel:
    """Lay ``model`` out on ``mesh``.

    Args:
        model: built on the meta device, or anywhere; its values are not kept (see `ParallelModel.load_`).
            Parameters that need no gradient stay frozen.
        mesh: the ranks.
        microbatches: into how many pieces a rank's share of a batch is cut.
        dtype: what computation runs in; master weights, gradients and reductions are float32 or higher.
        sharding: how weights are cut over the fsdp axis.
        sequence_length: tokens of a sequence. It decides what attention costs beside the head where layers
            are dealt to pipeline stages, and whether the ranks of tp can divide the tokens. Needed with tp,
            unless its option says that they are not to.
        rows: of a microbatch on a rank; a memory budget depends on them.
        recompute: which forwards run again instead of being kept.
    """
    if sequence_length is None and mesh.tp.size > 1 and "tp" not in mesh.layout.options:
        raise UserError(
            f"tp={mesh.tp.size} cuts tokens where its ranks divide them (Channel axis): "
            f"give sequence_length, or use tp{mesh.tp.size}:allreduce"
        )
    sequence_length = sequence_length or 1
    tensor_parallel = _cut_channels_(model, mesh, sequence_length)
    cuts = {} if tensor_parallel is None else tensor_parallel.cuts
    context = _cut_sequences_(model, mesh)
    stages = _stages(model, mesh, microbatches, sequence_length, dtype, cuts=cuts, joined=recompute.is_none)
    pieces = [piece for stage in stages.pieces for piece in stage]
    rank_of_segment = [
        rank for rank, stage in zip(stages.order.rank_of_segment, stages.pieces, strict=True) for _ in stage
    ]
    specs = unit_specs(
        model,
        {piece.name: piece.modules for piece in pieces},
        rank_of_segment=rank_of_segment,
        shards=mesh.shards.size,
        pieces=sharding.pieces,
        dtype=dtype,
        copies={n: Copies(cut.copies, cut.adds_up) for n, cut in cuts.items() if cut.copies > 1},
    )
    units = _units(model, specs, mesh=mesh, dtype=dtype)
    weight_gradients = WeightGradients()
    weight_gradients.attach_(model)
    plan = Sharding(
        mesh.layout.placement,
        prefetch=sharding.prefetch,
        keep=sharding.accumulate == "whole" or (sharding.accumulate == "auto" and mesh.pp.size > 1),
    )
    program = build(
        stages.order,
        segments_of_stage=[len(stage) for stage in stages.pieces],
        units=[UnitUse(spec.users, spec.is_trained, _is_replicated(spec, mesh)) for spec in specs],
        sharding=plan,
        lookups=frozenset(index for index, piece in enumerate(pieces) if piece.is_lookup),
        recompute=recompute,
        blocks=()
        if recompute.is_none
        else decoder_blocks(
            model.spec,
            rows=rows,
            sequence_length=sequence_length,
            itemsize=dtype.itemsize,
            cp=mesh.cp.size,
            tp=mesh.tp.size,
        ),
    )
    mine = [index for index, rank in enumerate(rank_of_segment) if rank == mesh.pp.rank]
    executor = Executor(
        program,
        {index: Segment(pieces[index], weight_gradients) for index in mine},
        units,
        weight_gradients=weight_gradients,
        mesh=mesh,
        activation=partial(_activation, model, tensor_parallel, dtype=dtype, device=mesh.device),
    )
    return ParallelModel(
        model,
        mesh,
        specs,
        units,
        stages.names,
        [piece.blocks for piece in pieces],
        stages.before_head,
        program,
        plan,
        executor,
        tensor_parallel,
        context,
    )


def _cut_channels_(model: Decoder, mesh: Mesh, sequence_length: int) -> TensorParallel | None:
    """Cut the model on the tp axis, and its loss with it."""
    if mesh.tp.size == 1:
        return None
    parallel = tensor_parallel_(
        model,
        decoder_plan(model.spec),
        mesh.tp,
        sequence_parallel=mesh.layout.sequence_parallel(sequence_length),
    )
    ((first, _),) = parallel.cuts["model.embed_tokens.weight"].runs[mesh.tp.rank]
    model.cross_entropy = partial(
        vocabulary_parallel_cross_entropy_sum, axis=mesh.tp, first=first, vocab_size=model.spec.vocab_size
    )
    model.vocabulary_ranks = mesh.tp.size
    return parallel


def _cut_sequences_(model: Decoder, mesh: Mesh) -> ContextAttention | None:
    """Let the model attend over the ranks of cp."""
    if mesh.cp.size == 1:
        return None
    ring, ulysses = mesh.split("cp", mesh.layout.ulysses(model.spec))
    context = ContextAttention(ring=ring, ulysses=ulysses)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = context
    return context


def _is_replicated(spec: UnitSpec, mesh: Mesh) -> bool:
    """Whether ranks besides those of fsdp add to a unit's gradient."""
    return mesh.layout.size(*mesh.layout.replica_axes) * len(spec.holders) * spec.copies.summed > 1


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
    model: Decoder,
    mesh: Mesh,
    microbatches: int,
    sequence_length: int,
    dtype: torch.dtype,
    *,
    cuts: Mapping[str, Cut],
    joined: bool,
) -> _Stages:
    """Deal the model's blocks to pipeline stages, and join small neighbours of a stage to segments.

    What runs again is a block: with recomputation none are ``joined``.
    """
    blocks = model.pieces()
    order = schedule_of(mesh.layout, microbatches=microbatches, layers=max(len(blocks) - 2, 1))
    counts = [len(blocks)]
    if order.num_segments > 1:
        counts = split(forward_flops(model.spec, sequence_length).segments, stages=order.num_segments)
    itemsize = master_dtype(dtype).itemsize
    owned = parameter_users(model, [block.modules for block in blocks])
    # By the whole shapes: ranks of tp hold unequal parts of a vocabulary, and must come to the same segments.
    numel = {name: prod(cut.shape) // mesh.tp.size for name, cut in cuts.items()}
    numel = numel or {name: parameter.numel() for name, parameter in model.named_parameters()}
    sizes = [sum(numel[name] * itemsize for name in parameters) for parameters in owned]
    names, pieces = [], []
    for first, stop in pairwise(accumulate(counts, initial=0)):
        stage = blocks[first:stop]
        spans = [range(index, index + 1) for index in range(len(stage))]
        if joined:
            spans = blocks_of_segments(sizes[first:stop], sharded=mesh.layout.placement.weights)
        names.append([block.name for block in stage])
        pieces.append([join(stage[span.start : span.stop]) for span in spans])
    return _Stages(order, names, pieces, stage[spans[-1].start : -1])


def _activation(
    model: Decoder,
    tensor_parallel: TensorParallel | None,
    batch: Microbatch,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """An empty tensor of the shape of what goes from segment to segment for a microbatch.

    (B, S, C), or with sequence parallelism (B, S / tp, C).
    """
    B, S = batch.input_ids_BS.shape
    if tensor_parallel is not None and tensor_parallel.sequence_parallel:
        S //= tensor_parallel.axis.size
    return torch.empty(B, S, model.spec.hidden_size, dtype=dtype, device=device)


def _units(model: Decoder, specs: Sequence[UnitSpec], *, mesh: Mesh, dtype: torch.dtype) -> dict[int, Unit]:
    """Make the units of this rank, by number. All ranks make the same process groups in the same order."""
    named = dict(model.named_parameters())
    sites = parameter_sites(model)
    units = {}
    for number, spec in enumerate(specs):
        replicas = mesh.sharing(*mesh.layout.replica_axes, stages=spec.holders, copies=spec.copies.summed)
        if mesh.pp.rank in spec.holders:
            units[number] = Unit(
                spec.name,
                {slot.name: named[slot.name] for slot in spec.slots},
                sites,
                pieces=spec.pieces,
                placement=mesh.layout.placement,
                shards=mesh.shards,
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
