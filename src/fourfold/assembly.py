"""The one place where the axes meet: a decoder is laid out on a mesh, axis by axis."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fourfold.batch.rank_units import rank_units_
from fourfold.batch.unit_specs import Copies, UnitSpec, unit_specs
from fourfold.batch.units import Unit
from fourfold.block_memory import BlockSizes
from fourfold.build import Sharding, UnitUse, build
from fourfold.channel.decoder import cut_channels_
from fourfold.channel.tensor_parallel import TensorParallel
from fourfold.errors import UserError
from fourfold.execute import Executor
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.parallel_model import ParallelModel
from fourfold.program.liveness import Block
from fourfold.program.program import Program
from fourfold.recompute.costs import decoder_blocks
from fourfold.segment import Segment
from fourfold.sequence.decoder import cut_sequences_
from fourfold.specs import ShardingSection
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
from fourfold.stages import Stages, cut_layers
from fourfold.weight_gradients import WeightGradients

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
        sequence_length: tokens of a sequence. Needed with pp, since it decides what attention costs beside
            the head where layers are dealt to stages; with tp, unless its option says that the ranks are not
            to divide the tokens; and with a memory budget. Nothing else depends on it.
        rows: of a microbatch on a rank; a memory budget depends on them.
        recompute: which forwards run again instead of being kept.

    Raises:
        UserError: where the length of a sequence is needed and not given.
    """
    length = _known_length(sequence_length, mesh, recompute)
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
    blocks = _block_costs(model, mesh, recompute, rows=rows, sequence_length=length, dtype=dtype)
    program = _program(stages, specs, mesh, sharded, recompute, blocks)
    executor = _executor(
        model, mesh, stages, units, program, tensor_parallel, dtype=dtype, recompute=recompute
    )
    return ParallelModel(
        model, mesh, stages, specs, units, program, sharded, executor, tensor_parallel, context
    )


def _known_length(sequence_length: int | None, mesh: Mesh, recompute: RecomputeName) -> int:
    """Return the tokens of a sequence; 1 where they are not known and make no difference."""
    if sequence_length is not None:
        return sequence_length
    problems = []
    if mesh.pp.size > 1:
        problems.append(
            f"pp={mesh.pp.size} deals layers to stages by what they cost, and attention costs more the "
            "longer a sequence is (Layer axis): give sequence_length, the tokens of a row"
        )
    if mesh.tp.size > 1 and mesh.layout.options.get("tp") != "allreduce":
        problems.append(
            f"tp={mesh.tp.size} cuts tokens where its ranks divide them (Channel axis): "
            f"give sequence_length, or use tp{mesh.tp.size}:allreduce"
        )
    if recompute.name == "budget":
        problems.append(
            f"recompute='{recompute}' counts the bytes of activations: give sequence_length and rows, those "
            "of a microbatch on a rank"
        )
    if problems:
        raise UserError(*problems)
    return 1


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


def _program(
    stages: Stages,
    specs: Sequence[UnitSpec],
    mesh: Mesh,
    sharding: Sharding,
    recompute: RecomputeName,
    blocks: Sequence[Block],
) -> Program:
    """What each pipeline rank does in a step."""
    return build(
        stages.order,
        segments_of_stage=[len(stage) for stage in stages.pieces],
        units=[UnitUse(spec.users, spec.is_trained, _is_replicated(spec, mesh)) for spec in specs],
        sharding=sharding,
        lookups=frozenset(index for index, piece in enumerate(stages.segments) if piece.is_lookup),
        recompute=recompute,
        blocks=blocks,
    )


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
