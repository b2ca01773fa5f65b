"""A decoder laid out on a mesh, in numbers: its stages, segments, units and program, without a weight.

It is what `fourfold.assembly.parallelize` makes of the same model and layout, for every pipeline rank
at once and for any number of ranks. A test holds the two against each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod

from fourfold.batch.costs import UnitSize
from fourfold.batch.pieces import Pieces, cut_apart
from fourfold.batch.reduction import blocks_of_segments
from fourfold.block_memory import BlockSizes
from fourfold.build import Sharding, UnitUse, written
from fourfold.channel.cuts import Cut, in_parts, vocabulary, whole
from fourfold.channel.plans import decoder_plan
from fourfold.errors import UserError
from fourfold.flops import forward_flops
from fourfold.layer.schedules import schedule_of
from fourfold.layer.split import split
from fourfold.program.check import check
from fourfold.program.program import Program
from fourfold.recompute.costs import decoder_blocks
from fourfold.sequence.rows import Documents
from fourfold.specs import Layout, ModelSpec, RunSpec, ShardingSection
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
from fourfold.traffic import Event

ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, by the dtypes that computation can run in."""


def master_dtype(dtype: str) -> str:
    """The dtype of master weights, gradients and their reduction: float32 at least."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class Step:
    """What is to be trained in one step, and how.

    Attributes:
        spec: the model.
        layout: how it is cut over ranks.
        batch: sequences of a step, over all ranks, each of ``sequence_length`` tokens.
        microbatches: into how many pieces a rank's share of a batch is cut.
        dtype: what computation runs in.
        sharding: how weights are cut over the fsdp axis.
        recompute: which forwards run again.
        optimizer: ``adamw`` or ``muon``.
    """

    spec: ModelSpec
    layout: Layout
    batch: int
    sequence_length: int
    microbatches: int = 1
    dtype: str = "float32"
    sharding: ShardingSection = field(default_factory=ShardingSection)
    recompute: RecomputeName = NO_RECOMPUTATION
    optimizer: str = "adamw"

    @classmethod
    def of_run(cls, run: RunSpec, spec: ModelSpec) -> "Step":
        """A step of a training run, whose model is ``spec``."""
        return cls(
            spec,
            run.layout,
            batch=run.training.batch,
            sequence_length=run.data.sequence_length,
            microbatches=run.training.microbatches,
            dtype=run.training.dtype,
            sharding=run.resolved_sharding,
            recompute=run.training.recompute,
            optimizer=run.optimizer.name,
        )

    def problems(self, world_size: int | None = None) -> list[str]:
        """Every rule of the layout, or else of its schedule, that the step breaks.

        ``world_size`` is the number of ranks where it is known.
        """
        problems = self.layout.problems(
            self.spec,
            batch=self.batch,
            microbatches=self.microbatches,
            sequence_length=self.sequence_length,
            world_size=world_size,
        )
        if not problems:
            try:
                schedule_of(self.layout, microbatches=self.microbatches, layers=self.spec.num_hidden_layers)
            except UserError as error:
                problems += error.messages
        return problems

    @property
    def rows(self) -> int:
        """Sequences of a microbatch on a rank."""
        return self.batch // (self.microbatches * self.layout.size("dp", "fsdp"))

    @property
    def window_share(self) -> float | None:
        """How far back a token sees besides itself, as a share of a row; None for all."""
        window = self.spec.sliding_window
        return None if window is None else (window - 1) / self.sequence_length

    def documents_of(self, rank: int, rows: Documents) -> list[Documents]:
        """What the microbatches of a rank have of the rows of a global batch; see `fourfold.training`."""
        at, data = self.layout.coordinates(rank), self.layout.size("dp", "fsdp")
        place = at["dp"] * self.layout.fsdp + at["fsdp"]
        first = [(m * data + place) * self.rows for m in range(self.microbatches)]
        return [rows[start : start + self.rows] for start in first]

    def taking_part(self, event: Event) -> int:
        """How many ranks a message of the step is of: of the cp axis, the exchange of Ulysses has its own."""
        if (event.op, event.axis) == ("all_to_all", "cp"):
            return self.sizes.ulysses
        return self.layout.size(*event.axis.split(","))

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the dtype that computation runs in."""
        return ITEMSIZES[self.dtype]

    @property
    def sizes(self) -> BlockSizes:
        """What the bytes of a block follow from."""
        return BlockSizes.of(
            self.spec,
            self.layout,
            rows=self.rows,
            sequence_length=self.sequence_length,
            itemsize=self.itemsize,
            recompute=self.recompute,
        )


@dataclass(frozen=True)
class UnitOutline:
    """Parameters that are gathered and reduced together.

    Attributes:
        shapes: of its parameters on a rank of tp, by name.
        pieces: how they are cut over the ranks of fsdp.
        users: the segments that compute with them.
        holders: the pipeline ranks that hold them.
        over_tp: whether its gradient is summed over ranks of tp.
    """

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Pieces
    users: tuple[int, ...]
    holders: tuple[int, ...]
    over_tp: bool

    def size(self, shard: int, dtype: str) -> UnitSize:
        """What the formulas of the Batch axis need to know, on rank ``shard`` of the pieces."""
        master = master_dtype(dtype)
        return UnitSize(
            self.pieces.counts, shard, dtype, ITEMSIZES[dtype], master, ITEMSIZES[master], True, self.over_tp
        )


@dataclass(frozen=True)
class Outline:
    """See `outline`.

    Attributes:
        step: what is outlined.
        order: the schedule: in which order the stages' forwards and backwards run.
        program: what each pipeline rank does.
        blocks: the names of each segment's blocks, in order: ``embed``, ``layer.0``..., ``head``.
        units: by their number in the program.
    """

    step: Step
    order: Program
    program: Program
    blocks: Sequence[Sequence[str]]
    units: Sequence[UnitOutline]

    def units_on(self, rank: int, shard: int) -> dict[int, UnitSize]:
        """The units of a pipeline rank by number, on rank ``shard`` of their pieces."""
        return {
            number: unit.size(shard, self.step.dtype)
            for number, unit in enumerate(self.units)
            if rank in unit.holders
        }

    def heaviest_shard(self, rank: int) -> int:
        """Which rank of the pieces owns most, on a pipeline rank."""
        counts = [unit.pieces.counts for unit in self.units if rank in unit.holders]
        loads = [sum(owned) for owned in zip(*counts, strict=True)]
        return loads.index(max(loads))

    def optimizer_bytes(self, rank: int, shard: int) -> int:
        """What the optimizer keeps of what a rank owns: two moments; of matrices of layers Muon keeps one."""
        total = 0
        for unit in self.units:
            if rank not in unit.holders:
                continue
            owned = unit.pieces.counts[shard]
            total += 2 * owned
            if self.step.optimizer == "muon":
                first, stop = sum(unit.pieces.counts[:shard]), sum(unit.pieces.counts[: shard + 1])
                offset = 0
                for name in unit.pieces.order:
                    size = prod(unit.shapes[name])
                    if len(unit.shapes[name]) == 2 and name.startswith("model.layers."):
                        total -= max(0, min(stop, offset + size) - max(first, offset))
                    offset += size
        return total * ITEMSIZES[master_dtype(self.step.dtype)]


def outline(step: Step, *, tp_rank: int = 0) -> Outline:
    """Lay a decoder out, as one rank of tp sees it.

    Args:
        step: what to lay out. Its layout fits the model and the batch (`Layout.problems`).
        tp_rank: of the tp axis: parts of a vocabulary may be unequal.

    Raises:
        UserError: where the schedule does not fit, or a memory budget is too small.
    """
    spec, layout = step.spec, step.layout
    cuts = decoder_cuts(spec, layout.tp, sequence_parallel=layout.sequence_parallel(step.sequence_length))
    order = schedule_of(layout, microbatches=step.microbatches, layers=spec.num_hidden_layers)
    names = ["embed", *(f"layer.{index}" for index in range(spec.num_hidden_layers)), "head"]
    sizes = dict.fromkeys(names, 0)
    for name, found in cuts.items():
        sizes[block_of(name)] += prod(found.shape) // layout.tp * ITEMSIZES[master_dtype(step.dtype)]
    stages = dealt(
        list(sizes.values()),
        counts=blocks_of_stages(spec, step.sequence_length, stages=order.num_segments),
        joined=step.recompute.is_none,
        layout=layout,
    )
    blocks = [names[span.start : span.stop] for spans in stages for span in spans]
    per_stage = [len(spans) for spans in stages]
    rank_of_segment = [
        rank for rank, size in zip(order.rank_of_segment, per_stage, strict=True) for _ in range(size)
    ]
    units = _units(step, cuts, blocks, rank_of_segment, tp_rank)
    replicas = layout.size(*layout.replica_axes)
    check(order)  # a file may hold anything; what the passes write is checked before it runs
    program = written(
        order,
        segments_of_stage=per_stage,
        units=[
            UnitUse(unit.users, replicated=replicas * len(unit.holders) > 1 or unit.over_tp) for unit in units
        ],
        sharding=Sharding.of(layout, step.sharding),
        lookups=frozenset(index for index, names in enumerate(blocks) if names == ["embed"]),
        recompute=step.recompute,
        blocks=decoder_blocks(step.sizes),
    )
    return Outline(step, order, program, blocks, units)


def blocks_of_stages(spec: ModelSpec, sequence_length: int, *, stages: int) -> list[int]:
    """Return how many blocks each stage of a pipeline gets, by their FLOPs over rows of this many tokens."""
    return split(forward_flops(spec, sequence_length).segments, stages=stages)


def dealt(sizes: Sequence[int], *, counts: Sequence[int], joined: bool, layout: Layout) -> list[list[range]]:
    """Return for each stage of a pipeline its segments, each as a span of the model's blocks.

    Args:
        sizes: bytes of each block's gradients, by whole shapes: ranks of tp hold unequal parts of a
            vocabulary, and must come to the same segments.
        counts: how many blocks each stage has.
        joined: False where each block is a segment of its own, as with recomputation: what runs again is a
            block.
        layout: see `blocks_of_segments`.
    """
    found = []
    for first, stop in pairwise(accumulate(counts, initial=0)):
        spans = [range(index, index + 1) for index in range(stop - first)]
        if joined:
            spans = blocks_of_segments(sizes[first:stop], layout)
        found.append([range(first + span.start, first + span.stop) for span in spans])
    return found


def block_of(parameter: str) -> str:
    """The block that a parameter belongs to; a tied head's is the embedding's."""
    if parameter.startswith("model.layers."):
        return f"layer.{parameter.split('.')[2]}"
    return "embed" if parameter.startswith("model.embed_tokens") else "head"


def decoder_cuts(spec: ModelSpec, ranks: int, *, sequence_parallel: bool) -> dict[str, Cut]:
    """The cut of every parameter of a decoder on the tp axis, by name."""
    plan = decoder_plan(spec)
    cuts = {}
    for name, shape in spec.parameter_shapes().items():
        module, _, attribute = name.rpartition(".")
        place, _, short = module.rpartition(".")
        branch = plan.branch(place) or plan.branch(place.rpartition(".")[0])
        cuts[name] = whole(shape, ranks, adds_up=sequence_parallel or branch is not None)
        if ranks == 1:
            continue
        if module in (plan.embedding, plan.head):
            cuts[name] = vocabulary(shape, ranks)
        elif branch is not None and short in branch.columns:
            columns = branch.columns[short]
            cuts[name] = in_parts(shape, 0, ranks, groups=columns.groups, copied=columns.copied)
        elif branch is not None and short in branch.rows and attribute == "weight":
            cuts[name] = in_parts(shape, 1, ranks)
    return cuts


def _units(
    step: Step,
    cuts: Mapping[str, Cut],
    blocks: Sequence[Sequence[str]],
    rank_of_segment: Sequence[int],
    tp_rank: int,
) -> list[UnitOutline]:
    """The units, in the order and with the pieces that `fourfold.batch.unit_specs` gives them."""
    segment_of = {name: index for index, names in enumerate(blocks) for name in names}
    last = len(blocks) - 1
    grouped: dict[tuple[int, tuple[int, ...], tuple[int, bool]], dict[str, tuple[int, ...]]] = {}
    for name, found in cuts.items():
        own = segment_of[block_of(name)]
        is_shared = step.spec.tie_word_embeddings and name == "model.embed_tokens.weight"
        users = (own, last) if is_shared and own != last else (own,)
        holders = tuple(sorted({rank_of_segment[user] for user in users}))
        copies = (found.copies, found.adds_up) if step.layout.tp > 1 and found.copies > 1 else (1, False)
        grouped.setdefault((own, holders, copies), {})[name] = users
    keys = sorted(grouped)
    shapes = [{name: cuts[name].local_shape(tp_rank) for name in grouped[key]} for key in keys]
    shards = step.layout.size(*step.layout.shard_axes)
    pieces = cut_apart(shapes, [key[1:] for key in keys], ranks=shards, how=step.sharding.pieces)
    return [
        UnitOutline(
            shapes[number],
            pieces[number],
            tuple(sorted({user for users in grouped[key].values() for user in users})),
            key[1],
            over_tp=key[2][1],
        )
        for number, key in enumerate(keys)
    ]
