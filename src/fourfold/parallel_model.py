"""The one place where the axes meet: a model, a mesh, and the program that trains the one on the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fourfold.batch.rank_units import rank_units_
from fourfold.batch.unit_specs import Copies, UnitSpec, unit_specs
from fourfold.batch.units import Unit
from fourfold.block_memory import BlockSizes
from fourfold.build import Sharding, UnitUse, build, evaluation
from fourfold.channel.cuts import Cut
from fourfold.channel.decoder import cut_channels_
from fourfold.channel.tensor_parallel import TensorParallel
from fourfold.collectives import all_gather, broadcast_
from fourfold.errors import UserError
from fourfold.execute import Executor
from fourfold.mesh import Axis, Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.named_weights import NamedWeights
from fourfold.program.actions import COMPUTE, TRANSFERS
from fourfold.program.liveness import Block
from fourfold.program.program import Program
from fourfold.recompute.costs import decoder_blocks
from fourfold.segment import Segment
from fourfold.sequence.attention import ContextAttention
from fourfold.sequence.decoder import cut_sequences_
from fourfold.specs import ShardingSection
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
from fourfold.stages import Stages, cut_layers
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
        stages: which blocks each pipeline stage has, and the segments that they make.
        unit_specs: the units of all pipeline ranks, by number in the program.
        units_by_number: the flat buffers of weights and gradients that this rank holds.
        program: what each pipeline rank does in a training step.
        sharding: how the units are spread on the Batch axis.
        executor: runs it.
        tensor_parallel: how the modules are cut on the tp axis, None where it has one rank.
        context: attention over the ranks of cp, None where it has one.
    """

    model: Decoder
    mesh: Mesh
    stages: Stages
    unit_specs: Sequence[UnitSpec]
    units_by_number: Mapping[int, Unit]
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
        for block in self.stages.before_head:
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
    length = _known_length(sequence_length, mesh)
    tensor_parallel = cut_channels_(model, mesh, length)
    context = cut_sequences_(model, mesh)
    cuts = {} if tensor_parallel is None else tensor_parallel.cuts
    stages = cut_layers(
        model,
        mesh,
        microbatches=microbatches,
        sequence_length=length,
        dtype=dtype,
        cuts=cuts,
        joined=recompute.is_none,
    )
    specs = unit_specs(
        model,
        {piece.name: piece.modules for piece in stages.segments},
        rank_of_segment=stages.rank_of_segment,
        shards=mesh.shards.size,
        pieces=sharding.pieces,
        dtype=dtype,
        copies={name: Copies(cut.copies, cut.adds_up) for name, cut in cuts.items() if cut.copies > 1},
    )
    units = rank_units_(model, specs, mesh=mesh, dtype=dtype)
    sharded = Sharding.of(mesh.layout, sharding)
    program = build(
        stages.order,
        segments_of_stage=[len(stage) for stage in stages.pieces],
        units=[UnitUse(spec.users, spec.is_trained, _is_replicated(spec, mesh)) for spec in specs],
        sharding=sharded,
        lookups=frozenset(index for index, piece in enumerate(stages.segments) if piece.is_lookup),
        recompute=recompute,
        blocks=_block_costs(model, mesh, recompute, rows=rows, sequence_length=length, dtype=dtype),
    )
    executor = _executor(
        model, mesh, stages, units, program, tensor_parallel, dtype=dtype, recompute=recompute
    )
    return ParallelModel(
        model, mesh, stages, specs, units, program, sharded, executor, tensor_parallel, context
    )


def _known_length(sequence_length: int | None, mesh: Mesh) -> int:
    """Return the tokens of a sequence; 1 where they are not known and make no difference."""
    if sequence_length is None and mesh.tp.size > 1 and mesh.layout.options.get("tp") != "allreduce":
        raise UserError(
            f"tp={mesh.tp.size} cuts tokens where its ranks divide them (Channel axis): "
            f"give sequence_length, or use tp{mesh.tp.size}:allreduce"
        )
    return sequence_length or 1


def _block_costs(
    model: Decoder,
    mesh: Mesh,
    recompute: RecomputeName,
    *,
    rows: int,
    sequence_length: int,
    dtype: torch.dtype,
) -> Sequence[Block]:
    """What the plan of recomputation weighs; nothing where nothing is recomputed."""
    if recompute.is_none:
        return ()
    sizes = BlockSizes.of(
        model.spec,
        mesh.layout,
        rows=rows,
        sequence_length=sequence_length,
        itemsize=dtype.itemsize,
        recompute=recompute,
    )
    return decoder_blocks(sizes)


def _executor(
    model: Decoder,
    mesh: Mesh,
    stages: Stages,
    units: Mapping[int, Unit],
    program: Program,
    tensor_parallel: TensorParallel | None,
    *,
    dtype: torch.dtype,
    recompute: RecomputeName,
) -> Executor:
    """What runs the program with the segments and units of this rank."""
    weight_gradients = WeightGradients()
    weight_gradients.attach_(model)
    ends = 0, len(stages.segments) - 1  # of embedding and head nothing is kept
    ranks = mesh.tp.size
    kept = {"keeps": recompute.keeps(tp=ranks), "unread": recompute.unread(tp=ranks)}
    segments = {
        index: Segment(piece, weight_gradients, **({} if index in ends else kept))
        for index, (piece, rank) in enumerate(zip(stages.segments, stages.rank_of_segment, strict=True))
        if rank == mesh.pp.rank
    }
    return Executor(
        program,
        segments,
        units,
        weight_gradients=weight_gradients,
        mesh=mesh,
        activation=partial(_activation, model, tensor_parallel, dtype=dtype, device=mesh.device),
    )


def _is_replicated(spec: UnitSpec, mesh: Mesh) -> bool:
    """Whether ranks besides those of fsdp add to a unit's gradient."""
    return mesh.layout.size(*mesh.layout.replica_axes) * len(spec.holders) * spec.copies.summed > 1


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
